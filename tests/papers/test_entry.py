"""The frame of entries: which points a claim judges, by which rule, and the tables and pictures of points."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from papers.entry import (
    Column,
    Each,
    Entry,
    Pivot,
    Points,
    Rows,
    Whole,
    against,
    at_least,
    at_least_times,
    at_most,
    at_most_times,
    between,
    cited,
    equal,
    grouped,
    highest,
    left_out,
    lowest,
    measured,
    near,
)
from papers.plots import across, bars, lines
from papers.result import CITED, DIFFERS, HOLDS, MEASURED

POINTS: Points = [
    {"model": "a", "batch": 1, "way": "paged", "ms": 10.0},
    {"model": "a", "batch": 1, "way": "virtual", "ms": 11.0},
    {"model": "a", "batch": 8, "way": "paged", "ms": 20.0},
    {"model": "a", "batch": 8, "way": "virtual", "ms": 15.0},
    {"model": "b", "batch": 1, "way": "virtual", "ms": 5.0},
]
beside_pages = partial(against, field="ms", same=("model", "batch"), base={"way": "paged"})


@pytest.mark.parametrize(
    ("rule", "paper", "holds", "differs"),
    [
        (equal, 1, 1, 2), (near(0.05), 100, 105, 105.1), (near(0.05), 100, 95, 94.9), (at_most(5), None, 5, 5.1),
        (at_least(5), None, 5, 4.9), (between(1, 2), None, 2, 2.1), (between(1, 2, 0.1), None, 0.9, 0.89),
        (at_most_times(2), 3, 6, 6.1), (at_least_times(2), 3, 6, 5.9),
    ],
)  # fmt: skip
def test_rules(rule: Any, paper: Any, holds: float, differs: float) -> None:
    assert [rule(paper, ours) for ours in (holds, differs)] == [HOLDS, DIFFERS]
    assert [measured(paper, holds), cited(paper, holds)] == [MEASURED, CITED]


def test_a_claim_about_each_point() -> None:
    claim = Each("R", "{model}, {way}", "ms", "{way} ms", {"a": 10.0}, at_most(10), {"batch": 1}, "model")
    results = list(claim.results(POINTS))
    assert [(r.what, r.paper, r.ours, r.unit, r.verdict) for r in results] == [
        ("a, paged", 10.0, 10.0, "paged ms", HOLDS), ("a, virtual", 10.0, 11.0, "virtual ms", DIFFERS),
        ("b, virtual", None, 5.0, "virtual ms", MEASURED),
    ]  # fmt: skip
    claim = Each("R", "{batch}", "ratio", paper=lambda point: point["batch"], rule=at_most(1), digits=1,
                 derive=beside_pages)  # fmt: skip
    assert [(r.what, r.paper, r.ours, r.verdict) for r in claim.results(POINTS)] == [
        ("1", 1, 1.1, DIFFERS), ("8", 8, 0.8, HOLDS)
    ]  # fmt: skip


def test_a_claim_about_all_points() -> None:
    (result,) = Whole("R", "all", lambda points: sum(p["ms"] for p in points), paper=61, rule=equal).results(POINTS)
    assert (result.ours, result.verdict) == (61, HOLDS)
    assert not list(Whole("R", "all", lambda points: None).results(POINTS))


def test_points_of_others() -> None:
    assert [len(group) for group in grouped(POINTS, "model", "batch")] == [2, 2, 1]
    assert [point["ms"] for point in lowest(POINTS, "ms", "model")] == [10, 5]
    assert [point["ms"] for point in highest(POINTS, "ms", "model")] == [20, 5]
    found = beside_pages(POINTS)
    assert [(p["batch"], p["ratio"], p["base"]["ms"]) for p in found] == [(1, 1.1, 10), (8, 0.75, 20)]
    assert [point["ratio"] for point in against(POINTS, "ms", ("model",), {"way": "paged"})] == [1.1, 1.5]


def test_tables() -> None:
    rows = Rows(["model", Column("twice", lambda point: 2 * point["ms"], ".1f")], {"way": "paged"}, title="Twice:")
    assert rows.text(POINTS) == "Twice:\n\nmodel  twice\na       20.0\na       40.0\n"
    pivot = Pivot(("model", "batch"), "way", "ms", ".0f", " ms")
    assert pivot.text(POINTS).splitlines() == [
        "model  batch  paged ms  virtual ms",
        "a          1        10          11",
        "a          8        20          15",
        "b          1         -           5",
    ]
    derived = Pivot(("batch",), "way", "ratio", ".2f", derive=beside_pages)
    assert derived.text(POINTS).splitlines()[1:] == ["    1     1.10", "    8     0.75"]


def test_what_was_not_measured_is_in_the_text_alone() -> None:
    entry = Entry("about", "no:runner", claims=[Each("R", "{way}", "ms")], tables=[Rows(["ms"])], note="A note.",
                  plot=lines("title", "batch", "ms", line="way", labels=("batch", "ms")))  # fmt: skip
    done = entry.judge([*POINTS, *left_out({"c, paged": "out of memory"})])
    assert len(done.results) == len(POINTS)
    assert done.text.splitlines()[-2:] == ["left out: c, paged: out of memory", "A note."]
    assert done.draw().axes
    assert entry._replace(plot=None).draw(done.data).axes


@pytest.mark.parametrize(
    "plot",
    [
        lines("title", "batch", "ms", line="way", panel="model", labels=("batch", "ms"), log_x=True, log_y=True),
        bars("title", "batch", "ms", bar="way", panel="model", label="ms", log=True),
        bars("title", "batch", "ms", bar="way", label="ms", stacked=True),
        across("title", "batch", "ms", bar="way", panel="model", label="ms", log=True),
    ],
)  # fmt: skip
def test_plots(plot: Any) -> None:
    figure = plot(POINTS)
    assert len(figure.axes) in (1, 2)
    assert figure.axes[0].get_legend() is not None
