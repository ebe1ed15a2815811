"""Run Jenga Figures 13, 15, 17 and 18 on one GPU, beside the simulation of the same.

Engines have dummy weights of the models' shapes and the KV memory left over on the paper's devices. They use two-level
or uniform pages, or run with and without a vision embedding cache. Token values do not affect the cost of steps. Loads
are shorter than the simulated entries', so that a run takes a minute. Each way has its own engine, warmed up before its
requests come.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.articles import HITS, SPEED
from papers.decode_batches import RATIO
from papers.result import DIFFERS, HOLDS, Reproduction, Result, at_most, equal, measured
from papers.unlike_serving import H200, OWN, SEED, Case, Ran, assumed, burst, exactly, serve
from papers.unlike_throughput import CASES
from papers.vision_cache import LATENCY, THROUGHPUT, chunked
from quire.bench.document import table
from quire.bench.workloads import parse
from quire.sim.simulation import TraceRequest
from quire.startup.build import BuiltEngine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = ("uniform", "jenga")
ON = "cuda"
MOST_OFF = 0.15  # the simulation's error, as a share
WARM = (64, 700, 2100, 64)  # prompt lengths of the warm-up


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{rule: (rule, {}) for rule in RULES}, **{mode: ("jenga", {"vision_cache": mode}) for mode in ("off", "pages")},
}  # fmt: skip
LABELS = {"jenga": "LCM pages"}  # of ways; others use their names


class Load(NamedTuple):
    """A case and its arrivals: all at once, or at most `concurrency` at a time.

    The second of `ways` (keys of WAYS) is compared with the first. Weights of one byte take two here, or one with
    `fp8`."""

    case: Case
    concurrency: int | None = None
    ways: tuple[str, str] = RULES
    fp8: bool = False

    def here(self) -> Case:
        """Return the case with the same KV memory on this device."""
        return self.case._replace(device=H200, kv_gib=self.case.budget, halved=self.fp8)


def _like(model: str, device: int, workload: str) -> Load:
    return Load(CASES[model][device]._replace(workload=workload))


LOADS = {
    "ministral": _like("Ministral", 0, "arxiv-qa@24"),
    "ministral-l4": _like("Ministral", 1, "arxiv-qa@20"),
    "gemma-27b": _like("Gemma-2", 0, "arxiv-qa@40"),
    "gemma-9b": _like("Gemma-2", 1, "arxiv-qa@40"),
    "character": _like("character.ai", 1, "mmlu-pro@150"),
    "pyramid": _like("PyramidKV", 1, "mmlu-pro@150"),
    "llama": _like("Llama", 1, "mmlu-pro@150"),
    "mllama": _like("Llama Vision", 0, "mmmu-pro@200"),
    "jamba": _like("Jamba", 0, "mmlu-pro@200")._replace(fp8=True),
}
PICTURES = {
    "llava": Load(chunked("LLaVA-OneVision 7B", 48), ways=("off", "pages")),
    "internvl": Load(chunked("InternVL2 8B", 96), ways=("off", "pages")),
    "phi3": Load(chunked("Phi-3-Vision 4B", 96), ways=("off", "pages")),
    "paligemma": Load(chunked("PaliGemma2 10B", 200), ways=("off", "pages")),
}
BATCHES = Load(Case("ministral-8b", H200, "longdoc@10", kv_gib=30.0))
ARTICLES = Load(Case("ministral-8b", H200, "docqa:5:64000@20", kv_gib=32.0, caching=True), concurrency=1)


class Both(NamedTuple):
    """A way's run, measured and simulated."""

    rule: str
    real: Ran
    simulated: Ran


def built(case: Case, rule: str, **more: Any) -> AbstractContextManager[BuiltEngine]:
    """Return an engine with dummy weights, warmed up at startup; in FP8 if the weights are halved."""
    from quire.bench import shapes

    config = case.config(rule, dummy_weights=True, skip_tokenizer_init=True, device=ON, **more)
    config = replace(config, quantization="fp8") if case.halved else config
    if case.changes:
        return shapes.built(replace(config, model_config=None), case.shape)
    return shapes.built(config)


def warm(made: BuiltEngine, case: Case) -> None:
    """Run prompts of several lengths, and an image if the model takes images; none of them is measured later.

    None is longer than a step if a step must compute a whole prompt."""
    whole = case.chunk is not None and case.spec.vision is not None and case.spec.vision.bidirectional_prompt
    lengths = [length for length in WARM if not whole or length <= (case.chunk or 0)]
    asked = [TraceRequest(0.0, [OWN] * length, exactly(8)) for length in lengths]
    pictured = [one for one in parse(case.workload).sketches(SEED + 1) if one.pictures][:1]
    serve(made.engine, [*asked, *burst(pictured, case.eyes, pixels=True)], made.spec)


