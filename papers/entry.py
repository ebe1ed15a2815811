"""Describe a reproduction as data: a runner with its parameters, claims about the points that it returns, tables and a
plot.

A runner returns points: flat dicts of numbers and names, which are also the document's "data". All that follows from
them (results, text, picture) is computed by the functions here, so a picture can be drawn and a claim judged again from
a document of another machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.bench.document import table
from quire.bench.plots import COLOURS, figure
from quire.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = Mapping[str, Any]
Points = Sequence[Point]
Read = str | Callable[[Point], Any]
"""How to read a value of a point: the name of a field, or a function of the point."""
Where = Point | Callable[[Point], bool]
"""Which points: those that have all these values, or for which it is true."""
Rule = Callable[[Any, Any], str]
"""From the paper's value and ours to a verdict."""
Derive = Callable[[Points], Points]
"""Points computed from others, such as their ratios to some."""
ALL: Point = MappingProxyType({})
"""As `where`: all points."""
HOLDS, DIFFERS = "holds", "differs"
BY_ARITHMETIC = "by arithmetic"  # what the paper says follows from a closed form; nothing was run
MET, MISSED = "met", "missed"  # a goal of our own, about which the paper says nothing
MEASURED = "measured"  # a measured number without a claim
CITED = "cited"  # the paper's number, not judged here
VERDICTS = (HOLDS, DIFFERS, BY_ARITHMETIC, MET, MISSED, MEASURED, CITED)
MINUTES = "minutes"
REAL, SIMULATED, ARITHMETIC = "real", "simulated", "arithmetic"
EFFECT = 0.1  # of an effect, or of a number: the tolerance of claims that state no other


class Result(NamedTuple):
    """One number or statement. `row` says where the paper has it (P-F6: PagedAttention, Figure 6); `paper` is what the
    paper says, None if it says nothing; `real_or_simulated` is "real", "simulated" or "arithmetic"; `why` says why a
    claim differs, or a goal is missed."""

    row: str
    what: str
    paper: Any
    ours: Any
    unit: str
    verdict: str
    real_or_simulated: str = REAL
    why: str = ""


class Reproduction(NamedTuple):
    """Results, the text printed and reported beside them (tables, assumptions, limits), a function that draws them, and
    the points, for the document."""

    results: list[Result]
    text: str
    draw: Callable[[], Figure]
    data: Points


class Spread(NamedTuple):
    """A number over several seeds: the mean, which claims judge, the lowest and the highest, shown with the unit."""

    mean: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(sum(values) / len(values), min(values), max(values))


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


def same(paper: Any, ours: Any) -> str:
    """Hold if ours, a statement, is true."""
    return _verdict(ours)


def near(tolerance: float = EFFECT) -> Rule:
    """Hold within `tolerance` (a share, such as 0.05) of the paper's number."""
    return lambda paper, ours: _verdict(abs(ours - paper) <= tolerance * abs(paper))


def effect(tolerance: float = EFFECT) -> Rule:
    """Hold if ours differs from the paper's ratio by at most `tolerance` of the effect, the ratio's distance from 1."""
    return lambda paper, ours: _verdict(abs(ours - paper) <= tolerance * abs(paper - 1))


def at_most(limit: float) -> Rule:
    """Hold if ours is at most `limit`."""
    return lambda paper, ours: _verdict(ours <= limit)


def at_least(limit: float) -> Rule:
    """Hold if ours is at least `limit`."""
    return lambda paper, ours: _verdict(ours >= limit)


def above(limit: float) -> Rule:
    """Hold if ours is more than `limit`."""
    return lambda paper, ours: _verdict(ours > limit)


def between(low: float, high: float) -> Rule:
    """Hold from `low` to `high`."""
    return lambda paper, ours: _verdict(low <= ours <= high)


def same_digits(paper: float, ours: float) -> str:
    """Hold if ours, rounded to the digits after the point that the paper gives, is the paper's number."""
    return _verdict(round(ours, len(f"{paper:g}".partition(".")[2])) == paper)


