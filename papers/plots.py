"""The kinds of picture that entries use: lines, bars (grouped or stacked, upright or lying), blocks of memory, and the
paper's values beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from papers.result import Result
from quire.bench.plots import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[Mapping[str, Any]]
Plot = Callable[[Points], "Figure"]
Block = tuple[str, float, float, str, str]
"""A block of memory: its line, left edge, width, colour and label."""
WIDTH, HEIGHT = 4.6, 3.6  # inches of a panel


def lines(
    title: str, x: str, y: str, *, line: str | None = None, panel: str | None = None, labels: tuple[str, str],
    log_x: bool = False, log_y: bool = False, limit: float | None = None, bottom: float | None = 0.0,
) -> Plot:  # fmt: skip
    """Plot the field `y` by `x`: a line for each value of `line`, a panel for each value of `panel`. `limit` is drawn
    as a dotted horizontal line."""

    def draw(axes: Axes, points: Points) -> None:
        for i, name in enumerate(_values(points, line)):
            mine = sorted((p[x], p[y]) for p in _having(points, line, name) if p.get(y) is not None)
            if mine:
                style = ("o-", "s--", "^:")[i // len(COLOURS) % 3]
                axes.plot(*zip(*mine), style, color=COLOURS[i % len(COLOURS)], label=_label(name), markersize=4)
        if log_x:
            ticks = sorted({p[x] for p in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [_short(at) for at in ticks], fontsize=8)
        if log_y:
            axes.set_yscale("log")
        elif bottom is not None:
            axes.set_ylim(bottom)
        if limit is not None:
            axes.axhline(limit, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])

    return partial(_panels, draw, title, panel)


def bars(
    title: str, x: str, y: str, *, bar: str | None = None, panel: str | None = None, label: str, stacked: bool = False,
    form: str = "%.3g", limit: float | None = None,
) -> Plot:  # fmt: skip
    """Plot bars of the field `y` at each value of `x`, side by side or stacked: one for each value of `bar`."""

    def draw(axes: Axes, points: Points) -> None:
        at = _values(points, x)
        names = _values(points, bar)
        width = 0.7 if stacked else 0.8 / len(names)
        below = [0.0] * len(at)
        for i, name in enumerate(names):
            mine = {p[x]: p[y] for p in _having(points, bar, name)}
            heights = [mine.get(place) or 0.0 for place in at]
            places = [k + (0.0 if stacked else width * (i - (len(names) - 1) / 2)) for k in range(len(at))]
            drawn = axes.bar(places, heights, 0.95 * width, below, color=COLOURS[i % len(COLOURS)], label=_label(name))
            axes.bar_label(drawn, fmt=form, fontsize=7, label_type="center" if stacked else "edge")
            if stacked:
                below = [low + more for low, more in zip(below, heights)]
        axes.set_xticks(range(len(at)), [str(place).replace(", ", "\n") for place in at], fontsize=8)
        if limit is not None:
            axes.axhline(limit, color="black", linewidth=0.6, linestyle=":")
        axes.set_ylabel(label)

    return partial(_panels, draw, title, panel)


def lying(
    title: str, y: str, x: str, *, bar: str | None = None, label: str, stacked: bool = False, form: str = "%.3g",
    limit: float | None = None,
) -> Plot:  # fmt: skip
    """Plot horizontal bars of the field `x` for each value of `y`, which may be a long text: one for each value of
    `bar`, below each other or stacked. `limit` is drawn as a dotted vertical line."""

    def draw(points: Points) -> Figure:
        at, names = _values(points, y), _values(points, bar)
        height = 0.7 if stacked else 0.8 / len(names)
        fig = figure(9, 1.2 + 0.33 * len(at))
        axes = fig.subplots()
        left = [0.0] * len(at)
        for i, name in enumerate(names):
            mine = {p[y]: p[x] for p in _having(points, bar, name) if p.get(x) is not None}
            widths = [mine.get(place, 0.0) for place in at]
            places = [k + (0.0 if stacked else height * (i - (len(names) - 1) / 2)) for k in range(len(at))]
            colour = (*COLOURS, "#c9c9c9")[i % (len(COLOURS) + 1)]
            drawn = axes.barh(places, widths, 0.95 * height, left, color=colour, label=_label(name))
            if not stacked:
                axes.bar_label(drawn, fmt=form, fontsize=7, padding=3)
            else:
                texts = [form % width if width >= 0.04 * max(widths) else "" for width in widths]
                axes.bar_label(drawn, texts, fontsize=7, label_type="center")
                left = [start + more for start, more in zip(left, widths)]
        axes.set_yticks(range(len(at)), [str(place) for place in at], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        if limit is not None:
            axes.axvline(limit, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        if bar is not None:
            fig.legend(loc="outside right upper", fontsize=7)
        fig.suptitle(title)
        return fig

    return draw


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


def by_measure(plot: Callable[..., Plot], title: str, x: str, measures: Mapping[str, str], **options: Any) -> Plot:
    """Return a plot (`lines` or `bars`) with a panel for each of the `measures`, fields of a point -> titles."""
    drawn = plot(title, x, "value", panel="measure", **options)
    return lambda points: drawn([
        {**point, "measure": name, "value": point[field]}
        for field, name in measures.items() for point in points if point.get(field) is not None
    ])  # fmt: skip


def beside(results: Sequence[Result], title: str) -> Figure:
    """Draw the paper's value and ours side by side, a panel for each result with two numbers, since units differ."""
    numbers = [r for r in results if _is_number(r.ours) and _is_number(r.paper)] or [
        r for r in results if _is_number(r.ours)
    ]
    columns = min(2, max(1, len(numbers)))
    rows = max(1, -(-len(numbers) // columns))
    fig = figure(9, 1.0 + 1.2 * rows)
    for axes, result in zip(fig.subplots(rows, columns, squeeze=False).flat, numbers):
        shown = {"ours": result.ours, **({"paper": result.paper} if _is_number(result.paper) else {})}
        drawn = axes.barh(list(shown), list(shown.values()), color=COLOURS[: len(shown)], height=0.6)
        axes.bar_label(drawn, padding=4, fmt="%g")
        axes.margins(x=0.2)
        axes.set_title(f"{result.what}{', ' if result.unit else ''}{result.unit}", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle(title)
    return fig


def _panels(draw: Callable[[Axes, Points], None], title: str, panel: str | None, points: Points) -> Figure:
    values = _values(points, panel)
    columns = min(3, len(values))
    rows = -(-len(values) // columns)
    fig = figure(WIDTH * columns + (2 if columns == 1 else 0), HEIGHT * rows)
    for axes, which in zip(fig.subplots(rows, columns, squeeze=False).flat, values):
        draw(axes, _having(points, panel, which))
        if which is not None:
            axes.set_title(str(which), fontsize=10)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    fig.suptitle(title)
    return fig


def _values(points: Points, field: str | None) -> list[Any]:
    return [None] if field is None else list(dict.fromkeys(p[field] for p in points if field in p))


def _having(points: Points, field: str | None, wanted: Any) -> Points:
    return points if field is None else [p for p in points if p.get(field) == wanted]


def _label(name: Any) -> str | None:
    return None if name is None else str(name)


def _short(number: float) -> str:
    return f"{number // 1024:g}K" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
