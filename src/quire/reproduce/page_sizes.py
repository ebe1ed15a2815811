"""Page sizes from 1 to 256 tokens: what each wastes, how many requests it batches, the rate that it sustains.

PagedAttention §7.2 says what sizes to choose and why large ones lose; a review asked for more than its Figure 18b. By
simulation: only fragmentation differs here, since every size has the same costs. What a kernel makes of small pages is
Figure 18's question (attention_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.bench.document import table
from quire.errors import StartupError
from quire.reproduce.result import DIFFERS, HOLDS, Reproduction, Result, measured
from quire.reproduce.serving import LIMIT, SEED, STEP, TOLERANCE, Load, in_parallel
from quire.sim.simulation import Objective, highest_rate, mean_usage, meets_objectives

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CALIBRATION = "a100-13b"
DEFAULT = 16
WARM = 0.1  # of a trace: memory fills, and nothing is averaged; nor is it when no more requests come
GOOD = 0.9  # of the best rate: such sizes are the best ones
ERROR = 1 + TOLERANCE  # of a ratio of two rates: what was found is too low, by at most TOLERANCE


class Trace(NamedTuple):
    """A workload: the rate at which its waste is looked at, the paper's of Figure 13; seconds of its traces; the sizes
    that Figure 18b found best, which §7.2 explains."""

    rate: float
    seconds: float
    best: tuple[int, ...]


TRACES = {"sharegpt": Trace(2.0, 300.0, (16, 32, 64, 128)), "alpaca": Trace(30.0, 300.0, (16, 32))}


class Point(NamedTuple):
    """A page size: the share of used memory that is the unfilled rest of pages, and the number of running requests,
    both means over time while requests come; the preemptions until the last one came; all at the trace's rate. Then the
    highest rate in requests a second that keeps LIMIT."""

    workload: str
    page: int
    internal: float
    running: float
    preemptions: int
    highest: float


def page_sizes() -> Reproduction:
    """The sweep of both workloads, for OPT-13B on the paper's A100 with 12 GiB of KV."""
    points = sweep(SIZES)
    return Reproduction(_verdicts(points), _text(points), partial(_draw, points), [one._asdict() for one in points])


def sweep(sizes: Sequence[int]) -> list[Point]:
    """A point for each workload and size, by as many processes as there are cores. Searches for a rate begin at the
    capacity that pages of DEFAULT tokens have."""
    starts = {workload: Load(CALIBRATION, workload).capacity("paged") for workload in TRACES}
    jobs = [(workload, trace, page, starts[workload]) for workload, trace in TRACES.items() for page in sizes]
    found: list[Point] = in_parallel(point, jobs)
    return found


def point(workload: str, trace: Trace, page: int, start: float) -> Point:
    """One size. StartupError if traces are too short to find a rate."""
    load = Load(CALIBRATION, workload)
    plant = load.plant("paged")
    plant = plant._replace(config=replace(plant.config, page_size=page))
    requests = load.trace(trace.rate, trace.seconds)
    last = requests[-1].arrival
    outcome = plant.simulation().run(requests, (), last)
    moments = [moment for moment in outcome.timeline if WARM * last <= moment.time <= last]
    usage = mean_usage(moments)
    goal = Objective("mean", "normalised", LIMIT)
    highest = highest_rate(
        lambda asked: meets_objectives(plant.simulate(load.trace(asked, trace.seconds), [goal]), [goal]), start,
        TOLERANCE,
        STEP, 2.0,
    )  # fmt: skip
    if not 0 < highest < math.inf:
        raise StartupError(
            f"{workload}, pages of {page}: traces of {trace.seconds:g} s sustain any rate, or none", "Make them longer"
        )
    internal = usage.internal / (usage.used + usage.internal)
    running = float(np.mean([moment.running for moment in moments]))
    return Point(workload, page, internal, running, outcome.totals.preemptions, highest)


