"""Reproduce vAttention Figures 6 and 9a on a GPU: decode steps through the engine, for three models with dummy weights.
Figure 6: tokens a second, latency, and bytes of new KV cache a second, by batch, at 1K tokens a sequence. Figure 9a:
tokens a second at 16K tokens, over pages and over virtual memory.

The paper ran Llama-3-8B and Yi-34B on two A100s, Yi-6B on one; here each runs on one GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from papers.dummy_engines import PAGED, SHAPES, dummy, release, virtual
from papers.result import DIFFERS, HOLDS, Reproduction, Result, by_way, left_out, measured
from quire.bench.document import table
from quire.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXT_6, BATCHES_6 = 1024, {"yi-6b": (1, 40, 80, 160, 320), "llama3-8b": (1, 40, 80, 160, 320),
                              "yi-34b": (1, 24, 48, 96, 192)}  # larger batches don't fit  # fmt: skip
STEPS = 30
PLATEAU = 1.25  # tokens a second of the largest batch / of half of it, at most
DEMAND = 600  # MB of new KV a second, the most in the paper
CONTEXT_9 = 16384
BATCHES_9 = {"yi-6b": (1, 8, 32), "llama3-8b": (1, 8, 32), "yi-34b": (1, 8, 16)}
ALL_9 = {"yi-6b": (1, 2, 4, 8, 16, 32), "llama3-8b": (1, 2, 4, 8, 16, 32), "yi-34b": (1, 2, 4, 8, 16)}
GAIN = {"yi-6b": 1.97, "llama3-8b": 1.3, "yi-34b": 1.6}  # tokens a second of vAttention / of vLLM, at most
CLOSE = 0.97  # of the tokens a second over pages, at least: our own goal
MIB = 2**20

Points = Sequence[dict[str, Any]]


def decoded(
    model: str, settings: dict[str, Any], batches: Sequence[int], context: int, missing: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Measure one engine at each batch size, the largest first; requests then end until the next size is left."""
    from quire.bench import contexts

    steps = max(batches) * context // 4096 + (STEPS + contexts.WARM + 4) * len(batches)  # at most, while one decodes
    try:
        with dummy(model, context + steps + 16, max(batches), **settings) as made:
            engine = made.engine
            contexts.skipping(engine)
            contexts.start(engine, [context] * max(batches))
            for batch in sorted(batches, reverse=True):
                contexts.stop(engine, [name for name in engine.requests if int(name.split("-")[1]) >= batch])
                seconds = contexts.step_seconds(engine, STEPS)
                token = made.memory_plan.token_bytes
                yield {"model": model, "batch": batch, "ms": 1000 * mean(seconds), "median_ms": 1000 * median(seconds),
                       "tokens_s": batch / mean(seconds), "mb_s": batch * token / mean(seconds) / MIB}  # fmt: skip
            contexts.stop(engine)
            del engine
        del made
    except StartupError as error:
        missing[f"{model}, {settings['memory']}, batch {max(batches)}"] = str(error)[:160]
    finally:
        release()


# Figure 6


def figure_6() -> Reproduction:
    """Measure decode steps by batch size. Raise StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig6")
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for model in SHAPES:
        print(model, file=sys.stderr)
        points += decoded(model, PAGED, BATCHES_6[model], CONTEXT_6, missing)
    rows = [
        (p["model"], p["batch"], *(f"{p[name]:.1f}" for name in ("tokens_s", "ms", "mb_s")))
        for p in sorted(points, key=lambda p: (list(SHAPES).index(p["model"]), p["batch"]))
    ]
    text = table(("model", "batch", "tokens/s", "ms a step", "MB/s of new KV"), rows) + left_out(missing)
    return Reproduction(judged_6(points), text, partial(draw_6, points), points)


def judged_6(points: Points) -> list[Result]:
    """Judge that tokens a second level off, and that the demand for memory is at least the paper's."""
    results = []
    for model in dict.fromkeys(p["model"] for p in points):
        by = {p["batch"]: p for p in points if p["model"] == model}
        most = max(by)
        gain = round(by[most]["tokens_s"] / by[most // 2]["tokens_s"], 2)
        what = f"{model}: tokens/s at batch {most} / at {most // 2} (a plateau: at most {PLATEAU})"
        results.append(Result("V-F6a", what, "plateaus", gain, "times", HOLDS if gain <= PLATEAU else DIFFERS))
        ms = [round(by[batch]["ms"], 2) for batch in (min(by), most)]
        results.append(measured("V-F6b", f"{model}: a step at batch {min(by)} and {most}", ms, "ms"))
        demand = round(max(p["mb_s"] for p in by.values()))
        verdict = HOLDS if demand <= DEMAND else DIFFERS
        what = f"{model}: new KV cache, the most of all batches"
        results.append(Result("V-F6c", what, f"at most {DEMAND}", demand, "MB/s", verdict))
    return results


def draw_6(data: Points) -> Figure:
    from quire.bench.plots import lines

    names = {"tokens_s": "(a) tokens/s", "ms": "(b) ms a step", "mb_s": "(c) MB/s of new KV"}
    points = [{**p, "value": p[key], "panel": panel} for key, panel in names.items() for p in data]
    return lines(
        points, "batch", "value", "model", "panel", "vAttention Figure 6: decodes at 1K tokens a sequence",
        ("batch", ""), logarithmic=False,
    )  # fmt: skip


# Figure 9a


def figure_9a(full: bool = False) -> Reproduction:
    """Measure tokens a second over pages and over virtual memory. Raise StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig9a")
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    ways = {"paged": PAGED, "virtual, sliced": virtual("sliced")}
    if full:
        ways["virtual, layer"] = virtual("layer")
    for model, batches in (ALL_9 if full else BATCHES_9).items():
        for way, settings in ways.items():
            print(f"{model}, {way}", file=sys.stderr)
            points += [{**p, "way": way} for p in decoded(model, settings, batches, CONTEXT_9, missing)]
    text = by_way(points, ("model", "batch"), "tokens_s", 1, ", tokens/s") + left_out(missing)
    return Reproduction(judged_9a(points), text, partial(draw_9a, points), points)


def judged_9a(points: Points) -> list[Result]:
    """Judge the largest batch: as fast as over pages, and the share of the paper's gain."""
    results = []
    for model, gain in GAIN.items():
        mine = [p for p in points if p["model"] == model]
        common = {p["batch"] for p in mine if p["way"] == "paged"} & {p["batch"] for p in mine if p["way"] != "paged"}
        if not common:
            continue
        rates = {p["way"]: p["tokens_s"] for p in mine if p["batch"] == max(common)}
        paged = rates.pop("paged")
        for way, rate in rates.items():
            ratio, what = round(rate / paged, 3), f"{model}, batch {max(common)}: tokens/s, {way} / paged"
            good = HOLDS if ratio >= CLOSE else DIFFERS
            results.append(Result("V-F9a", f"{what} (at least {CLOSE})", "about 1, best pages", ratio, "times", good))
        best = round(max(rates.values()) / paged, 3)
        what = f"{model}, batch {max(common)}: the paper's gain over vLLM's kernel, beside ours over our pages"
        results.append(Result("V-F9a", what, f"up to {gain}", best, "times", HOLDS if best >= gain else DIFFERS))
    return results


def draw_9a(data: Points) -> Figure:
    from quire.bench.plots import lines

    return lines(
        data, "batch", "tokens_s", "way", "model", "vAttention Figure 9a: decodes of 16K tokens a sequence",
        ("batch", "tokens/s"), logarithmic=False,
    )  # fmt: skip
