"""Run one trace through every memory: its waste, its batch sizes, and its latencies.

PagedAttention Figures 2, 12 and 13 in one table (and vAttention Figure 1, which illustrates the same): OPT-13B on the
paper's A100 and a model with windows, simulated, and the bundled model on this machine's CPU. Each memory in
config.MEMORIES has a row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from papers import serving, unlike_serving
from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured
from quire.bench.document import short, table
from quire.bench.drive import Decoding, Load, drive
from quire.bench.latency import latencies
from quire.bench.workloads import parse, poisson
from quire.config import MEMORIES, EngineConfig
from quire.memory.answers import Usage
from quire.sim.simulation import Objective, mean_usage
from quire.startup.build import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = ("paged", "orca-oracle", "orca-pow2", "orca-max", "ft")  # the paper's order, best first
MOST_LEN = 2048  # of a sequence, in both runs
KINDS = ("used", "reserved", "internal", "external")


class Case(NamedTuple):
    """A trace: a number of requests with a workload's lengths, and Poisson arrivals at `rate` a second."""

    by: str
    device: str
    workload: str
    requests: int
    rate: float


SIMULATED = Case("simulated", "OPT-13B on an A100 with 12 GiB of KV", "sharegpt", 1200, 2.0)
# At this rate requests always wait in every memory, so that memory limits the batch, not arrivals.
REAL = Case("real", "the bundled model, 8,192 tokens of KV, seconds of one thread's CPU time", "sharegpt", 48, 64.0)
REAL_TOKENS = 8192
# A model of unlike layers: KV outside its windows counts as waste in every memory.
WINDOWED = unlike_serving.Case("ministral-8b", unlike_serving.H100, "longdoc@20")
WINDOWS = "simulated, windows"


class Ran(NamedTuple):
    """A run of a memory: bytes by category (mean over time), requests in memory (mean over steps), mean end-to-end
    latency / output length in seconds, and requests and output tokens a second."""

    by: str
    memory: str
    usage: Usage
    batch: float
    normalised: float
    requests_per_s: float
    preemptions: int

    def share(self, kind: str) -> float:
        """Return a category's share of the memory that is not free or cached, so that the trace's end does not count as
        waste."""
        taken = sum(getattr(self.usage, name) for name in KINDS)
        return float(getattr(self.usage, kind)) / taken if taken else 0.0


def every_memory() -> Reproduction:
    """Compare all memories, simulated and real."""
    runs = [*simulated(SIMULATED), *windowed(WINDOWED), *real(REAL)]
    return Reproduction(_verdicts(runs), _text(runs), partial(_draw, runs))


def simulated(case: Case) -> list[Ran]:
    """Simulate the case in every memory at the costs of the paper's A100."""
    load, runs = serving.Load("a100-13b", case.workload), []
    for memory in MEMORIES:
        print(f"c1: {memory}, simulated", file=sys.stderr)
        trace = load.trace(case.rate, case.requests / case.rate)
        outcome = load.serve(memory, trace)
        latency = Objective("mean", "normalised", 1.0).value(outcome.requests)
        run = outcome.totals
        runs.append(
            Ran(
                case.by, memory, mean_usage(outcome.timeline), run.mean_running, latency, len(trace) / run.seconds,
                run.preemptions,
            )
        )  # fmt: skip
    return runs


def real(case: Case) -> list[Ran]:
    """Run the case through each memory with the bundled model in float32. The clock is this process's CPU time: one
    thread does everything, so that other processes do not affect it. It stops in sleep, so the first request comes at
    0, and the rate must keep the engine busy."""
    times = np.array(poisson(case.requests, case.rate, serving.SEED))
    arrivals = Load((times - times[0]).tolist())
    runs = []
    for memory in MEMORIES:
        print(f"c1: {memory}, real", file=sys.stderr)
        config = EngineConfig(
            memory=memory, dtype="float32", device="cpu", threads=1, kv_tokens=REAL_TOKENS, max_model_len=MOST_LEN,
            enable_prefix_caching=False, seed=serving.SEED,
        )  # fmt: skip
        built = build(config)
        built.engine.clock = time.process_time
        jobs = parse(f"{case.workload}@{case.requests}").jobs(built.spec.vocab_size, serving.SEED)
        traces, facts = drive(built.engine, jobs, arrivals, Decoding())
        built.engine.close()
        usage = Usage(*(int(facts["memory_bytes"][name]) for name in Usage._fields))
        normalised = latencies(traces)["normalised_s"]
        assert normalised is not None, "requests were served"
        seconds = max(trace.events[-1][0] for trace in traces)
        runs.append(
            Ran(
                case.by, memory, usage, facts["mean_running"], normalised["mean"], len(traces) / seconds,
                facts["preemptions"],
            )
        )  # fmt: skip
    return runs