def run(load: Load) -> list[Both]:
    """Run both ways on the device, one after another, and simulate them."""
    from papers.dummy_engines import release

    here, found = load.here(), list[Both]()
    ways = {way: WAYS[way] for way in load.ways}
    most = min(here.plant(rule, **more).max_len for rule, more in ways.values())
    trace = burst(here.sketches(), here.eyes, pixels=True)
    trace = [one for one in trace if len(one.prompt) + (one.params.max_tokens or 0) <= most]
    for way, (rule, more) in ways.items():
        with built(here, rule, **more) as made:
            warm(made, here)
            real = serve(made.engine, trace, made.spec, concurrency=load.concurrency)
        del made
        release()
        print(json.dumps({"rule": way, **real.facts()}), file=sys.stderr, flush=True)
        engine = here.plant(rule, **more).simulation().engine
        found.append(Both(way, real, serve(engine, trace, here.spec, concurrency=load.concurrency)))
    return found


def _need_gpu(name: str) -> None:
    from quire.bench.replay import need_gpu

    need_gpu(f"quire reproduce {name}")


# Verdicts

What = Callable[[Ran], float]


def compared(row: str, what: str, unit: str, of: What, found: Sequence[Both], paper: str | None) -> list[Result]:
    """Compare a number of both ways and its ratio, measured and simulated; more is better."""
    by = {both.rule: both for both in found}
    less, more = (LABELS.get(way, way) for way in by)
    results = [
        measured(row, f"{rule}: {what}", round(of(ran), 3), unit, kind)
        for rule, both in by.items()
        for kind, ran in (("real", both.real), ("simulated", both.simulated))
    ]
    ratios = [_ratio(of, [getattr(both, kind) for both in found]) for kind in ("real", "simulated")]
    results.append(measured(row, f"{what}: {more} / {less}", ratios[1], "times", "simulated"))
    verdict = HOLDS if ratios[0] > 1 else DIFFERS
    results.append(Result(row, f"{what}: {more} / {less} (above 1)", paper, ratios[0], "times", verdict))
    return results


def _ratio(of: What, pair: Sequence[Ran]) -> float:
    less, more = (of(one) for one in pair)
    return round(more / less, 2) if less else float("inf")


def off(row: str, found: Sequence[Both]) -> list[Result]:
    """Return the error of the simulated time."""
    return [
        at_most(row, f"{both.rule}: simulated time, off by", MOST_OFF,
                round(abs(both.simulated.seconds / both.real.seconds - 1), 3), "share")
        for both in found
    ]  # fmt: skip


def judged_speed(found: Sequence[Both], equal: bool = False) -> list[Result]:
    """Judge Figure 13. `equal`: the layers are alike, so the two differ by at most 3 %."""
    results = compared("J-F13", "throughput", "requests/s", lambda ran: ran.requests_per_s, found, None)
    if equal:
        ratio = results.pop().ours
        verdict = HOLDS if abs(ratio - 1) <= 0.03 else DIFFERS
        results.append(Result("J-F13", "throughput: LCM pages / uniform (within 3%)", 1.0, ratio, "times", verdict))
    return [*results, *off("J-F13", found)]


def judged_batches(found: Sequence[Both]) -> list[Result]:
    """Judge Figure 15."""
    paper = f"{RATIO} (another load)"
    results = compared("J-F15", "mean decode batch", "requests", lambda ran: ran.batch, found, paper)
    steps = [measured("J-F15", f"{both.rule}: steps that decode", both.real.decode_steps, "steps") for both in found]
    return [*results, *steps, *off("J-F15", found)]


def judged_articles(found: Sequence[Both]) -> list[Result]:
    """Judge Figure 17."""
    results = compared("J-F17", "hit rate", "of prompts", lambda ran: ran.hit_rate, found, f"up to {HITS}")
    speed = compared("J-F17", "throughput", "requests/s", lambda ran: ran.requests_per_s, found, f"up to {SPEED}")
    return [*results, *speed, *off("J-F17", found)]


def judged_pictures(found: Sequence[Both], alike: bool = False) -> list[Result]:
    """Judge Figure 18. `alike`: prompts are computed in one step, so both take the same time, within 3 %."""
    results = []
    for what, unit, of, paper in (
        ("throughput", "requests/s", lambda ran: ran.requests_per_s, THROUGHPUT),
        ("1 / mean latency", "1/s", lambda ran: 1 / ran.latency, LATENCY),
    ):
        results += compared("J-F18", what, unit, of, found, f"{paper}, mean of four models")
        if alike:
            ratio = results.pop().ours
            verdict = HOLDS if abs(ratio - 1) <= 0.03 else DIFFERS
            results.append(Result("J-F18", f"{what}: pages / off (within 3%)", None, ratio, "times", verdict))
    for both in found:
        runs, wanted = both.real.encoder_runs, both.simulated.encoder_runs
        if both.rule == "off":
            results.append(measured("J-F18", f"off: encoder runs (simulated: {wanted})", runs, "runs"))
        else:
            results.append(
                equal("J-F18", f"{both.rule}: encoder runs, one a request", both.real.requests, runs, "runs")
            )
    return [*results, *off("J-F18", found)]


