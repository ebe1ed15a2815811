"""Reproduce PagedAttention Figure 11: the lengths of prompts and outputs, for our generators of ShareGPT-like and
Alpaca-like work.

The data sets themselves aren't used: log-normal lengths have the paper's means, then they are clipped for serving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from papers.result import Reproduction, near
from quire.bench.document import table
from quire.bench.workloads import DRAWN, Lengths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNT = 50_000
TOLERANCE = 0.05
MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58)}  # prompt, output: the paper's
SHOWN = {"sharegpt": 2000, "alpaca": 250}  # the histogram's longest length
SERVED = """Every reproduction serves lengths that are clipped, so means are below the paper's where they differ: a
sequence holds less memory, and more of them fit. The tails before clipping are log-normal's, not the data sets'. vLLM
was measured on the same clipped lengths here, so they stay."""


def draws(name: str, count: int = COUNT) -> tuple[Lengths, Lengths]:
    """Return the prompt and output lengths of a workload, not clipped, from the workload's own seed."""
    rng = np.random.default_rng(0)
    prompts, outputs = DRAWN[name]
    return prompts.draw(rng, count), outputs.draw(rng, count)


def figure_11() -> Reproduction:
    """Compare the means before clipping with the paper's. Clipped lengths, which all entries serve, may have smaller
    means."""
    results, rows = [], []
    for name, means in MEANS.items():
        for what, kind, lengths, paper in zip(("prompt", "output"), DRAWN[name], draws(name), means):
            before, after = float(lengths.mean()), float(kind.clip(lengths).mean())
            for when, mean in (("before clipping", before), ("as served, clipped", after)):
                label = f"{name}: mean {what} length {when} (within {TOLERANCE:.0%})"
                results.append(near("P-F11", label, paper, round(mean, 1), "tokens", TOLERANCE))
            clipped = float((kind.clip(lengths) != lengths).mean())
            rows.append((name, what, paper, f"{before:.1f}", f"{after:.1f}", f"{100 * clipped:.1f}%"))
    head = ("workload", "length", "paper's mean", "mean before clipping", "after", "clipped")
    return Reproduction(results, f"{table(head, rows)}\n{SERVED}", _draw)


def _draw() -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(10, 3.8)
    for axes, (name, longest) in zip(fig.subplots(1, 2), SHOWN.items()):
        bins = np.linspace(0, longest, 51)
        for what, lengths, colour in zip(("prompt", "output"), draws(name), COLOURS):
            axes.hist(lengths, bins, density=True, alpha=0.5, color=colour, label=f"{what}, mean {lengths.mean():.0f}")
        axes.set_title(f"{name}: {COUNT:,} draws before clipping")
        axes.set_xlabel("tokens")
        axes.set_ylabel("density")
        axes.legend()
    return fig
