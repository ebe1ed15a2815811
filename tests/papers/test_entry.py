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
    Column,
    Each,
    Entry,
    Pivot,
    Rows,
    Run,
    Spread,
    Whole,
    at_least,
    at_most,
    between,
    equal,
    falls,
    having,
    near,
    over,
    truth,
)
from papers.result import DIFFERS, HOLDS, MEASURED, Result

DOCUMENTS = Path(__file__).parents[2] / "docs" / "measurements" / "reproduce"
POINTS = [
    {"system": "a", "page": 1, "ms": 2.0, "rates": [2.0, 4.0]},
    {"system": "a", "page": 2, "ms": 1.234, "rates": [1.0, 2.0]},
    {"system": "b", "page": 1, "ms": 8.0, "rates": [0.5, 2.0]},
    {"other": 1},
]


def stub(full: bool = False, many: int = 1) -> list[dict[str, Any]]:
    return [{"full": full, "many": many}]


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [(near(0.05), (95, 105), (94.9, 105.1)), (equal, (100,), (99,)), (at_most(5), (5,), (5.1,)),
     (at_least(5), (5,), (4.9,)), (between(2, 4), (2, 4), (1.9, 4.1)), (between(2, 4, 0.1), (1.8, 4.4), (1.7, 4.5))],
)  # fmt: skip
def test_rules(rule: entry.Rule, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    assert {rule(100, ours) for ours in good} == {HOLDS}
    assert {rule(100, ours) for ours in bad} == {DIFFERS}


def test_each_point_is_judged() -> None:
    claim = Each("P", "{system} at {page}", "ms", "ms", {"a": 1.2}, near(0.1), having("ms"), "system")
    a, b, c = claim.results(POINTS, "simulated")
    assert b == Result("P", "a at 2", 1.2, 1.23, "ms", HOLDS, "simulated")
    assert (a.verdict, c.verdict, c.paper) == (DIFFERS, MEASURED, None), "the mapping lacks b"
    of = Each("P", "w", lambda p: 2 * p["ms"], "", lambda p: p["page"], where={"system": "b"}, digits=0, by="real")
    assert list(of.results(POINTS, "simulated")) == [Result("P", "w", 1, 16.0, "", MEASURED, "real")]


def test_all_points_together() -> None:
    a, b = ({"system": system, "page": 1} for system in "ab")
    [times] = Whole("P", "w", over("ms", a, b), "ratio").results(POINTS, "real")
    assert times.ours == 0.25
    [seeds] = Whole("P", "w", over("rates", a, b), "ratio", 3.1, near(0.05)).results(POINTS, "real")
    assert (seeds.ours, seeds.unit, seeds.verdict) == (3.0, "ratio (2.00-4.00)", HOLDS), "the mean is judged"
    assert not list(Whole("P", "w", lambda _: None).results(POINTS, "real"))
    assert [falls("ms", order)(POINTS) for order in ([a, b], [b, a])] == [False, True]
    assert [falls("rates", [a, b], factor)(POINTS) for factor in (2.9, 3.0)] == [True, False]
    [said] = truth("P", "w", lambda points: len(points) == 3).results(POINTS, "real")
    assert (said.paper, said.ours, said.verdict) == (True, False, DIFFERS)
    assert Spread.of([1.0, 2.0, 6.0]) == (3.0, 1.0, 6.0)


def test_tables() -> None:
    rows = Rows(["system", Column("time", "ms", ".1f"), Column("twice", lambda p: 2 * p["page"])], having("ms"))
    assert rows.text(POINTS).splitlines() == ["system  time  twice", "a        2.0      2", "a        1.2      4",
                                              "b        8.0      2"]  # fmt: skip
    pivot = Pivot(("page",), "system", "ms", ".1f", " ms", having("ms"))
    assert pivot.text(POINTS).splitlines() == ["page  a ms  b ms", "   1   2.0   8.0", "   2   1.2     -"]


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


def test_plots() -> None:
    points = [point for point in POINTS if "ms" in point]
    lines = plots.lines("t", "page", "ms", line="system", labels=("x", "y"), log_x=True, limit=4.0, top=10.0)
    [axes] = lines(points).axes
    assert [line.get_label() for line in axes.lines][:2] == ["a", "b"]
    assert axes.get_ylim() == (0.0, 10.0)
    several = plots.row(
        "t", lines, plots.bars("b", "page", "ms", bar="system", label="ms", paper=lambda p: {1: 3.0}.get(p["page"])),
        plots.bars("s", "system", "value", bar="line", label="%", stacked=True, horizontal=True, height=6.0,
                   of=plots.tall({"page": "page of {system}", "ms": "ms"})),
        plots.bars("p", "system", "ms", panel="page", label="ms", log=True),
    )  # fmt: skip
    fig = several(points)
    assert [axes.get_title() for axes in fig.axes] == ["t", "b", "s", "1", "2", ""]
    assert fig.get_size_inches()[1] == 12.0
    marks = [line for line in fig.axes[1].lines if line.get_marker() == "_"]
    assert [list(line.get_ydata()) for line in marks] == [[3.0], [3.0]]
    assert not fig.axes[5].axison


def key(result: Any) -> str:
    """All but the words, and signs, which older documents lack."""
    ours = abs(result["ours"]) if isinstance(result["ours"], float) else result["ours"]
    return json.dumps([result["row"], result["paper"], ours, result["verdict"], result["real_or_simulated"]])


WITH_POINTS = {
    name: content
    for name, one in ENTRIES.items()
    if isinstance(one, Entry) and (DOCUMENTS / f"{name}.json").exists()
    if isinstance((content := json.loads((DOCUMENTS / f"{name}.json").read_text())).get("data"), list)
}


@pytest.mark.parametrize("name", WITH_POINTS)
def test_committed_points_give_the_committed_results(name: str) -> None:
    one, content = ENTRIES[name], WITH_POINTS[name]
    assert isinstance(one, Entry)
    done = one.judge(content["data"])
    ours = [key(json.loads(json.dumps(result._asdict()))) for result in done.results]
    assert sorted(ours) == sorted(map(key, content["results"]))
    assert done.text
    assert done.draw().axes
