"""Simulate page sizes from 1 to 256 tokens: the waste, the batch and the sustained rate of each.

PagedAttention §7.2 recommends sizes and explains why large ones lose. This adds waste, batches and rates to its Figure
18b. Only fragmentation differs here, since every size has the same step costs. The kernel's cost of small pages is
Figure 18a (attention_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured
from papers.serving import LIMIT, SEED, STEP, TOLERANCE, Load, in_parallel
from quire.bench.document import table
from quire.errors import StartupError
from quire.sim.simulation import Objective, highest_rate, mean_usage, meets_objectives

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CALIBRATION = "a100-13b"
DEFAULT = 16
WARM = 0.1  # of a trace: excluded from averages, as memory fills then; so is the time after the last arrival
GOOD = 0.9  # of the best rate: sizes above this share count as best
ERROR = 1 + TOLERANCE  # of a ratio of two rates: a search may be too low by this share


class Trace(NamedTuple):
    """A workload: the rate at which waste is measured (Figure 13), the seconds of its traces, and the best sizes of
    Figure 18b."""

    rate: float
    seconds: float
    best: tuple[int, ...]


TRACES = {"sharegpt": Trace(2.0, 300.0, (16, 32, 64, 128)), "alpaca": Trace(30.0, 300.0, (16, 32))}


class Point(NamedTuple):
    """The results of one page size, at the trace's rate.

    `internal` is the unfilled share of used memory and `running` the running requests, both means over time until the
    last arrival; `preemptions` are counted until then. `highest` is the highest rate in requests a second that keeps
    LIMIT."""

    workload: str
    page: int
    internal: float
    running: float
    preemptions: int
    highest: float


def page_sizes() -> Reproduction:
    """Sweep the sizes for both workloads: OPT-13B on the paper's A100 with 12 GiB of KV."""
    points = sweep(SIZES)
    return Reproduction(_verdicts(points), _text(points), partial(_draw, points), [one._asdict() for one in points])


def sweep(sizes: Sequence[int]) -> list[Point]:
    """Return a point for each workload and size, computed on all cores. Rate searches begin at the capacity of DEFAULT
    pages."""
    starts = {workload: Load(CALIBRATION, workload).capacity("paged") for workload in TRACES}
    jobs = [(workload, trace, page, starts[workload]) for workload, trace in TRACES.items() for page in sizes]
    found: list[Point] = in_parallel(point, jobs)
    return found


def point(workload: str, trace: Trace, page: int, start: float) -> Point:
    """Return the point of one size. StartupError if the traces are too short to find a rate."""
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
    """Return the claims of §7.2 about fragmentation, then the measured numbers."""
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
    """Judge the claims of §7.2.

    The paper: pages of 16 to 128 tokens are best for ShareGPT; for Alpaca 16 and 32 work well, and larger ones
    "significantly degrade the performance". The degradation, and whether it is large enough to reject a size, are
    separate results."""
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
    """Draw waste, batches and rates by page size, a line for each workload; the last two as shares of the best."""
    from quire.bench.plots import COLOURS, figure

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