class Each(NamedTuple):
    """A claim about each point `where`, of those that `derive` makes of the runner's.

    `what` and `unit` are format strings over the point's fields. `paper` is a value, a function of the point, or a
    mapping from the value of the point's field `key`; points that the mapping lacks are measured only. Ours is rounded
    to `digits` after the point. `by` is "real", "simulated" or "arithmetic", the entry's if empty. `why` says why ours
    differs where it does."""

    row: str
    what: str
    ours: Read
    unit: str = ""
    paper: Any = None
    rule: Rule = measured
    where: Where = ALL
    key: str = ""
    digits: int = 2
    by: str = ""
    derive: Derive = list
    why: str = ""

    def results(self, points: Points, by: str = REAL) -> Iterable[Result]:
        for point in chosen(self.derive(points), self.where):
            paper, rule = self.paper, self.rule
            if self.key:
                paper = self.paper.get(point[self.key])
                rule = measured if paper is None else rule
            elif callable(paper):
                paper = paper(point)
            what, unit = self.what.format_map(point), self.unit.format_map(point)
            yield _result(self, what, paper, value(point, self.ours), unit, rule, by)


class Whole(NamedTuple):
    """A claim about all points together: `ours` computes its value; None leaves the claim out. See Each."""

    row: str
    what: str
    ours: Callable[[Points], Any]
    unit: str = ""
    paper: Any = None
    rule: Rule = measured
    digits: int = 2
    by: str = ""
    why: str = ""

    def results(self, points: Points, by: str = REAL) -> Iterable[Result]:
        ours = self.ours(points)
        if ours is not None:
            yield _result(self, self.what, self.paper, ours, self.unit, self.rule, by)


def truth(row: str, what: str, holds: Callable[[Points], bool | None], by: str = "", why: str = "") -> Whole:
    """Return a statement of a paper or a review, which is true or false."""
    return Whole(row, what, holds, "", True, equal, by=by, why=why)


def goal(row: str, what: str, holds: Callable[[Points], bool | None], by: str = "", why: str = "") -> Whole:
    """Return a statement of our own, which is true or false."""
    return Whole(row, what, holds, "", None, same, by=by, why=why)


def _result(claim: Each | Whole, what: str, paper: Any, ours: Any, unit: str, rule: Rule, by: str) -> Result:
    if isinstance(ours, Spread):
        unit = f"{unit} ({ours.lowest:.{claim.digits}f}-{ours.highest:.{claim.digits}f})"
        ours = ours.mean
    verdict, by = rule(paper, ours), claim.by or by
    ours = round(ours, claim.digits) if isinstance(ours, float) else ours
    if paper is None:
        verdict = {HOLDS: MET, DIFFERS: MISSED}.get(verdict, verdict)
    elif by == ARITHMETIC and verdict == HOLDS:
        verdict = BY_ARITHMETIC
    return Result(claim.row, what, paper, ours, unit, verdict, by, claim.why if verdict in (DIFFERS, MISSED) else "")


class Rows(NamedTuple):
    """A table with a line for each point `where`, of those that `derive` makes. A column is a head, its value in a
    point and, if need be, how that is formatted; or the name of a field. Points may lack fields."""

    columns: Sequence[str | tuple[str, Read] | tuple[str, Read, str]]
    where: Where = ALL
    derive: Derive = list
    title: str = ""

    def text(self, points: Points) -> str:
        columns = [(one, one, "") if isinstance(one, str) else (*one, "")[:3] for one in self.columns]
        rows = [
            [_cell(point.get(read) if isinstance(read, str) else read(point), form) for _, read, form in columns]
            for point in chosen(self.derive(points), self.where)
        ]
        return _titled(self.title, table([head for head, *_ in columns], rows))


class Pivot(NamedTuple):
    """A table of one value: a line for each combination of the fields `down`, a column for each value of `across`."""

    down: Sequence[str]
    across: str
    read: Read
    form: str = ""
    unit: str = ""
    where: Where = ALL
    derive: Derive = list
    title: str = ""

    def text(self, points: Points) -> str:
        points = chosen(self.derive(points), self.where)
        heads = list(dict.fromkeys(point[self.across] for point in points))
        cells = {
            (*(point[name] for name in self.down), point[self.across]): _cell(value(point, self.read), self.form)
            for point in points
        }
        lines = dict.fromkeys(tuple(point[name] for name in self.down) for point in points)
        rows = [(*line, *(cells.get((*line, head), "-") for head in heads)) for line in lines]
        return _titled(self.title, table((*self.down, *(f"{head}{self.unit}" for head in heads)), rows))


