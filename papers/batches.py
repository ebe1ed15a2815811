"""Reproduce PagedAttention Figure 13 by simulation: the number of requests that each system runs at once.

OPT-13B in 12 GiB, ShareGPT-like requests at 2 a second (a), Alpaca-like ones at 30 (b). The A100's host times were
derived from the paged system's two batches here, so only Orca's batches are claims.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire.bench.document import table
from papers.result import MEASURED, Reproduction, Result, near
from papers.serving import HOUR, SECONDS, SYSTEMS, Load, in_parallel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {"paged": (30.42, 132.44), "orca-oracle": (13.62, 72.75), "orca-pow2": (9.81, 43.24), "orca-max": (7.00, 7.00)}
TRACES = {"ShareGPT": (Load("a100-13b", "sharegpt"), 2.0), "Alpaca": (Load("a100-13b", "alpaca"), 30.0)}
TOLERANCE = 0.2
INPUT = "(its batch is an input)"  # of the calibration: of the paged system's rows, which claim nothing
WARM = 0.1  # of the trace: memory fills

Batches = dict[str, list[float]]
"""Trace -> mean batches, in the order of PAPER."""


def figure_13(full: bool = False) -> Reproduction:
    """Compare means over time while requests come, after the first tenth of the trace."""
    seconds = HOUR if full else SECONDS
    jobs = [(load, system, rate, seconds) for load, rate in reversed(TRACES.values()) for system in PAPER]
    done = in_parallel(mean_running, jobs)
    batches = {name: done[i * len(PAPER) :][: len(PAPER)] for i, name in enumerate(reversed(TRACES))}
    results = []
    for i, name in enumerate(TRACES):
        ours = dict(zip(PAPER, batches[name]))
        for system, numbers in PAPER.items():
            what, count = f"{name}: requests that run at once, {SYSTEMS[system]}", round(ours[system], 2)
            if system == "paged":
                results.append(_input(what, numbers[i], count, "requests"))
            else:
                what = f"{what} (within {TOLERANCE:.0%})"
                results.append(near("P-F13", what, numbers[i], count, "requests", TOLERANCE))
        for system in ("orca-oracle", "orca-max"):
            paper = round(PAPER["paged"][i] / PAPER[system][i], 2)
            what = f"{name}: vLLM / {SYSTEMS[system]}"
            results.append(_input(what, paper, round(ours["paged"] / ours[system], 2), "ratio"))
        falling = list(ours.values()) == sorted(ours.values(), reverse=True)
        results.append(_input(f"{name}: vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max)", True, falling, ""))
    results = [result._replace(real_or_simulated="simulated") for result in results]
    return Reproduction(results, _text(batches, seconds), partial(_draw, batches), batches)


def _input(what: str, paper: float, ours: float, unit: str) -> Result:
    """Return a result without a claim, since the paged system's batch is an input of the calibration."""
    return Result("P-F13", f"{what} {INPUT}", paper, ours, unit, MEASURED)


def mean_running(load: Load, system: str, rate: float, seconds: float) -> float:
    """Return the number of requests in memory, averaged over time."""
    trace = load.trace(rate, seconds)
    outcome = load.serve(system, trace, until=trace[-1].arrival)
    return float(np.mean([moment.running for moment in outcome.timeline if moment.time >= WARM * trace[-1].arrival]))


def _text(batches: Batches, seconds: float) -> str:
    rows = [
        (
            SYSTEMS[system],
            *(f"{value:.2f}" for i, name in enumerate(TRACES) for value in (PAPER[system][i], ours[name])),
        )
        for system, ours in ((s, {name: batches[name][k] for name in TRACES}) for k, s in enumerate(PAPER))
    ]
    head = ("system", *(f"{name}, {whose}" for name in TRACES for whose in ("paper", "ours")))
    about = f"OPT-13B, simulated, {seconds:g} s of requests: averages over time after the first tenth"
    return (
        f"{about}\n{table(head, rows)}\n"
        "The A100's host times were derived from vLLM's own two batches by Little's law, with the paper's mean output\n"
        "of 338 tokens: vLLM's rows, and ratios to them, say only that lengths agree. Our outputs of ShareGPT are cut\n"
        "at 1,024 tokens, which leaves a mean of about 300 (see fig11): where a system isn't overloaded, as vLLM\n"
        "here, fewer requests run at once in the same proportion."
    )


def _draw(batches: Batches) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(10, 4)
    for axes, (i, name) in zip(fig.subplots(1, 2), enumerate(TRACES)):
        at = np.arange(len(PAPER))
        paper = [numbers[i] for numbers in PAPER.values()]
        for values, label, place, colour in (
            (paper, "paper", -0.2, COLOURS[4]),
            (batches[name], "ours", 0.2, COLOURS[0]),
        ):
            bars = axes.bar(at + place, values, 0.38, color=colour, label=label)
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.set_xticks(at, [SYSTEMS[system] for system in PAPER], fontsize=8)
        axes.set_title(f"{name}, {TRACES[name][1]:g} requests/s")
        axes.set_ylim(0, 1.15 * max(*batches[name], *paper))
        axes.legend()
    fig.supylabel("requests that run at once")
    fig.suptitle("Figure 13: batched requests (OPT-13B, simulated)")
    return fig
