"""Describe a reproduction as data: a runner with its parameters, claims about the points that it returns, tables and a
plot.

A runner returns points: flat dicts of numbers and names, which are also the document's "data". All that follows from
them (results, text, picture) is computed by the functions here, so a picture can be drawn and a claim judged again from
a document of another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import CITED, DIFFERS, HOLDS, MEASURED, Reproduction, Result
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = Mapping[str, Any]
Points = Sequence[Point]
Read = str | Callable[[Point], Any]
"""How to read a value of a point: the name of a field, or a function of the point."""
Derive = Callable[[Points], Points]
"""Points computed from others, such as their ratios to some."""
Rule = Callable[[Any, Any], str]
"""From the paper's value and ours to a verdict."""
ALL: Point = MappingProxyType({})
"""As `where`: all points."""


def _verdict(holds: bool) -> str:
    return HOLDS if holds else DIFFERS


def measured(paper: Any, ours: Any) -> str:
    """Judge nothing: ours is a number without a claim."""
    return MEASURED


def cited(paper: Any, ours: Any) -> str:
    """Judge nothing: the paper's number is measured elsewhere."""
    return CITED


def equal(paper: Any, ours: Any) -> str:
    """Hold if the two are equal."""
    return _verdict(paper == ours)


def near(tolerance: float) -> Rule:
    """Hold within `tolerance` (a share, such as 0.05) of the paper's number."""
    return lambda paper, ours: _verdict(abs(ours - paper) <= tolerance * abs(paper))


def at_most(limit: float) -> Rule:
    """Hold if ours is at most `limit`."""
    return lambda paper, ours: _verdict(ours <= limit)


def at_least(limit: float) -> Rule:
    """Hold if ours is at least `limit`."""
    return lambda paper, ours: _verdict(ours >= limit)


def above(limit: float) -> Rule:
    """Hold if ours is more than `limit`."""
    return lambda paper, ours: _verdict(ours > limit)


def same_digits(paper: float, ours: float) -> str:
    """Hold if ours, rounded to the digits after the point that the paper gives, is the paper's number."""
    return _verdict(round(ours, len(f"{paper:g}".partition(".")[2])) == paper)


def between(low: float, high: float, slack: float = 0.0) -> Rule:
    """Hold from `low` to `high`, extended by the share `slack` on both sides."""
    return lambda paper, ours: _verdict(low * (1 - slack) <= ours <= high * (1 + slack))


class Each(NamedTuple):
    """A claim about each point that has the values `where` (or for which it is true), of those that `derive` makes of
    the runner's.

    `what` is a format string over the point's fields. `paper` is a value, a function of the point, or a mapping from
    the value of the point's field `key`; points that the mapping lacks are measured only. Ours is rounded to `digits`
    after the point. `by` is "real" or "simulated"."""

    row: str
    what: str
    ours: Read
    unit: str = ""
    paper: Any = None
    rule: Rule = measured
    where: Point | Callable[[Point], bool] = ALL
    key: str = ""
    digits: int = 2
    by: str = "real"
    derive: Derive | None = None

    def results(self, points: Points) -> Iterable[Result]:
        for point in chosen(points if self.derive is None else self.derive(points), self.where):
            paper, rule = self.paper, self.rule
            if self.key:
                paper = self.paper.get(point[self.key])
                rule = measured if paper is None else rule
            elif callable(paper):
                paper = paper(point)
            ours = _rounded(value(point, self.ours), self.digits)
            yield Result(self.row, self.what.format_map(point), paper, ours, self.unit, rule(paper, ours), self.by)


class Whole(NamedTuple):
    """A claim about all points together: `ours` computes its value; None leaves the claim out."""

    row: str
    what: str
    ours: Callable[[Points], Any]
    unit: str = ""
    paper: Any = None
    rule: Rule = measured
    digits: int = 2
    by: str = "real"

    def results(self, points: Points) -> Iterable[Result]:
        ours = _rounded(self.ours(points), self.digits)
        if ours is not None:
            yield Result(self.row, self.what, self.paper, ours, self.unit, self.rule(self.paper, ours), self.by)


class Column(NamedTuple):
    """A column of a table: its head, its value in a point and how that is formatted."""

    head: str
    read: Read
    form: str = ""


