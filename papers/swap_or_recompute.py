"""Measure the milliseconds to swap tokens out and in, and to recompute them, by page size (PagedAttention Figure 19a).

Swaps between the engine's buffers and prompts are real: OPT-13B on a GPU, as in the paper (on an A100), a small LLaMA
on a CPU. The paper's system copied each layer's keys and values of a page separately; quire moves whole pages, and all
pages of a sequence at once. Both are shown for a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result
from quire.bench.calibration import compute_seconds, swap_seconds
from quire.bench.document import table
from quire.bench.shapes import built
from quire.config import EngineConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a page
TOKENS = 256
REPEATS = 9
FLAT = 1.2  # the slowest recomputation / the fastest, over all page sizes, to count as independent of them
MOST = 1.2  # recomputing / swapping: "never higher than 20% of swapping's latency"
# A step of the model reads few weights, so that both ways fit one plot.
SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 704, "vocab_size": 512,
}  # fmt: skip
GPU_MODEL = "opt-13b"


class Point(NamedTuple):
    """Milliseconds for TOKENS tokens in pages of `page` tokens.

    `pieces` is out and in with a separate copy of each layer's keys and values in each page; None if not measured."""

    page: int
    out: float
    back: float
    recompute: float
    pieces: float | None = None

    @property
    def both(self) -> float:
        """Return the time of out and in."""
        return self.out + self.back


def figure_19a() -> Reproduction:
    """Measure the figure's shape: recomputation doesn't depend on the page size, swapping does."""
    import torch

    gpu = torch.cuda.is_available()
    points = [_measure(page, gpu) for page in SIZES]
    head = ("page", "swap out ms", "swap in ms", "out and in", "recompute ms", "recompute / swap", "by pieces ms")
    rows = [
        (p.page, *(f"{value:.3f}" for value in (p.out, p.back, p.both, p.recompute)), f"{_ratio(p):.1f}",
         "-" if p.pieces is None else f"{p.pieces:.3f}")
        for p in points
    ]  # fmt: skip
    computed, swapped = [p.recompute for p in points], [p.both for p in points]
    spread = max(computed) / min(computed)
    worst = swapped[0] / min(swapped)
    results = [
        _claim(f"recomputation is flat (slowest/fastest at most {FLAT})", None, round(spread, 2), spread <= FLAT),
        _claim("swapping is slowest with the smallest page", True, swapped[0] == max(swapped)),
        _claim(f"swapping in pages of 1 token / at best (more than {FLAT})", None, round(worst, 2), worst > FLAT),
        # A CPU swaps by copying memory and computes far more slowly than a GPU, so this claim may not hold on it.
        _claim("recomputing is cheaper than swapping in pages of 1 token", True, _ratio(points[0]) < 1),
    ]
    if gpu:
        results += _claims_of_pieces(points)
    about = f"{TOKENS} tokens of {GPU_MODEL if gpu else 'a small LLaMA'}"
    return Reproduction(
        results, f"{about}\n{table(head, rows)}", partial(_draw, points, gpu), [p._asdict() for p in points]
    )


def _claims_of_pieces(points: list[Point]) -> list[Result]:
    """Judge the paper's claims on swaps in separate copies, as in its system."""
    pieces = [p.pieces for p in points if p.pieces is not None]
    most = max(p.recompute / p.pieces for p in points if p.pieces is not None)
    return [
        _claim("by pieces: swapping is slowest with the smallest page", True, pieces[0] == max(pieces)),
        _claim("by pieces: recomputing is cheaper with pages of 1 token", True, points[0].recompute < pieces[0]),
        _claim(f"by pieces: recomputing / swapping, all pages (at most {MOST})", None, round(most, 2), most <= MOST),
    ]


def _ratio(point: Point) -> float:
    """Return recomputing time / swapping time."""
    return point.recompute / point.both


def _measure(page: int, gpu: bool) -> Point:
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, page_size=page, kv_tokens=8 * TOKENS, enable_prefix_caching=False
    )
    shape: Mapping[str, Any] | None = SHAPE
    if gpu:
        shape = None
        config = replace(
            config, model_config=GPU_MODEL, dummy_weights=True, dtype="float16", device="cuda", swap_gib=1.0
        )
    print(f"fig19a: pages of {page}", file=sys.stderr)
    with built(config, shape) as made:
        moved = swap_seconds(made.engine, TOKENS, REPEATS)
        (computed,) = compute_seconds(made.engine, [TOKENS], REPEATS)
        pieces = 1000 * _pieces(page, len(made.spec.layers), moved.bytes) if gpu else None
    return Point(page, 1000 * moved.out, 1000 * moved.back, 1000 * computed, pieces)


def _pieces(page: int, layers: int, size: int) -> float:
    """Return the seconds to copy `size` bytes of pages out and in, with separate copies of each layer's keys and
    values."""
    import torch

    count = TOKENS // page * layers * 2
    here = torch.zeros(count, size // count, dtype=torch.uint8, device="cuda")
    there = torch.zeros(here.shape, dtype=torch.uint8, pin_memory=True)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for target, source in ((there, here), (here, there)):
            for to, come in zip(target, source):
                to.copy_(come, non_blocking=True)
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _claim(what: str, paper: bool | None, ours: bool | float, holds: bool | None = None) -> Result:
    good = bool(ours) if holds is None else holds
    return Result("P-F19a", what, paper, ours, "" if paper is not None else "ratio", HOLDS if good else DIFFERS)


def _draw(points: list[Point], gpu: bool) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(7, 4)
    axes = fig.add_subplot()
    pages = [p.page for p in points]
    lines = {"swap out": [p.out for p in points], "swap in": [p.back for p in points],
             "swap out and in": [p.both for p in points], "recompute": [p.recompute for p in points]}  # fmt: skip
    if gpu:
        lines["out and in, by pieces"] = [p.pieces or 0.0 for p in points]
    for (label, values), colour in zip(lines.items(), COLOURS):
        axes.plot(pages, values, "o-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(pages, [str(page) for page in pages])
    axes.set_xlabel("tokens of a page")
    axes.set_ylabel(f"ms for {TOKENS} tokens")
    by = f"{GPU_MODEL} on a GPU" if gpu else "one CPU thread"
    axes.set_title(f"Figure 19a: swapping and recomputing by page size ({by})")
    axes.legend()
    return fig
