"""Define the result of a reproduction: the paper's number, the measured one, a verdict, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOLDS, DIFFERS = "holds", "differs"
MEASURED = "measured"  # a measured number without a claim
CITED = "cited"  # the paper's number, not judged here


class Result(NamedTuple):
    """One number or statement. `row` says where the paper has it (P-F6: PagedAttention, Figure 6); `paper` is None
    where the paper gives no number; `real_or_simulated` is one of these two words."""

    row: str
    what: str
    paper: Any
    ours: Any
    unit: str
    verdict: str
    real_or_simulated: str = "real"


class Reproduction(NamedTuple):
    """Results, the text printed and reported beside them (tables, assumptions, limits), and a function that draws them.

    `data` is the picture's content, for the document."""

    results: list[Result]
    text: str
    draw: Callable[[], Figure]
    data: Any = None


def equal(row: str, what: str, paper: Any, ours: Any, unit: str = "") -> Result:
    """Return a result that holds if the two are equal."""
    return Result(row, what, paper, ours, unit, HOLDS if paper == ours else DIFFERS)


def near(row: str, what: str, paper: float, ours: float, unit: str, tolerance: float) -> Result:
    """Return a result that holds within `tolerance` (a share, such as 0.05) of the paper's number."""
    return Result(row, what, paper, ours, unit, HOLDS if abs(ours - paper) <= tolerance * abs(paper) else DIFFERS)


def at_most(row: str, what: str, limit: float, ours: float, unit: str) -> Result:
    """Return a result that holds if the number is at most `limit`, the project's own; the paper gives no number."""
    return Result(row, f"{what} (limit: {limit:g})", None, ours, unit, HOLDS if ours <= limit else DIFFERS)


def measured(row: str, what: str, ours: Any, unit: str, real_or_simulated: str = "real") -> Result:
    """Return a result for a number without a claim."""
    return Result(row, what, None, ours, unit, MEASURED, real_or_simulated)


def cited(row: str, what: str, paper: Any, elsewhere: str, unit: str = "") -> Result:
    """Return a result for a statement of the paper that has no number here; `elsewhere` names the entry that measures
    it."""
    return Result(row, what, paper, elsewhere, unit, CITED)


def by_way(points: Sequence[dict[str, Any]], at: tuple[str, str], value: str, digits: int, unit: str = "") -> str:
    """Return a table of `value`: a line for each pair of values of `at`, a column for each point's "way"."""
    ways = list(dict.fromkeys(p["way"] for p in points))
    found = {(p[at[0]], p[at[1]], p["way"]): f"{p[value]:.{digits}f}" for p in points}
    places = dict.fromkeys((p[at[0]], p[at[1]]) for p in points)
    rows = [(*place, *(found.get((*place, way), "-") for way in ways)) for place in places]
    return table((*at, *(way + unit for way in ways)), rows)


def left_out(missing: dict[str, str]) -> str:
    """Return lines for what an entry did not measure, with reasons."""
    return "".join(f"\nleft out: {name}: {why}" for name, why in missing.items())
