"""Reproduce vAttention Figure 8 and Table 6 on a GPU: prompts of up to 192K tokens in chunks of 2,048, of Yi-6B and
Llama-3-8B. Figure 8 measures the attention alone, by each kernel over pages and over virtual memory; Table 6 the
seconds to the first token, through the engine.

The time of a chunk's attention is linear in the tokens before it, so only some chunks are timed; the others are
interpolated.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from papers.closed_forms import spec_of
from papers.dummy_engines import PAGED, dummy, release, virtual
from papers.result import DIFFERS, HOLDS, Reproduction, Result, by_way, left_out, measured
from quire.bench.document import table
from quire.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quire.bench.placed_kv import Placed

MODELS = ("yi-6b", "llama3-8b")
CHUNK = 2048
LENGTHS = tuple(1024 * k for k in (1, 2, 4, 8, 16, 32, 64, 128, 192))
TIMED = (0, 1, 3, 7, 15, 31, 63, 95)  # chunks
LAYOUTS = ("sliced", "layer")
LEAST = 1.03  # times faster than over pages, in the paper: 1.03 to 1.45 beside FlashInfer's paged kernel
FIGURE_8 = "1.03-1.45 (whole prompts)"
ON, KIB, DTYPE = "cuda", 2048, "bfloat16"
# model -> thousands of tokens -> seconds: FlashAttention paged, vAttention; FlashInfer paged, vAttention
TABLE_6 = {
    "yi-6b": {16: (2.44, 1.38, 1.51, 1.34), 32: (8.07, 3.50, 3.97, 3.4), 64: (30.46, 9.98, 11.85, 9.66),
              128: (119, 32.10, 39.17, 30.9), 192: (266, 67.81, 81.87, 65.03)},
    "llama3-8b": {16: (1.62, 1.0, 1.17, 0.97), 32: (5.19, 2.59, 3.06, 2.37), 64: (18.65, 6.84, 8.94, 6.50),
                  128: (71.16, 20.78, 28.98, 20.29), 192: (157.33, 42.31, 59.91, 41.35)},
}  # fmt: skip
CUDNN = "virtual, cudnn"
THROUGH = {False: (16, 32, 64), True: (16, 32, 64, 128, 192)}  # thousands of tokens through the engine; with --full

Points = Sequence[dict[str, Any]]


# Figure 8: attention alone


def figure_8() -> Reproduction:
    """Measure the attention of long prompts. Raise StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig8")
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for model in MODELS:
        print(model, file=sys.stderr)
        points += [{"model": model, **point} for point in attention_of(model, missing)]
    shown = [{**p, "tokens": p["length"], "ms": 1000 * p["seconds"]} for p in points]
    text = "Attention of whole prompts, all layers, in ms.\n\n" + by_way(shown, ("model", "tokens"), "ms", 2)
    text += left_out(missing)
    return Reproduction(judged_8(points), text, partial(draw_8, points), points)


