"""The kinds of picture that entries use: lines, bars (grouped or stacked, upright or lying), several of these in one
figure, blocks of memory, and the paper's values beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.entry import Derive, Points
from quire.bench.plots import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plot = Callable[[Points], "Figure"]
Block = tuple[str, float, float, str, str]
"""A block of memory: its line, left edge, width, colour and label."""
PALETTE = (*COLOURS, "#b58900")


class Part(NamedTuple):
    """A part of a picture: it draws the points that `of` makes on axes, with a panel for each value of the field
    `panel`. A panel is 3.6 inches high, or as high as the values of the field `rows` need."""

    draw: Callable[[Axes, Points], None]
    title: str
    panel: str | None
    of: Derive
    rows: str | None = None

    def panels(self, points: Points) -> list[tuple[str, Points]]:
        """Return the title and the points of each panel."""
        points = self.of(points)
        values = _values(points, self.panel)
        return [(self.title if v is None else str(v), _having(points, self.panel, v)) for v in values]

    def height(self, points: Points) -> float:
        """Return the inches of a panel with these points."""
        return 3.6 if self.rows is None else 1.3 + 0.3 * len(_values(points, self.rows))


@dataclass(frozen=True)
class Panels:
    """A picture in panels."""

    title: str
    parts: Sequence[Part]
    columns: int | None = None

    def __call__(self, points: Points) -> Figure:
        panels = [(part, *panel) for part in self.parts for panel in part.panels(points)]
        columns = self.columns or (2 if len(panels) == 4 else min(3, len(panels)))
        rows = -(-len(panels) // columns)
        fig = figure(max(8.0, 4.6 * columns), rows * max(part.height(mine) for part, _, mine in panels))
        grid = fig.subplots(rows, columns, squeeze=False).flat
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, (part, title, mine) in zip(grid, panels):
            part.draw(axes, mine)
            if len(panels) > 1:
                axes.set_title(title, fontsize=10)
            if names := axes.get_legend_handles_labels()[1]:
                wide = part.rows is None and len(names) > 3 and max(map(len, names)) < 30
                axes.legend(fontsize=7, ncols=1 + wide, loc="best" if part.rows is None else "lower right")
        fig.suptitle(self.title)
        return fig


def row(title: str, *plots: Panels, columns: int | None = None) -> Panels:
    """Plot several plots in one figure, with the titles of their panels."""
    return Panels(title, [part for plot in plots for part in plot.parts], columns)


def tall(fields: Mapping[str, str], line: str = "line") -> Derive:
    """Return a function that makes points with one `value` each out of points with several fields, for plots with a
    line or a bar for each field. `fields` are names and labels, which are format strings over the point."""

    def choose(points: Points) -> Points:
        return [
            {**point, line: label.format_map(point), "value": point[field]}
            for field, label in fields.items()
            for point in points
            if point.get(field) is not None
        ]

    return choose


def lines(
    title: str, x: str, y: str, *, line: str | None = None, panel: str | None = None, labels: tuple[str, str],
    log_x: bool = False, log_y: bool = False, limit: float | None = None, bottom: float | None = 0.0,
    top: float | None = None, markers: bool = True, of: Derive = list,
) -> Panels:  # fmt: skip
    """Plot the field `y` by `x`: a line for each value of `line`, a panel for each value of `panel`. `limit` is drawn
    as a dotted horizontal line."""

    def draw(axes: Axes, points: Points) -> None:
        points = [p for p in points if p.get(y) is not None]
        for i, name in enumerate(_values(points, line)):
            mine = sorted((p[x], p[y]) for p in _having(points, line, name))
            style = ("o-", "s--", "^:")[i // len(COLOURS) % 3][not markers :]
            axes.plot(*zip(*mine), style, color=COLOURS[i % len(COLOURS)], label=_label(name), markersize=4)
        if log_x:
            ticks = sorted({p[x] for p in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [_short(at) for at in ticks], fontsize=8)
        if log_y:
            axes.set_yscale("log")
        elif bottom is not None:
            axes.set_ylim(bottom, top)
        if limit is not None:
            axes.axhline(limit, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])

    return Panels(title, [Part(draw, title, panel, of)])


def bars(
    title: str, x: str, y: str, *, bar: str | None = None, panel: str | None = None, label: str, stacked: bool = False,
    form: str = "%.3g", limit: float | None = None, horizontal: bool = False, log: bool = False,
    paper: Callable[[Mapping[str, Any]], float | None] | None = None, of: Derive = list,
) -> Panels:  # fmt: skip
    """Plot bars of the field `y` at each value of `x`: one for each value of `bar`, side by side, stacked, or alone if
    no place has several. `horizontal`: bars lie, with room for long names of places. A black line marks the value that
    `paper` gives for a bar's point, a dotted one `limit`."""

    def draw(axes: Axes, points: Points) -> None:
        points = [p for p in points if p.get(y) is not None]
        at, names = _values(points, x), _values(points, bar)
        alone = stacked or len(points) == len(at)
        width = 0.7 if alone else 0.8 / len(names)
        below = [0.0] * len(at)
        for i, name in enumerate(names):
            mine = {p[x]: p for p in _having(points, bar, name)}
            heights = [mine[place][y] if place in mine else 0.0 for place in at]
            places = [k + (0.0 if alone else width * (i - (len(names) - 1) / 2)) for k in range(len(at))]
            drawn = (axes.barh if horizontal else axes.bar)(
                places, heights, 0.95 * width, below, color=PALETTE[i % len(PALETTE)], label=_label(name)
            )
            shown = [form % h if h and (not stacked or h > 0.03 * _most(points, y)) else "" for h in heights]
            inside = stacked or paper is not None
            axes.bar_label(
                drawn, shown, fontsize=7, label_type="center" if inside else "edge",
                color="white" if inside else "black", padding=0 if inside else 2,
            )  # fmt: skip
            if stacked:
                below = [low + more for low, more in zip(below, heights)]
            if paper is not None:
                there = [(k, paper(mine[place])) for k, place in zip(places, at) if place in mine]
                marks = [mark for mark in there if mark[1] is not None]
                axes.plot(*zip(*marks), "k_", markersize=18, label=None if i else "the paper's") if marks else None
        if horizontal:
            axes.set_yticks(range(len(at)), list(map(str, at)), fontsize=8)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
        else:
            labels = [str(place).replace(", ", "\n").replace(" (", "\n(") for place in at]
            axes.set_xticks(range(len(at)), labels, fontsize=8)
        scale = axes.xaxis if horizontal else axes.yaxis
        if log:
            (axes.set_xscale if horizontal else axes.set_yscale)("log")
            scale.set_major_formatter("{x:g}")
            scale.set_minor_formatter("")
        if stacked:
            (axes.set_xlim if horizontal else axes.set_ylim)(0, (1.6 if horizontal else 1.5) * max(below))
        else:
            (axes.set_xmargin if horizontal else axes.set_ymargin)(0.15)
        if limit is not None:
            (axes.axvline if horizontal else axes.axhline)(limit, color="black", linewidth=0.6, linestyle=":")
        scale.set_label_text(label)

    return Panels(title, [Part(draw, title, panel, of, x if horizontal else None)])


