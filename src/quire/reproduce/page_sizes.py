"""Page sizes from 1 to 256 tokens: what each wastes, how many requests it batches, the rate that it sustains.

PagedAttention §7.2 says what sizes to choose and why large ones lose; a review asked for more than its Figure 18b. By
simulation: only fragmentation differs here, since every size has the same costs. What a kernel makes of small pages is
Figure 18's question (attention_blocks.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from quire.bench.document import table
from quire.cli.simulate import Plant
from quire.reproduce.result import DIFFERS, HOLDS, Reproduction, Result, measured
from quire.reproduce.serving import LIMIT, SEED, TOLERANCE, Load
from quire.sim.simulate import Objective, highest_rate, mean_usage, meets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CALIBRATION = "a100-13b"
DEFAULT = 16


class Trace(NamedTuple):
    """A workload: the rate at which its waste is looked at, the paper's of Figure 13; seconds of its traces; the sizes
    that Figure 18b found best, which §7.2 explains."""

    rate: float
    seconds: float
    best: tuple[int, ...]


TRACES = {"sharegpt": Trace(2.0, 300.0, (16, 32, 64, 128)), "alpaca": Trace(30.0, 45.0, (16, 32))}


class Point(NamedTuple):
    """A page size: the share of the taken memory that is the unfilled rest of pages; requests that ran at once (mean
    over steps) and how many were preempted, at the trace's rate; requests a second that keep to LIMIT."""

    workload: str
    page: int
    internal: float
    running: float
    preemptions: int
    highest: float


def page_sizes() -> Reproduction:
    """The sweep of both workloads, for OPT-13B on the paper's A100 with 12 GiB of KV."""
    points = [point for workload in TRACES for point in sweep(workload, SIZES)]
    return Reproduction(_verdicts(points), _text(points), partial(_draw, points))


def sweep(workload: str, sizes: Sequence[int]) -> list[Point]:
    """A point for each size. The search for a rate begins where the last size's ended."""
    load, points = Load(CALIBRATION, workload), []
    start = load.capacity("paged")
    plant = load.plant("paged")
    for page in sizes:
        print(f"r1: {workload}, pages of {page}", file=sys.stderr)
        point = _point(load, plant._replace(config=replace(plant.config, page_size=page)), workload, start)
        points.append(point)
        start = point.highest
    return points


def _point(load: Load, plant: Plant, workload: str, start: float) -> Point:
    rate, seconds, _ = TRACES[workload]
    outcome = plant.simulate(load.trace(rate, seconds))
    usage = mean_usage([moment for moment in outcome.moments if moment.time <= seconds])
    goal = Objective("mean", "normalised", LIMIT)
    highest = highest_rate(
        lambda asked: meets(plant.simulate(load.trace(asked, seconds), [goal]), [goal]), start, TOLERANCE,
        1 + TOLERANCE, 2.0,
    )  # fmt: skip
    assert 0 < highest < math.inf, f"traces of {seconds} s are too short to tell"
    internal = usage.internal / (usage.used + usage.internal)
    return Point(workload, plant.config.page_size, internal, outcome.totals.mean_running, outcome.totals.preemptions,
                 highest)  # fmt: skip


def _verdicts(points: Sequence[Point]) -> list[Result]:
    """What §7.2 says as far as fragmentation goes, then the numbers, for which there are no claims."""
    results = []
    for workload, trace in TRACES.items():
        of = {point.page: point for point in points if point.workload == workload}
        most = max(point.highest for point in of.values())
        worst = min(of[page].highest for page in trace.best if page in of)
        what = f"{workload}: pages of {'/'.join(map(str, trace.best))} sustain the best rate (all within 10 %)"
        results.append(_claim(what, worst >= 0.9 * most))
        larger = [point.highest for point in of.values() if point.page > max(trace.best)]
        results.append(_claim(f"{workload}: still larger pages lose more than 10 %", max(larger) < 0.9 * most))
        falling = [of[page].internal for page in sorted(of)]
        results.append(_claim(f"{workload}: larger pages waste more", falling == sorted(falling)))
        for point in of.values():
            name = f"{workload}, pages of {point.page}"
            results.append(_measured(f"{name}: internal waste", round(100 * point.internal, 2), "% of taken memory"))
            results.append(_measured(f"{name}: mean batch at {trace.rate:g}/s", round(point.running, 2), "requests"))
            results.append(_measured(f"{name}: highest rate", round(point.highest, 2), "requests/s"))
    return results


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
    about = f"OPT-13B on an A100, 12 GiB of KV, simulated; waste and batches of {rates}; seed {SEED}"
    limit = (
        f"Highest rates: mean normalised latency up to {1000 * LIMIT:g} ms, found to {TOLERANCE:.0%}; such short traces"
        " end before a queue grows long, so rates are somewhat too high, for all sizes alike."
    )
    return "\n".join((about, limit, table(head, rows)))


def _draw(points: Sequence[Point]) -> Figure:
    """Waste, batches and rates by page size, a line a workload; the last two as shares of the best."""
    from quire.reproduce.plots import COLOURS, figure

    fig = figure(12, 3.8)
    panels = (
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