# Entries


def _entry(name: str, load: Load, judge: Callable[[Sequence[Both]], list[Result]], title: str) -> Reproduction:
    _need_gpu(name)
    found = run(load)
    data: Any = {
        "title": title,
        "runs": [{"rule": both.rule, "by": kind, **getattr(both, kind).facts()}
                 for both in found for kind in ("real", "simulated")],
    }  # fmt: skip
    return Reproduction(judge(found), text(load, found), lambda: draw(data), data)


def _throughput(name: str) -> Reproduction:
    load = LOADS[name]
    judge = partial(judged_speed, equal=name == "llama")
    return _entry(f"jenga-fig13-{name}-gpu", load, judge, f"Jenga Figure 13: {load.case.label}'s KV memory")


ministral, ministral_l4 = partial(_throughput, "ministral"), partial(_throughput, "ministral-l4")
gemma_27b, gemma_9b = partial(_throughput, "gemma-27b"), partial(_throughput, "gemma-9b")
character, pyramid, llama = (partial(_throughput, name) for name in ("character", "pyramid", "llama"))


mllama, jamba = partial(_throughput, "mllama"), partial(_throughput, "jamba")


def _pictures(name: str) -> Reproduction:
    load = PICTURES[name]
    judge = partial(judged_pictures, alike=name == "paligemma")
    return _entry(f"jenga-fig18-{name}-gpu", load, judge, f"Jenga Figure 18: {load.case.model}")


pictures_llava, pictures_internvl = partial(_pictures, "llava"), partial(_pictures, "internvl")
pictures_phi3, pictures_paligemma = partial(_pictures, "phi3"), partial(_pictures, "paligemma")


def decode_batches() -> Reproduction:
    """Run Figure 15."""
    return _entry("jenga-fig15-gpu", BATCHES, judged_batches, "Jenga Figure 15: decode batches")


def articles() -> Reproduction:
    """Run Figure 17 with one number of articles."""
    return _entry("jenga-fig17-gpu", ARTICLES, judged_articles, "Jenga Figure 17: 5 articles of 64,000 tokens")


def text(load: Load, found: Sequence[Both]) -> str:
    here = load.here()
    rows = [
        (both.rule, kind, f"{ran.seconds:.1f}", ran.requests, f"{ran.requests_per_s:.3g}", f"{ran.tokens_per_s:,.0f}",
         f"{ran.batch:.2f}", ran.decode_steps, f"{100 * ran.hit_rate:.1f}%", ran.preemptions)
        for both in found
        for kind, ran in (("real", both.real), ("simulated", both.simulated))
    ]  # fmt: skip
    head = ("pages", "by", "seconds", "requests", "requests/s", "tokens/s", "decode batch", "decode steps", "hit rate",
            "preempted")  # fmt: skip
    how = "all at once" if load.concurrency is None else f"at most {load.concurrency} at a time"
    return (
        f"{here.model}, {here.workload}, {how}; --kv-gib {here.budget:.2f}, what {load.case.label} has left over or "
        f"what is given\n{table(head, rows)}\n{assumed()}"
    )


def draw(data: Mapping[str, Any]) -> Figure:
    """Draw throughput, decode batch and hit rate by rule, measured and simulated; latency and encoder runs by vision
    cache."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(10, 3.4)
    names: dict[str, Any] = {"requests/s": _speed, "mean decode batch": "batch", "hit rate": "hit_rate"}
    if any(one["rule"] == "off" for one in data["runs"]):
        names = {"requests/s": _speed, "mean latency, s": "latency", "encoder runs": "encoder_runs"}
    for axes, (label, of) in zip(fig.subplots(1, len(names)), names.items()):
        for i, kind in enumerate(("real", "simulated")):
            mine = {one["rule"]: one for one in data["runs"] if one["by"] == kind}
            values = [of(mine[rule]) if callable(of) else mine[rule][of] for rule in mine]
            places = [k + 0.4 * (i - 0.5) for k in range(len(mine))]
            bars = axes.bar(places, values, 0.38, color=COLOURS[i], label=kind)
            axes.bar_label(bars, fmt="%.3g", fontsize=8)
            axes.set_xticks(range(len(mine)), list(mine))
        axes.set_ylabel(label)
    fig.axes[0].legend(fontsize=8)
    fig.suptitle(data["title"])
    return fig


def _speed(one: Mapping[str, Any]) -> float:
    return float(one["requests"] / one["seconds"])