def blocks(title: str, of: Callable[[Points], Iterable[Block]], ticks: Sequence[float] = ()) -> Plot:
    """Plot lines of blocks, which `of` makes from points."""

    def draw(points: Points) -> Figure:
        found = list(of(points))
        lines = list(dict.fromkeys(line for line, *_ in found))
        fig = figure(11, 1.3 + 0.6 * len(lines))
        axes = fig.subplots()
        for line, left, width, colour, label in found:
            at = lines.index(line)
            axes.barh(at, width, 0.8, left=left, color=colour, edgecolor="white")
            axes.text(left + width / 2, at, label, ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(lines)), lines, fontsize=8)
        axes.invert_yaxis()
        axes.set_xticks(ticks)
        axes.spines[:].set_visible(False)
        fig.suptitle(title)
        return fig

    return draw


def _values(points: Points, field: str | None) -> list[Any]:
    return [None] if field is None else list(dict.fromkeys(p[field] for p in points if field in p))


def _having(points: Points, field: str | None, wanted: Any) -> Points:
    return points if field is None else [p for p in points if p.get(field) == wanted]


def _most(points: Points, field: str) -> float:
    return float(max(point[field] for point in points))


def _label(name: Any) -> str | None:
    return None if name is None else str(name)


def _short(number: float) -> str:
    return f"{number // 1024:g}K" if number >= 1024 and number % 1024 == 0 else f"{number:g}"