class Rows(NamedTuple):
    """A table with a line for each point that has the values `where`."""

    columns: Sequence[Column]
    where: Point | Callable[[Point], bool] = ALL

    def text(self, points: Points) -> str:
        rows = [
            [_cell(value(point, column.read), column.form) for column in self.columns]
            for point in chosen(points, self.where)
        ]
        return table([column.head for column in self.columns], rows)


class Pivot(NamedTuple):
    """A table of one value: a line for each combination of the fields `down`, a column for each value of `across`."""

    down: Sequence[str]
    across: str
    read: Read
    form: str = ""
    unit: str = ""
    where: Point | Callable[[Point], bool] = ALL

    def text(self, points: Points) -> str:
        points = chosen(points, self.where)
        heads = list(dict.fromkeys(point[self.across] for point in points))
        cells = {
            (*(point[name] for name in self.down), point[self.across]): _cell(value(point, self.read), self.form)
            for point in points
        }
        lines = dict.fromkeys(tuple(point[name] for name in self.down) for point in points)
        rows = [(*line, *(cells.get((*line, head), "-") for head in heads)) for line in lines]
        return table((*self.down, *(f"{head}{self.unit}" for head in heads)), rows)


class Entry(NamedTuple):
    """A figure, table or claim of a paper.

    `runner` is "module:function" below papers, imported when it runs and called with `params`, in which `full`
    replaces values with --full. `claims`, `tables` and `note` (or a function of the points) make the results and the
    text; `plot` draws the points. `gpu`: it needs a GPU. `timed`: its numbers are times of this machine; others are the
    same on any machine. `part_of`: --all runs that entry instead."""

    about: str
    runner: str
    params: Mapping[str, Any] = MappingProxyType({})
    full: Mapping[str, Any] = MappingProxyType({})
    claims: Sequence[Each | Whole] = ()
    tables: Sequence[Rows | Pivot] = ()
    note: str | Callable[[Points], str] = ""
    plot: Callable[[Points], Figure] | None = None
    gpu: bool = False
    timed: bool = False
    part_of: str | None = None

    @property
    def samples(self) -> bool:
        """True if --full changes the run."""
        return bool(self.full)

    def run(self, full: bool = False) -> Reproduction:
        """Run the runner and judge its points."""
        if self.gpu:
            from quire.bench.replay import need_gpu

            need_gpu(f"quire reproduce: {self.about}")
        module, _, name = self.runner.partition(":")
        function: Callable[..., Points] = getattr(import_module(f"papers.{module}"), name)
        return self.judge(function(**{**self.params, **(self.full if full else {})}))

    def judge(self, points: Points) -> Reproduction:
        """Return the results, the text and the picture of points, measured here or read from a document."""
        results = [result for claim in self.claims for result in claim.results(points)]
        note = self.note if isinstance(self.note, str) else self.note(points)
        text = "\n".join([*(one.text(points) for one in self.tables), *([note] if note else [])])
        return Reproduction(results, text, lambda: self.draw(points), points)

    def draw(self, points: Points) -> Figure:
        """Draw the points, or the results beside the paper's values if the entry has no plot."""
        from papers.plots import beside

        if self.plot is not None:
            return self.plot(points)
        return beside([result for claim in self.claims for result in claim.results(points)], self.about)


def value(point: Point, read: Read) -> Any:
    """Read a value of a point."""
    return point[read] if isinstance(read, str) else read(point)


def chosen(points: Points, where: Point | Callable[[Point], bool]) -> list[Point]:
    """Return the points that have all values of `where`, or for which it is true."""
    if callable(where):
        return [point for point in points if where(point)]
    return [point for point in points if all(point.get(name) == wanted for name, wanted in where.items())]


def one(points: Points, **where: Any) -> Point:
    """Return the only point with these values."""
    found = chosen(points, where)
    assert len(found) == 1, f"{len(found)} points have {where}"
    return found[0]


def ratio(points: Points, field: str, more: Point, less: Point) -> float:
    """Return the ratio of a field in the only point with the values `more` to that in the one with `less`."""
    return float(one(points, **more)[field] / one(points, **less)[field])


def descending(points: Points, field: str) -> bool:
    """Return True if a field falls from each point to the next."""
    values = [point[field] for point in points]
    return all(before > after for before, after in pairwise(values))


def _rounded(number: Any, digits: int) -> Any:
    return round(number, digits) if isinstance(number, float) else number


def _cell(content: Any, form: str) -> str:
    return "-" if content is None else format(content, form)
