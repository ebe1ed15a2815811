"""PagedAttention Figure 19a: milliseconds to swap so many tokens out and in, and to compute them again, by page size.

On this CPU, with real copies between the engine's buffers and real prompts. The paper's numbers are those of OPT-13B on
an A100 behind PCIe, where small pages make many small transfers and computing is cheap.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from quire.bench.calibration import compute_seconds, swap_seconds
from quire.bench.document import table
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.reproduce.result import DIFFERS, HOLDS, Reproduction, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a page
TOKENS = 256
REPEATS = 9
FLAT = 1.2  # the slowest recomputation / the fastest, over all page sizes, if it doesn't depend on them
# A step of the model reads few weights, so that both ways can be seen in one picture.
SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 704, "vocab_size": 512,
}  # fmt: skip


class Point(NamedTuple):
    """Milliseconds for TOKENS tokens in pages of `page` tokens."""

    page: int
    out: float
    back: float
    recompute: float

    @property
    def both(self) -> float:
        """Out and in."""
        return self.out + self.back


def figure_19a() -> Reproduction:
    """The figure's shape: recomputation doesn't depend on the page, swapping does."""
    points = [_measure(page) for page in SIZES]
    rows = [
        (p.page, *(f"{value:.3f}" for value in (p.out, p.back, p.both, p.recompute)), f"{_ratio(p):.1f}")
        for p in points
    ]
    text = table(("page", "swap out ms", "swap in ms", "out and in", "recompute ms", "recompute / swap"), rows)
    computed, swapped = [p.recompute for p in points], [p.both for p in points]
    spread = max(computed) / min(computed)
    worst = swapped[0] / min(swapped)
    results = [
        _claim(f"recomputation is flat (slowest/fastest at most {FLAT})", None, round(spread, 2), spread <= FLAT),
        _claim("swapping is slowest with the smallest page", True, swapped[0] == max(swapped)),
        _claim(f"swapping in pages of 1 token / at best (more than {FLAT})", None, round(worst, 2), worst > FLAT),
        # A CPU swaps by copying memory, and computes far more slowly than a GPU: don't expect this one to hold on it.
        _claim("recomputing is cheaper than swapping in pages of 1 token", True, _ratio(points[0]) < 1),
    ]
    return Reproduction(results, f"{TOKENS} tokens\n{text}", partial(_draw, points))


def _ratio(point: Point) -> float:
    """How many times as long recomputing takes as swapping."""
    return point.recompute / point.both


def _measure(page: int) -> Point:
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, page_size=page, kv_tokens=8 * TOKENS, enable_prefix_caching=False
    )
    print(f"fig19a: pages of {page}", file=sys.stderr)
    with built(config, SHAPE) as made:
        moved = swap_seconds(made.engine, TOKENS, REPEATS)
        (computed,) = compute_seconds(made.engine, [TOKENS], REPEATS)
    return Point(page, 1000 * moved.out, 1000 * moved.back, 1000 * computed)


def _claim(what: str, paper: bool | None, ours: bool | float, holds: bool | None = None) -> Result:
    good = bool(ours) if holds is None else holds
    return Result("P-F19a", what, paper, ours, "" if paper is not None else "ratio", HOLDS if good else DIFFERS)


def _draw(points: list[Point]) -> Figure:
    from quire.reproduce.plots import COLOURS, figure

    fig = figure(7, 4)
    axes = fig.add_subplot()
    pages = [p.page for p in points]
    lines = {"swap out": [p.out for p in points], "swap in": [p.back for p in points],
             "swap out and in": [p.both for p in points], "recompute": [p.recompute for p in points]}  # fmt: skip
    for (label, values), colour in zip(lines.items(), COLOURS):
        axes.plot(pages, values, "o-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(pages, [str(page) for page in pages])
    axes.set_xlabel("tokens of a page")
    axes.set_ylabel(f"ms for {TOKENS} tokens")
    axes.set_title("Figure 19a: swapping and recomputing by page size (one CPU thread)")
    axes.legend()
    return fig
