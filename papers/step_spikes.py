"""Measure decode steps of four sequences of 32K tokens, with pages mapped during compute and on demand (vAttention
Figure 10).

Llama-3-8B with dummy weights, on a GPU. Each sequence begins shortly before the end of a page of 1,024 tokens of a
layer, one after another. So a short window has every spike of the paper's 3,500 steps, more densely.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from papers.dummy_engines import dummy, virtual
from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quire.core.engine import Engine

MODEL, CONTEXT = "llama3-8b", 32768
PAGE = 1024  # tokens of a page of 2 MB of one layer's keys
STEPS = {False: 200, True: 3500}  # with --full the paper's number
ENDS = (30, 70, 110, 150)  # steps until each sequence's page is full
DEPTHS = (2, 1)  # steps in flight: quire's, and the paper's engine's
LAYOUTS = ("layer", "sliced")
MOST = 1.1  # p99 / median with map-ahead
SPIKE = 1.2  # of the median: a step above it is a spike
PAPER = 41 / 25  # of a step that maps pages / of others

Runs = Sequence[dict[str, Any]]


def figure_10(full: bool = False) -> Reproduction:
    """Run each layout with map-ahead and without, at both depths. StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig10")
    runs: list[dict[str, Any]] = []
    steps = STEPS[full]
    length = CONTEXT + len(DEPTHS) * (PAGE + steps // PAGE * PAGE) + steps + 64
    for layout in LAYOUTS:
        for ahead in (False, True):
            print(f"{layout}, map-ahead {'on' if ahead else 'off'}", file=sys.stderr)
            with dummy(MODEL, length, len(ENDS), **virtual(layout, ahead)) as made:
                for i, depth in enumerate(DEPTHS):
                    # Each run uses later addresses: the last run's pages are mapped already.
                    end = CONTEXT + i * (PAGE + steps // PAGE * PAGE)
                    found = timed(made.engine, depth, [end - at for at in ENDS], steps)
                    runs.append({"layout": layout, "ahead": ahead, "depth": depth, **found})
    head = (
        "layout",
        "map-ahead",
        "in flight",
        "median ms",
        "p99 ms",
        "most ms",
        "spikes",
        "steps with maps in their way",
        "pages",
    )
    rows = [
        (run["layout"], "on" if run["ahead"] else "off", run["depth"], *(f"{ms:.2f}" for ms in _facts(run["ms"])[:3]),
         _facts(run["ms"])[3], sum(map(bool, run["maps"])), sum(run["maps"]))
        for run in runs
    ]  # fmt: skip
    return Reproduction(judged(runs), table(head, rows), partial(draw, runs), runs)


def timed(engine: Engine, depth: int, lengths: Sequence[int], steps: int) -> dict[str, Any]:
    """Return the `ms` of each step, and the pages mapped on its critical path."""
    from quire.bench import contexts
    from quire.bench.shapes import local_runner

    engine.depth = depth
    contexts.skipping(engine)
    contexts.start(engine, lengths)
    contexts.step_seconds(engine, 0)
    seconds, maps = [], []
    store: Any = local_runner(engine).store  # virtual memory's
    for _ in range(steps):
        before = store.mapping_stats
        seconds += contexts.step_seconds(engine, 1, 0)
        after = store.mapping_stats
        maps.append(after.maps - after.overlapped - (before.maps - before.overlapped))
    contexts.stop(engine)
    return {"ms": [round(1000 * one, 4) for one in seconds], "maps": maps}


def _facts(ms: Sequence[float]) -> tuple[float, float, float, int]:
    """Return the median, the 99th percentile, the maximum, and the number of spikes."""
    middle, ordered = median(ms), sorted(ms)
    return middle, ordered[len(ms) * 99 // 100], ordered[-1], sum(one > SPIKE * middle for one in ms)


def judged(runs: Runs) -> list[Result]:
    results = []
    for run in runs:
        middle, late, most, spikes = _facts(run["ms"])
        what = f"{run['layout']}, {run['depth']} in flight"
        if run["ahead"]:
            ratio = round(late / middle, 3)
            verdict = HOLDS if ratio <= MOST else DIFFERS
            said = f"{what}, map-ahead: p99 of a step / median (at most {MOST})"
            results.append(Result("V-F10", said, "no spikes", ratio, "times", verdict))
        elif run["layout"] == "layer":
            ratio = round(most / middle, 3)
            verdict = HOLDS if ratio >= SPIKE else DIFFERS
            said = f"{what}, synchronous: the slowest step / median (a spike is {SPIKE})"
            results.append(Result("V-F10", said, round(PAPER, 2), ratio, "times", verdict))
            results.append(measured("V-F10", f"{what}, synchronous: spikes, of {len(ENDS)} full pages", spikes, ""))
        else:
            results.append(measured("V-F10", f"{what}, synchronous: p99 / median", round(late / middle, 3), "times"))
    return results


def draw(data: Runs) -> Figure:
    """Draw latencies of consecutive steps, a panel for each run."""
    from quire.bench.plots import COLOURS, figure

    panels = list(dict.fromkeys((run["layout"], run["depth"]) for run in data))
    fig = figure(5.5 * len(panels) / 2, 6)
    for axes, (layout, depth) in zip(fig.subplots(2, -(-len(panels) // 2), squeeze=False).flat, panels):
        mine = [run for run in data if (run["layout"], run["depth"]) == (layout, depth)]
        for run in mine:
            label, colour = ("map-ahead", COLOURS[0]) if run["ahead"] else ("synchronous", COLOURS[1])
            axes.plot(run["ms"], color=colour, label=label, linewidth=1)
        axes.set_ylim(0, 1.25 * max(max(run["ms"]) for run in mine))
        axes.set_title(f"{layout}, {depth} in flight", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("ms")
        axes.legend(fontsize=8)
    fig.suptitle("vAttention Figure 10: decode steps, 4 sequences of 32K tokens, Llama-3-8B")
    return fig