def _verdicts(points: Sequence[Point]) -> list[Result]:
    """What §7.2 says as far as fragmentation goes, then the numbers, for which there are no claims."""
    results = []
    for workload, trace in TRACES.items():
        of = {point.page: point for point in points if point.workload == workload}
        results += _claims(workload, trace, of)
        for point in of.values():
            name = f"{workload}, pages of {point.page}"
            results.append(_measured(f"{name}: internal waste", round(100 * point.internal, 2), "% of taken memory"))
            results.append(_measured(f"{name}: mean batch at {trace.rate:g}/s", round(point.running, 2), "requests"))
            results.append(_measured(f"{name}: highest rate", round(point.highest, 2), "requests/s"))
    return results


def _claims(workload: str, trace: Trace, of: dict[int, Point]) -> list[Result]:
    """The paper: ShareGPT is served best by pages of 16 to 128 tokens; for Alpaca 16 and 32 work well, larger ones
    "significantly degrade the performance". Whether they do at all, and whether by as much as makes a size bad here,
    are told apart."""
    rates = {page: point.highest for page, point in of.items()}
    least = GOOD * max(rates.values())
    best = [rates[page] for page in trace.best if page in of]
    larger = [rate for page, rate in rates.items() if page > max(trace.best)]
    waste = [of[page].internal for page in sorted(of)]
    sizes = "/".join(map(str, trace.best))
    lost = round(100 * (1 - GOOD))
    return [
        _claim(f"{workload}: pages of {sizes} sustain the best rate (all within {lost} %)", min(best) >= least),
        _claim(f"{workload}: each larger size sustains less than those, beyond the searches' error",
               max(larger) * ERROR < min(best)),
        _claim(f"{workload}: each larger size loses more than {lost} % of the best", max(larger) < least),
        _claim(f"{workload}: larger pages waste more", waste == sorted(waste)),
    ]  # fmt: skip


def _claim(what: str, holds: bool) -> Result:
    return Result("P-R1", what, True, holds, "", HOLDS if holds else DIFFERS, "simulated")


def _measured(what: str, ours: float, unit: str) -> Result:
    return measured("P-R1", what, ours, unit, "simulated")


def _text(points: Sequence[Point]) -> str:
    head = ("workload", "page", "internal waste %", "mean batch", "preempted", "highest rate", "of 16's")
    base = {point.workload: point.highest for point in points if point.page == DEFAULT}
    rows = [
        (p.workload, p.page, f"{100 * p.internal:.2f}", f"{p.running:.2f}", p.preemptions, f"{p.highest:.2f}",
         f"{p.highest / base[p.workload]:.3f}" if p.workload in base else "-")
        for p in points
    ]  # fmt: skip
    rates = ", ".join(f"{name} at {trace.rate:g}/s for {trace.seconds:g} s" for name, trace in TRACES.items())
    about = (
        f"OPT-13B on an A100, 12 GiB of KV, simulated; waste and batches of {rates}, averaged over time after the first"
        f" {WARM:.0%} until the last request came; seed {SEED}"
    )
    limit = (
        f"Highest rates: mean normalised latency up to {1000 * LIMIT:g} ms, found to {TOLERANCE:.0%}, of traces of the"
        " same lengths: shorter ones end before a queue has grown, and sustain more."
    )
    return "\n".join((about, limit, table(head, rows)))


def _draw(points: Sequence[Point]) -> Figure:
    """Waste, batches and rates by page size, a line a workload; the last two as shares of the best."""
    from quire.reproduce.plots import COLOURS, figure

    fig = figure(12, 3.8)
    panels: tuple[tuple[str, Callable[[Point], float], bool], ...] = (
        ("internal waste, % of taken memory", lambda p: 100 * p.internal, False),
        ("mean batch / the largest", lambda p: p.running, True),
        ("highest rate / the best", lambda p: p.highest, True),
    )
    for axes, (label, value, relative) in zip(fig.subplots(1, 3), panels):
        for workload, colour in zip(TRACES, COLOURS):
            mine = [point for point in points if point.workload == workload]
            values = [value(point) for point in mine]
            whole = max(values) if relative else 1.0
            axes.plot([point.page for point in mine], [v / whole for v in values], "o-", color=colour, label=workload)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in a page")
        axes.set_ylabel(label)
        axes.legend(loc="lower left" if relative else "upper left")
    fig.suptitle("Page sizes (OPT-13B on an A100 with 12 GiB of KV, simulated)")
    return fig
