"""Measure the memory saved by sharing in parallel sampling and in beam search (PagedAttention Figure 15).

The bundled model decodes with pages of 16 tokens; how much is shared depends on where its beams diverge. Prompts are
stories that the model wrote, cut to lengths sampled like those of the paper's data sets.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bench.histories import SEED, cut, stories
from papers.result import DIFFERS, HOLDS, Reproduction, Result
from quire.bench.document import table
from quire.bench.drive import Decoding, Load, drive
from quire.bench.workloads import Job
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.startup.build import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (2, 4, 6)
TOLERANCE = 0.3  # of the paper's number: another model's beams diverge elsewhere
# (workload, requests, with --full), way -> the paper's per cent for WIDTHS; ShareGPT's are ranges, least to most
WORKLOADS = {"alpaca": (60, 120), "sharegpt": (2, 10)}
PAPER = {
    ("alpaca", "parallel"): (6.1, 8.5, 9.8),
    ("alpaca", "beam"): (37.6, 53.1, 55.2),
    ("sharegpt", "parallel"): (16.2, None, 30.5),
    ("sharegpt", "beam"): (44.3, None, 66.3),
}


class Point(NamedTuple):
    """One bar of the figure, in per cent."""

    workload: str
    way: str
    width: int
    paper: float | None
    ours: float


def figure_15(full: bool = False) -> Reproduction:
    """Measure pages saved / pages without sharing, over all steps of a run, for each workload, way and width."""
    engine = build(
        EngineConfig(threads=1, enable_prefix_caching=False, kv_tokens=2**17, max_num_seqs=64, seed=SEED)
    ).engine
    text = stories(engine)
    points = []
    for (name, way), paper in PAPER.items():
        jobs = cut(name, WORKLOADS[name][full], text)
        for width, number in zip(WIDTHS, paper):
            print(f"fig15: {name}, {way} {width}", file=sys.stderr)
            points.append(Point(name, way, width, number, _saved(engine, jobs, way, width)))
    engine.close()
    rows = [(p.workload, p.way, p.width, "-" if p.paper is None else p.paper, f"{p.ours:.1f}") for p in points]
    counts = ", ".join(f"{count[full]} of {name}" for name, count in WORKLOADS.items())
    text_of = table(("workload", "way", "width", "paper %", "ours %"), rows)
    return Reproduction(_verdicts(points), f"requests: {counts}; seed {SEED}\n{text_of}", partial(_draw, points))


def _saved(engine: Engine, jobs: list[Job], way: str, width: int) -> float:
    decoding = Decoding(temperature=1.0, n=width) if way == "parallel" else Decoding(beam_width=width)
    _, facts = drive(engine, jobs, Load(concurrency=8), decoding)
    return 100 * float(facts["sharing_saved"])


def _verdicts(points: list[Point]) -> list[Result]:
    """Compare each number with the paper's, then judge the figure's claims."""
    results = [_judge(p) for p in points if p.paper is not None]
    ours = {(p.workload, p.way, p.width): p.ours for p in points}
    for name, way in PAPER:
        values = [ours[name, way, width] for width in WIDTHS]
        results.append(_claim(f"{name}, {way}: more sequences save more", values == sorted(values)))
    for name in WORKLOADS:
        more = all(ours[name, "beam", width] > ours[name, "parallel", width] for width in WIDTHS)
        results.append(_claim(f"{name}: beam search saves more than parallel sampling", more))
    for way in ("parallel", "beam"):
        more = all(ours["sharegpt", way, width] > ours["alpaca", way, width] for width in WIDTHS)
        results.append(_claim(f"{way}: longer prompts save more", more))
    return results


def _judge(point: Point) -> Result:
    assert point.paper is not None
    holds = abs(point.ours - point.paper) <= TOLERANCE * point.paper
    what = f"{point.workload}, {point.way} {point.width}: pages saved (within {TOLERANCE:.0%})"
    return Result("P-F15", what, point.paper, round(point.ours, 1), "%", HOLDS if holds else DIFFERS)


def _claim(what: str, holds: bool) -> Result:
    return Result("P-F15", what, True, holds, "", HOLDS if holds else DIFFERS)


def _draw(points: list[Point]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(10, 4)
    for axes, way in zip(fig.subplots(1, 2, sharey=True), ("parallel", "beam")):
        for i, name in enumerate(WORKLOADS):
            mine = [p for p in points if (p.workload, p.way) == (name, way)]
            at = np.arange(len(mine)) + 0.4 * i - 0.2
            bars = axes.bar(at, [p.ours for p in mine], 0.36, color=COLOURS[i], label=f"{name}, ours")
            axes.bar_label(bars, fmt="%.1f", fontsize=8, label_type="center", color="white")
            there = [(x, p.paper) for x, p in zip(at, mine) if p.paper is not None]
            axes.plot(*zip(*there), "k_", markersize=20, label="paper" if i else None)
        axes.set_xticks(range(len(WIDTHS)), [str(width) for width in WIDTHS])
        axes.set_ylim(0, 95)
        axes.set_xlabel("sequences" if way == "parallel" else "beams")
        axes.set_title("parallel sampling" if way == "parallel" else "beam search")
        axes.legend(loc="upper left", fontsize=8)
    fig.supylabel("pages saved, %")
    fig.suptitle("Figure 15: memory saved by sharing (bundled model, 16-token pages)")
    return fig
