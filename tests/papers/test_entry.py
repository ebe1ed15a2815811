"""The frame of entries: claims, tables, runs and plots on points made up; and the committed documents, which are judged
and drawn again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from papers import ENTRIES, entry, plots
from papers.entry import (
    ARITHMETIC,
    BY_ARITHMETIC,
    CITED,
    DIFFERS,
    HOLDS,
    MEASURED,
    MET,
    MISSED,
    REAL,
    SIMULATED,
    Each,
    Entry,
    Pivot,
    Points,
    Result,
    Rows,
    Run,
    Spread,
    Whole,
    above,
    against,
    at_least,
    at_most,
    between,
    cited,
    effect,
    equal,
    falls,
    grouped,
    having,
    highest,
    left_out,
    lowest,
    measured,
    near,
    over,
    same_digits,
    truth,
)

REPRODUCE = Path(__file__).parents[2] / "docs" / "measurements" / "reproduce"
POINTS: Points = [
    {"system": "a", "page": 1, "ms": 2.0, "rates": [2.0, 4.0]},
    {"system": "a", "page": 2, "ms": 1.234, "rates": [1.0, 2.0]},
    {"system": "b", "page": 1, "ms": 8.0, "rates": [0.5, 2.0]},
    {"other": 1},
]
TIMES: Points = [
    {"model": "a", "batch": 1, "way": "paged", "ms": 10.0},
    {"model": "a", "batch": 1, "way": "virtual", "ms": 11.0},
    {"model": "a", "batch": 8, "way": "paged", "ms": 20.0},
    {"model": "a", "batch": 8, "way": "virtual", "ms": 15.0},
    {"model": "b", "batch": 1, "way": "virtual", "ms": 5.0},
]
beside_pages = against("ms", {"way": "paged"}, "model", "batch")


def stub(full: bool = False, many: int = 1) -> list[dict[str, Any]]:
    return [{"full": full, "many": many}]


@pytest.mark.parametrize(
    ("rule", "paper", "holds", "differs"),
    [
        (equal, 1, 1, 2), (near(0.05), 100, 105, 105.1), (near(0.05), 100, 95, 94.9), (at_most(5), None, 5, 5.1),
        (at_least(5), None, 5, 4.9), (above(5), None, 5.1, 5), (between(1, 2), None, 2, 2.1),
        (between(1, 2), None, 1, 0.9), (near(), 100, 110, 110.1), (effect(), 3.0, 3.19, 3.21),
        (effect(), 3.0, 2.81, 2.79), (effect(), 0.5, 0.54, 0.56),
        (same_digits, 56.25, 56.2549, 56.256), (same_digits, 25.0, 25.4, 25.6),
    ],
)  # fmt: skip
def test_rules(rule: Any, paper: Any, holds: float, differs: float) -> None:
    assert [rule(paper, ours) for ours in (holds, differs)] == [HOLDS, DIFFERS]
    assert [measured(paper, holds), cited(paper, holds)] == [MEASURED, CITED]


def test_each_point_is_judged() -> None:
    claim = Each("P", "{system} at {page}", "ms", "ms of {system}", {"a": 1.2}, near(0.1), having("ms"), "system")
    a, b, c = claim.results(POINTS, "simulated")
    assert b == Result("P", "a at 2", 1.2, 1.23, "ms of a", HOLDS, "simulated")
    assert (a.verdict, c.verdict, c.paper) == (DIFFERS, MEASURED, None), "the mapping lacks b"
    of = Each("P", "w", lambda p: 2 * p["ms"], "", lambda p: p["page"], where={"system": "b"}, digits=0, by="real")
    assert list(of.results(POINTS, "simulated")) == [Result("P", "w", 1, 16.0, "", MEASURED, "real")]
    of = Each("P", "{batch}", "ratio", "", lambda p: p["batch"], at_most(1), digits=1, derive=beside_pages)
    assert [(r.what, r.paper, r.ours, r.verdict) for r in of.results(TIMES)] == [
        ("1", 1, 1.1, DIFFERS), ("8", 8, 0.8, HOLDS)
    ]  # fmt: skip


def test_all_points_together() -> None:
    a, b = ({"system": system, "page": 1} for system in "ab")
    [times] = Whole("P", "w", over("ms", a, b), "ratio").results(POINTS)
    assert times.ours == 0.25
    [seeds] = Whole("P", "w", over("rates", a, b), "ratio", 3.1, near(0.05)).results(POINTS)
    assert (seeds.ours, seeds.unit, seeds.verdict) == (3.0, "ratio (2.00-4.00)", HOLDS), "the mean is judged"
    assert not list(Whole("P", "w", lambda _: None).results(POINTS))
    assert [falls("ms", order)(POINTS) for order in ([a, b], [b, a])] == [False, True]
    assert [falls("rates", [a, b], factor)(POINTS) for factor in (2.9, 3.0)] == [True, False]
    [said] = truth("P", "w", lambda points: len(points) == 3).results(POINTS)
    assert (said.paper, said.ours, said.verdict) == (True, False, DIFFERS)
    assert Spread.of([1.0, 2.0, 6.0]) == (3.0, 1.0, 6.0)


def test_points_of_others() -> None:
    assert [len(group) for group in grouped(TIMES, "model", "batch")] == [2, 2, 1]
    assert [point["ms"] for point in lowest(TIMES, "ms", "model")] == [10, 5]
    assert [point["ms"] for point in highest(TIMES, "ms", "model")] == [20, 5]
    found = beside_pages(TIMES)
    assert [(p["batch"], p["ratio"], p["base"]["ms"]) for p in found] == [(1, 1.1, 10), (8, 0.75, 20)]
    assert [point["ratio"] for point in against("ms", {"way": "paged"}, "model")(TIMES)] == [1.1, 1.5]


def test_tables() -> None:
    rows = Rows(["system", ("time", "ms", ".1f"), "other"], lambda p: p.get("page") != 2, title="Times:")
    assert rows.text(POINTS) == (
        "Times:\n\nsystem  time  other\na        2.0      -\nb        8.0      -\n-          -      1\n"
    )
    pivot = Pivot(("page",), "system", "ms", ".1f", " ms", having("ms"))
    assert pivot.text(POINTS).splitlines() == ["page  a ms  b ms", "   1   2.0   8.0", "   2   1.2     -"]
    derived = Pivot(("batch",), "way", "ratio", ".2f", derive=beside_pages)
    assert derived.text(TIMES).splitlines()[1:] == ["    1     1.10", "    8     0.75"]


def test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "import_module", lambda name: {"papers.mine": SimpleNamespace(stub=stub)}[name])
    claims = [Each("P", "full", "full", paper=False, rule=equal), Whole("P", "sum", lambda ps: ps[-1]["many"])]
    one = Entry("about", "mine:stub", {"many": 2}, {"full": True}, claims, [Rows(["many"])], lambda ps: f"n={len(ps)}",
                also=[Run("mine:stub", {"many": 3})], by="simulated")  # fmt: skip
    assert one.samples
    assert not Entry("about", "mine:stub").samples
    done = one.run(full=True)
    assert [(r.ours, r.verdict, r.real_or_simulated) for r in done.results] == [
        (True, DIFFERS, "simulated"), (False, HOLDS, "simulated"), (3, MEASURED, "simulated"),
    ]  # fmt: skip
    assert done.text == "many\n   2\n   3\nn=2"
    assert done.data == [{"full": True, "many": 2}, {"full": False, "many": 3}]
    assert done.draw().axes, "without a plot, the results beside the paper's"


def test_what_was_not_measured_is_in_the_text_alone() -> None:
    one = Entry("about", "no:runner", claims=[Each("R", "{way}", "ms")], tables=[Rows(["ms"])], note="A note.",
                plot=plots.lines("title", "batch", "ms", line="way", labels=("batch", "ms")))  # fmt: skip
    done = one.judge([*TIMES, *left_out({"c, paged": "out of memory"})])
    assert len(done.results) == len(TIMES)
    assert done.text.splitlines()[-2:] == ["left out: c, paged: out of memory", "A note."]
    assert done.draw().axes
    assert one._replace(plot=None).draw(done.data).axes


def test_plots() -> None:
    points = [point for point in POINTS if "ms" in point]
    lines = plots.lines("t", "page", "ms", line="system", labels=("x", "y"), log_x=True, limit=4.0, top=10.0)
    [axes] = lines(points).axes
    assert [line.get_label() for line in axes.lines][:2] == ["a", "b"]
    assert axes.get_ylim() == (0.0, 10.0)
    several = plots.row(
        "t", lines, plots.bars("b", "page", "ms", bar="system", label="ms", paper=lambda p: {1: 3.0}.get(p["page"])),
        plots.bars("s", "system", "value", bar="line", label="%", stacked=True, horizontal=True, limit=3.0,
                   of=plots.tall({"page": "page of {system}", "ms": "ms"})),
        plots.bars("p", "system", "ms", panel="page", label="ms", log=True),
    )  # fmt: skip
    fig = several(points)
    assert [axes.get_title() for axes in fig.axes] == ["t", "b", "s", "1", "2", ""]
    marks = [line for line in fig.axes[1].lines if line.get_marker() == "_"]
    assert [list(line.get_ydata()) for line in marks] == [[3.0], [3.0]]
    assert not fig.axes[5].axison
    high = plots.bars("t", "name", "ms", horizontal=True, label="ms", of=lambda points: [
        {"name": i, "ms": 1.0} for i in range(40)
    ])  # fmt: skip
    assert high(points).get_size_inches()[1] > 10
    [axes] = plots.blocks("t", lambda points: [("a", 0, 2, "red", "x"), ("b", 2, 1, "blue", "y")])(points).axes
    assert [text.get_text() for text in axes.texts] == ["x", "y"]


DOCUMENTS = {path.stem: json.loads(path.read_text()) for path in sorted(REPRODUCE.glob("*.json"))}


@pytest.mark.parametrize("document", [name for name, one in DOCUMENTS.items() if isinstance(one.get("data"), list)])
def test_committed_points_give_the_committed_results(document: str) -> None:
    content = DOCUMENTS[document]
    done = ENTRIES[content["name"]].judge(content["data"])
    assert json.loads(json.dumps([result._asdict() for result in done.results])) == content["results"]
    assert done.text or not ENTRIES[content["name"]].tables
    assert done.draw().axes


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_differs_says_why(document: str) -> None:
    for result in DOCUMENTS[document]["results"]:
        assert result["verdict"] not in (DIFFERS, MISSED) or result["why"], result["what"]


def test_verdicts_tell_arithmetic_and_own_goals_apart() -> None:
    def verdict(paper: float | None, by: str, ours: float = 1.0) -> str:
        [result] = Whole("P", "one", lambda points: ours, "", paper, lambda _, ours: near()(1.0, ours)).results([], by)
        return result.verdict

    assert [verdict(1.0, by) for by in (REAL, SIMULATED, ARITHMETIC)] == [HOLDS, HOLDS, BY_ARITHMETIC]
    assert [verdict(None, by) for by in (REAL, ARITHMETIC)] == [MET, MET]
    assert [verdict(paper, ARITHMETIC, 2.0) for paper in (1.0, None)] == [DIFFERS, MISSED]


def test_why_is_the_claims_or_the_entrys() -> None:
    ours = {"a": (1.0, "its own"), "b": (1.0, ""), "c": (2.0, "")}
    claims = [Whole("P", what, lambda _, one=one: one, "", 2.0, near(), why=why) for what, (one, why) in ours.items()]
    assert [result.why for result in Entry("an entry", "", claims=claims, why="all").results([])] == [
        "its own",
        "all",
        "",
    ]