class Run(NamedTuple):
    """A runner, "module:function" below papers, which is called with `params`, in which `full` replaces values with
    --full."""

    runner: str
    params: Mapping[str, Any] = MappingProxyType({})
    full: Mapping[str, Any] = MappingProxyType({})

    def points(self, full: bool, changes: Point = ALL) -> Points:
        """Import and call the runner, with those of the `changes` that are parameters of it."""
        module, _, name = self.runner.partition(":")
        function: Callable[..., Points] = getattr(import_module(f"papers.{module}"), name)
        changed = {name: value for name, value in changes.items() if name in self.params}
        return function(**{**self.params, **(self.full if full else {}), **changed})


class Entry(NamedTuple):
    """A figure, table or claim of a paper.

    `runner`, `params` and `full` are those of a Run; the points of further runs, `also`, follow its points. `claims`,
    `tables` and `note` (or a function of the points) make the results and the text; `plot` draws the points. `gpu`: it
    needs a GPU. `timed`: its numbers are times of this machine; others are the same on any machine. `part_of`: --all
    runs that entry instead. `by`: its numbers are "real", "simulated" or "arithmetic", if a claim says no other.
    `takes`: "seconds" or MINUTES, on two cores or an H200. `why` says why claims differ that do not say it."""

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
    also: Sequence[Run] = ()
    by: str = REAL
    takes: str = "seconds"
    why: str = ""

    @property
    def runs(self) -> list[Run]:
        """Return all runs."""
        return [Run(self.runner, self.params, self.full), *self.also]

    @property
    def samples(self) -> bool:
        """True if --full changes the run."""
        return any(run.full for run in self.runs)

    def run(self, full: bool = False, changes: Point = ALL) -> Reproduction:
        """Run the runner, with `changes` of its parameters, and judge its points."""
        if self.gpu and changes.get("device") != "cpu":
            from quire.bench.replay import need_gpu

            need_gpu(f"quire reproduce: {self.about}")
        return self.judge([point for run in self.runs for point in run.points(full, changes)])

    def parse_changes(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the changes of parameters that `texts` give as NAME=VALUE, with the value in JSON or as plain text.

        A parameter can be changed if it is a number, a text or a list of these. Raise StartupError for another name,
        and for a value of another type than the parameter's."""
        changeable = {
            name: value
            for run in self.runs
            for name, value in run.params.items()
            if isinstance(value, str | int | float)
            or (isinstance(value, tuple) and all(isinstance(item, str | int | float) for item in value))
        }
        changes: dict[str, Any] = {}
        for text in texts:
            name, _, written = text.partition("=")
            if name not in changeable:
                raise StartupError(
                    f"--set {text[:60]} names no parameter of it", f"Known: {', '.join(changeable) or 'none'}"
                )
            try:
                value = json.loads(written)
            except ValueError:
                value = written
            before = changeable[name]
            value = tuple(value) if isinstance(value, list) else value
            if isinstance(before, float) and type(value) is int:
                value = float(value)
            if type(value) is not type(before):
                raise StartupError(f"--set {text[:60]} has another type than {before!r}", "Give such a value, in JSON")
            changes[name] = value
        return changes

    def results(self, points: Points) -> list[Result]:
        """Judge the claims."""
        results = [result for claim in self.claims for result in claim.results(_measured(points), self.by)]
        return [
            one._replace(why=self.why) if one.verdict in (DIFFERS, MISSED) and not one.why else one for one in results
        ]

    def judge(self, points: Points) -> Reproduction:
        """Return the results, the text and the picture of points, measured here or read from a document."""
        shown = _measured(points)
        note = self.note if isinstance(self.note, str) else self.note(shown)
        missing = [f"left out: {point['left_out']}: {point['why']}" for point in points if "why" in point]
        text = "\n".join([*(one.text(shown) for one in self.tables), *missing, *([note] if note else [])])
        return Reproduction(self.results(points), text, lambda: self.draw(points), points)

    def draw(self, points: Points) -> Figure:
        """Draw the points, or the results beside the paper's values if the entry has no plot."""
        return self.plot(_measured(points)) if self.plot is not None else beside(self.results(points), self.about)


def value(point: Point, read: Read) -> Any:
    """Read a value of a point."""
    return point[read] if isinstance(read, str) else read(point)


def having(field: str) -> Callable[[Point], bool]:
    """Return a filter of the points that have a field."""
    return lambda point: field in point


def chosen(points: Points, where: Where) -> list[Point]:
    """Return the points `where`."""
    if callable(where):
        return [point for point in points if where(point)]
    return [point for point in points if all(point.get(name) == wanted for name, wanted in where.items())]


def one(points: Points, **where: Any) -> Point:
    """Return the only point with these values."""
    found = chosen(points, where)
    assert len(found) == 1, f"{len(found)} points have {where}"
    return found[0]


def over(field: str, more: Point, less: Point) -> Callable[[Points], Any]:
    """Return a function that divides a field of the only point with the values `more` that has it by that of the one
    with `less`. Fields that are lists over seeds are divided seed by seed, into a Spread."""

    return lambda points: _over(_only(points, field, more), _only(points, field, less))


def falls(field: str, places: Sequence[Point], factor: float = 1.0) -> Callable[[Points], bool]:
    """Return a function that tells whether a field falls from each of the points with these values to the next, by more
    than `factor`; of lists over seeds, in the mean."""

    def holds(points: Points) -> bool:
        values = [_only(points, field, where) for where in places]
        if isinstance(values[0], list):
            return all(_over(a, b).mean > factor for a, b in pairwise(values))
        return all(a > b * factor for a, b in pairwise(values))

    return holds


def every(claims: Iterable[Callable[[Points], bool]]) -> Callable[[Points], bool]:
    """Return a function that tells whether all of these hold."""
    listed = list(claims)
    return lambda points: all(holds(points) for holds in listed)


def _only(points: Points, field: str, where: Point) -> Any:
    [found] = [point[field] for point in chosen(points, where) if field in point]
    return found


def _over(a: Any, b: Any) -> Any:
    return Spread.of([x / y for x, y in zip(a, b)]) if isinstance(a, list) else _ratio(a, b)


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf")


def grouped(points: Points, *same: str) -> list[list[Point]]:
    """Return the sets of points that agree in the fields `same`."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(point[name] for name in same), []).append(point)
    return list(groups.values())


def lowest(points: Points, field: str, *same: str) -> list[Point]:
    """Return the point with the lowest value of a field, of each set of points that agree in the fields `same`."""
    return [min(group, key=lambda point: point[field]) for group in grouped(points, *same)]


def highest(points: Points, field: str, *same: str) -> list[Point]:
    """Return the point with the highest value of a field, of each set of points that agree in the fields `same`."""
    return [max(group, key=lambda point: point[field]) for group in grouped(points, *same)]


def against(read: Read, base: Where, *same: str, where: Where = ALL) -> Callable[[Points], list[Point]]:
    """Return a function of the points `where` that returns those that are not `base`, each with the point `base` of
    those that agree with it in the fields `same`, that with the lowest value if there are several, and `ratio`, of its
    own value to that. Points without such a one are left out."""

    def derive(points: Points) -> list[Point]:
        found: list[Point] = []
        for group in grouped(chosen(points, where), *same):
            bases = chosen(group, base)
            if bases:
                low = min(bases, key=lambda point: value(point, read))
                found += [
                    {**point, "base": low, "ratio": _ratio(value(point, read), value(low, read))}
                    for point in group
                    if point not in bases
                ]
        return found

    return derive


def left_out(missing: Mapping[str, str]) -> list[Point]:
    """Return points for what a runner did not measure, by name with the reason; only the text shows them."""
    return [{"left_out": name, "why": why} for name, why in missing.items()]


def _measured(points: Points) -> list[Point]:
    return [point for point in points if "why" not in point]


def _titled(title: str, lines: str) -> str:
    return f"{title}\n\n{lines}\n" if title else lines


def _cell(content: Any, form: str) -> str:
    return "-" if content is None else format(content, form)


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
