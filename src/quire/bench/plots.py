"""Plots. Matplotlib is loaded only when one is drawn, and used without a display or global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1f6fb4", "#d1662b", "#3a8f4d", "#8052a3", "#6b6b6b")


def figure(width: float, height: float) -> Figure:
    """Return an empty figure; sizes are in inches. StartupError if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StartupError("matplotlib is not installed, and pictures need it", "pip install 'quire[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def lines(
    points: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    line: str,
    panel: str,
    title: str,
    labels: tuple[str, str],
    logarithmic: bool = True,
) -> Figure:
    """Draw `y` by `x` on an axis of powers of two: a line for each value of `line`, a panel for each value of `panel`.

    `labels` are the axes'."""
    values = list(dict.fromkeys(point[panel] for point in points))
    names = list(dict.fromkeys(point[line] for point in points))
    fig = figure(4.2 * len(values) + 3, 4)
    for axes, value in zip(fig.subplots(1, len(values), squeeze=False).flat, values):
        ticks: set[float] = set()
        for i, name in enumerate(names):
            mine = sorted((p[x], p[y]) for p in points if p[panel] == value and p[line] == name)
            if mine:
                colour, style = COLOURS[i % len(COLOURS)], ("o-", "s--")[i // len(COLOURS) % 2]
                axes.plot(*zip(*mine), style, color=colour, label=str(name), markersize=4)
                ticks.update(at for at, _ in mine)
        axes.set_xscale("log", base=2)
        if logarithmic:
            axes.set_yscale("log")
        axes.set_xticks(
            sorted(ticks), [f"{at // 1024}K" if at >= 1024 else f"{at:g}" for at in sorted(ticks)], fontsize=8
        )
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_title(str(value), fontsize=10)
        axes.legend(fontsize=7)
    fig.suptitle(title)
    return fig


def save(drawn: Figure, path: Path) -> None:
    """Write a PNG with the Agg backend."""
    drawn.savefig(path, dpi=120, format="png")
