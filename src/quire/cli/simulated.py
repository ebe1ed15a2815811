"""The picture of a simulation: latency by request rate; and of one run, the memory by category over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.memory.answers import Usage
from quire.reproduce.plots import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CATEGORIES = [name for name in Usage._fields if name != "free"]


def plot_results(results: Sequence[dict[str, Any]]) -> Figure:
    """Two panels: normalised latency (of one run: requests), and memory (over time, or by rate)."""
    fig = figure(11, 4)
    left, right = fig.subplots(1, 2)
    if len(results) == 1:
        _plot_requests(left, results[0]["moments"])
        _plot_memory(right, [m["time"] for m in results[0]["moments"]], results[0]["moments"], "seconds")
    else:
        runs = [run for run in results if run["normalised_s"] is not None]
        for which, colour in zip(("mean", "p99"), COLOURS):
            values = [1000 * run["normalised_s"][which] for run in runs]
            left.plot([run["rate"] for run in runs], values, "o-", color=colour, label=which)
        if max(run["normalised_s"]["p99"] for run in runs) > 10 * min(run["normalised_s"]["mean"] for run in runs):
            left.set_yscale("log")
        left.set_xlabel("requests/s")
        left.set_ylabel("normalised latency, ms a token")
        left.set_title("Latency of requests that ended")
        left.legend()
        _plot_memory(right, [run["rate"] for run in runs], [run["memory_bytes"] for run in runs], "requests/s")
    return fig


def _plot_requests(axes: Axes, moments: Sequence[dict[str, Any]]) -> None:
    times = [moment["time"] for moment in moments]
    for name, colour in zip(("running", "waiting"), COLOURS):
        axes.plot(times, [moment[name] for moment in moments], color=colour, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests")
    axes.set_title("Requests over time")
    axes.legend()


def _plot_memory(axes: Axes, at: Sequence[float], usages: Sequence[dict[str, Any]], label: str) -> None:
    shares = [[100 * usage[name] / sum(usage[key] for key in Usage._fields) for usage in usages] for name in CATEGORIES]
    axes.stackplot(at, shares, labels=CATEGORIES, colors=COLOURS)
    axes.set_ylim(0, 100)
    axes.set_xlabel(label)
    axes.set_ylabel("% of the KV memory")
    axes.set_title("Memory by category")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=len(CATEGORIES), frameon=False)
