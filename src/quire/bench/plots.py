"""Plots. Matplotlib is loaded only when one is drawn, and used without a display or global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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


def save(drawn: Figure, path: Path) -> None:
    """Write a PNG with the Agg backend."""
    drawn.savefig(path, dpi=120, format="png")