def windowed(case: unlike_serving.Case) -> list[Ran]:
    """Run requests that come at once through every memory. Memory that running or later tokens read is used; the rest
    of the allocated memory is internal waste."""
    runs = []
    for memory in MEMORIES:
        print(f"c1: {memory}, windows, simulated", file=sys.stderr)
        run = unlike_serving.simulated(case, "jenga", sampled=0.5, memory=memory)
        kinds = ("full", "window", "wasted", "free")
        means = [sum(getattr(moment, kind) for moment in run.memory) // len(run.memory) for kind in kinds]
        full, window, wasted, free = means
        usage = Usage(full + window, 0, 0, wasted, 0, free)
        runs.append(Ran(WINDOWS, memory, usage, run.batch, run.normalised, run.requests_per_s, run.preemptions))
    return runs


def _windowed_verdicts(of: Mapping[str, Ran]) -> list[Result]:
    """Judge that memory by layer type holds more than any other that keeps a token in every layer."""
    paged, uniform = of["paged"], of["uniform"]
    share = paged.share("used") > uniform.share("used")
    return [
        _claim("C1", "windows: share of taken KV memory that tokens need: paged > uniform", share, "simulated"),
        _claim("C1", "windows: mean batch that decodes: paged > uniform", paged.batch > uniform.batch, "simulated"),
        *_numbers([run._replace(by="simulated", memory=f"windows, {run.memory}") for run in of.values()]),
    ]


def _verdicts(runs: Sequence[Ran]) -> list[Result]:
    """Judge the papers' order of the systems; then list each memory's numbers, for which the papers have none."""
    results = []
    for by in dict.fromkeys(run.by for run in runs):
        of = {run.memory: run for run in runs if run.by == by}
        if by == WINDOWS:
            results += _windowed_verdicts(of)
            continue
        ordered = [of[memory] for memory in ORDER]
        for what, falls in (
            ("mean batch", [run.batch for run in ordered]),
            ("share of taken KV memory that holds tokens", [run.share("used") for run in ordered[:4]]),
            ("normalised latency, ascending", [-run.normalised for run in ordered]),
        ):
            order = " > ".join(ORDER[: len(falls)])
            results.append(_claim("C1", f"{what}: {order}", falls == sorted(falls, reverse=True), by))
        paged, oracle = of["paged"].share("used"), of["orca-oracle"].share("used")
        results.append(_claim("V-F1", "a reservation wastes memory even if its length is known", oracle < paged, by))
        results += _numbers([*of.values()])
    return results


def _numbers(runs: Sequence[Ran]) -> list[Result]:
    return [
        measured("C1", f"{run.memory}: {what}", value, unit, run.by)
        for run in runs
        for what, value, unit in (
            ("holds tokens", round(100 * run.share("used"), 1), "% of taken KV memory"),
            ("mean batch", round(run.batch, 2), "requests"),
            ("mean normalised latency", round(1000 * run.normalised, 1), "ms a token"),
        )
    ]


def _claim(row: str, what: str, holds: bool, by: str) -> Result:
    return Result(row, what, True, holds, "", HOLDS if holds else DIFFERS, by)


def _text(runs: Sequence[Ran]) -> str:
    head = ("memory", "by", *(f"{kind} %" for kind in KINDS), "mean batch", "of paged's", "normalised ms", "requests/s",
            "preempted")  # fmt: skip
    whole = {run.by: run.batch for run in runs if run.memory == "paged"}
    rows: list[tuple[Any, ...]] = [
        (
            run.memory, run.by, *(f"{100 * run.share(kind):.1f}" for kind in KINDS), f"{run.batch:.2f}",
            f"{run.batch / whole[run.by]:.2f}", short(1000 * run.normalised), short(run.requests_per_s),
            run.preemptions,
        )
        for run in runs
    ]  # fmt: skip
    cases = [
        f"{case.by}: {case.device}; {case.workload}@{case.requests}, Poisson at {case.rate:g}/s, seed {serving.SEED}"
        for case in (SIMULATED, REAL)
    ]
    cases.insert(1, f"{WINDOWS}: {WINDOWED.label}, {WINDOWED.budget:.1f} GiB of KV; {WINDOWED.workload}, all at once")
    lines = [*cases, "Shares are of the KV memory that is neither free nor cached.", table(head, rows)]
    return "\n".join(lines)


def _draw(runs: Sequence[Ran]) -> Figure:
    """Draw stacked shares of the memory on the left, batches in the middle and latencies on the right, with a line for
    each case."""
    from quire.bench.plots import COLOURS, figure

    ways = list(dict.fromkeys(run.by for run in runs))
    fig = figure(13, 3.2 * len(ways))
    for line, by in zip(fig.subplots(len(ways), 3, squeeze=False), ways):
        mine = [run for run in runs if run.by == by]
        names = [run.memory for run in mine]
        left = [0.0] * len(mine)
        for kind, colour in zip(KINDS, COLOURS):
            values = [100 * run.share(kind) for run in mine]
            bars = line[0].barh(names, values, left=left, color=colour, label="tokens" if kind == "used" else kind)
            labels = [f"{value:.1f}" if value >= 5 else "" for value in values]
            line[0].bar_label(bars, labels, label_type="center", color="white", fontsize=8)
            left = [a + b for a, b in zip(left, values)]
        line[0].set_xlabel(f"{by}: % of taken KV memory")
        line[0].legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        bars = line[1].barh(names, [run.batch for run in mine], color=COLOURS[0])
        line[1].bar_label(bars, fmt="%.2f", fontsize=8, padding=3)
        line[1].set_xlabel("mean batch, requests")
        bars = line[2].barh(names, [1000 * run.normalised for run in mine], color=COLOURS[1])
        line[2].bar_label(bars, [short(1000 * run.normalised) for run in mine], fontsize=8, padding=3)
        line[2].set_xscale("log")
        line[2].set_xlabel("mean normalised latency, ms a token (log scale)")
        line[2].set_xlim(1, 10_000 * max(run.normalised for run in mine))
        line[1].set_xlim(right=1.2 * max(run.batch for run in mine))
        for axes in line:
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("One ShareGPT-like trace through every memory")
    return fig