def attention_of(model: str, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Measure the points of one model, with one memory at a time."""
    import torch

    from papers.mapped import on_mapped
    from quire.bench.placed_kv import placed

    spec, most, dtype = spec_of(model), LENGTHS[-1], getattr(torch, DTYPE)
    kept, layers = spec.layers[0], len(spec.layers)
    where = placed(1, most, kept.kv_heads, kept.head_dim, 16, layers, dtype, spec.heads, on=ON)
    points = _lengths(where, "16-token pages", layers, missing)
    del where
    release()
    for layout in LAYOUTS:
        work = partial(_lengths, memory=layout, layers=layers, missing=missing)
        points += on_mapped(spec, 1, most, layout, work, ON, KIB, dtype)
    return points


def _lengths(where: Placed, memory: str, layers: int, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Return the seconds of prompts of each length by each kernel whose results are right."""
    from papers.chunk_kernels import check, chunk_calls
    from quire.bench.replay import replayed

    def until(end: int) -> Placed:
        return where._replace(lengths=where.lengths.clone().fill_(end))

    found: dict[str, dict[tuple[int, int], float]] = {}
    half = min(LENGTHS[0], CHUNK)
    for name in check(until(2 * CHUNK), CHUNK, missing):
        found[name] = {}
    for start, count in ((0, half), *((chunk * CHUNK, CHUNK) for chunk in TIMED)):
        if start + count > LENGTHS[-1]:
            continue
        for name, call in chunk_calls(until(start + count), start, missing).items():
            if name in found:
                found[name][start, count] = replayed([call])
    return [
        {"way": f"{name}, {memory}", "length": length, "seconds": layers * whole(times, length)}
        for name, times in found.items()
        for length in LENGTHS
    ]


def whole(times: dict[tuple[int, int], float], length: int) -> float:
    """Return the seconds of all of a prompt's chunks, given those of some: {(start, tokens): seconds}."""
    if length < CHUNK:
        return times[0, length]
    known = sorted((start, seconds) for (start, count), seconds in times.items() if count == CHUNK)
    return sum(_between(known, start) for start in range(0, length, CHUNK))


def _between(known: Sequence[tuple[int, float]], start: int) -> float:
    i = min(max(bisect_left(known, (start, 0.0)), 1), len(known) - 1)
    (low, first), (high, last) = known[i - 1], known[i]
    return first + (last - first) * (start - low) / (high - low)


def judged_8(points: Points) -> list[Result]:
    """Compare the best kernel over virtual memory with the best over pages."""
    results = []
    for model in dict.fromkeys(p["model"] for p in points):
        for length in dict.fromkeys(p["length"] for p in points):
            mine = {p["way"]: p["seconds"] for p in points if (p["model"], p["length"]) == (model, length)}
            paged = min((seconds, way) for way, seconds in mine.items() if ", paged" in way)
            other = min((seconds, way) for way, seconds in mine.items() if ", contiguous" in way)
            ratio = round(paged[0] / other[0], 3)
            what = f"{model}, {length // 1024}K tokens: attention, {paged[1]} / {other[1]}"
            verdict = HOLDS if ratio >= LEAST else DIFFERS
            results.append(Result("V-F8", what, FIGURE_8, ratio, "times", verdict))
    return results


def draw_8(data: Points) -> Figure:
    from quire.bench.plots import lines

    points = [{**p, "rate": p["length"] / p["seconds"]} for p in data]
    return lines(
        points, "length", "rate", "way", "model", "vAttention Figure 8: attention of prompts in chunks of 2,048",
        ("tokens of a prompt", "tokens/s, attention alone"),
    )  # fmt: skip


# Table 6: the first token


def table_6(full: bool = False) -> Reproduction:
    """Measure the seconds to the first token. Raise StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-table6")
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    ways = {"paged": PAGED, "virtual": virtual("sliced"), CUDNN: {**virtual("sliced"), "attention": "cudnn"}}
    for model in MODELS:
        for way, settings in ways.items():
            print(f"{model}, {way}", file=sys.stderr)
            try:
                seconds = first_tokens(model, settings, THROUGH[full])
            except StartupError as error:
                missing[f"{model}, {way}"] = str(error)[:160]
                continue
            points += [{"model": model, "way": way, "k": k, "s": one} for k, one in zip(THROUGH[full], seconds)]
            release()
    by = {(p["model"], p["k"], p["way"]): p["s"] for p in points}
    rows = [
        (model, f"{k}K", *(f"{by[model, k, way]:.3f}" if (model, k, way) in by else "-" for way in ways), *paper)
        for model in MODELS
        for k, paper in TABLE_6[model].items()
        if k in THROUGH[full]
    ]
    head = (
        "model",
        "tokens",
        *(f"{way} s" for way in ways),
        "paper: FA paged",
        "FA vAttention",
        "FI paged",
        "FI vAttention",
    )
    said = left_out(missing)
    return Reproduction(judged_6(points), table(head, rows) + said, partial(draw_6, points), points)


def first_tokens(model: str, settings: dict[str, Any], thousands: Sequence[int]) -> list[float]:
    """Return the seconds to the first token of a prompt of each length. An untimed prompt of the same length goes
    first, since cuDNN plans for about 40 ms for each new pair of lengths."""
    from quire.bench.contexts import TOKEN, stop
    from quire.protocol.sampling_params import SamplingParams

    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def timed(ask: Callable[..., None], step: Callable[[], Any], length: int) -> float:
        began = time.perf_counter()
        ask(f"{length}", [TOKEN] * length, once)
        while not step():
            pass
        return time.perf_counter() - began

    with dummy(model, 1024 * max(thousands) + 16, 1, max_num_batched_tokens=CHUNK, **settings) as made:
        seconds = []
        for k in thousands:
            for _ in range(2):
                last = timed(made.engine.add, made.engine.step, 1024 * k)
                stop(made.engine)
            seconds.append(last)
    return seconds


def judged_6(points: Points) -> list[Result]:
    """Judge that virtual memory is at least as fast as pages, with the paper's ratio to FlashInfer's paged kernel
    beside it."""
    results = []
    by = {(p["model"], p["k"], p["way"]): p["s"] for p in points}
    for model, k, way in by:
        if way == "paged":
            continue
        results.append(measured("V-T6", f"{model}, {k}K tokens: first token, {way}", round(by[model, k, way], 3), "s"))
        if (model, k, "paged") in by:
            _, _, paged, vattention = TABLE_6[model][k]
            ratio = round(by[model, k, "paged"] / by[model, k, way], 3)
            what = f"{model}, {k}K tokens: first token, paged / {way} (at least 1)"
            verdict = HOLDS if ratio >= 1 else DIFFERS
            results.append(Result("V-T6", what, round(paged / vattention, 2), ratio, "times", verdict))
    return results


def draw_6(data: Points) -> Figure:
    from quire.bench.plots import lines

    paper = [
        {"model": model, "k": k, "s": seconds[i], "way": way}
        for model, rows in TABLE_6.items()
        for k, seconds in rows.items()
        for i, way in ((2, "paper, FlashInfer paged"), (3, "paper, FlashInfer vAttention"))
    ]
    points = [{**p, "tokens": 1024 * p["k"]} for p in [*data, *paper]]
    return lines(
        points, "tokens", "s", "way", "model", "vAttention Table 6: seconds to the first token",
        ("tokens of a prompt", "s"),
    )  # fmt: skip
