"""`quire bench parallel` on CPU ranks: what it writes, and what it says of what it left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benching import results

from quire.bench import exchange, parallel
from quire.bench import parallel_goals as goals
from quire.bench.parallel_goals import Goal
from quire.errors import QuireError


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.links, "found", lambda: {"gpus": []})


def test_the_exchange_is_measured_and_its_bits_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange, "ROWS", (1,))
    links, *found = results(tmp_path, "parallel", "--minutes", "1", "--part", "exchange")
    assert (links["device"], links["ranks"]) == ("cpu", [1, 2])
    assert [one["way"] for one in found] == ["quire", "replays", "gloo"]
    for one in found:
        assert one["same_bits"], one
        assert one["exact"], one
        assert one["value"] > 0, one
        assert "goal" not in one or one["goal"] is None
    for one in found[::2]:
        assert one["us"] == max(one["by_rank_us"])
    shown = capsys.readouterr().out
    assert "no GPU: ranks on a CPU" in shown
    assert "equal, right" in shown


def test_what_is_left_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *found = results(tmp_path, "parallel", "--minutes", "0.001")
    assert [one["part"] for one in found] == list(parallel.PARTS)
    assert all("s were left" in one["left_out"] for one in found)
    assert f"left out: {next(iter(parallel.PARTS))}, all: 0 s were left" in capsys.readouterr().out
    assert results(tmp_path, "parallel", "--ranks", "1", "--part", "failure")[1]["left_out"] == "it takes 2 GPUs"


def test_a_part_that_fails_doesn_t_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(place: parallel.Place) -> parallel.Found:
        written = json.loads((tmp_path / "benched/result.json").read_text())
        assert len(written["results"]) == 1, "the document is written before"
        yield {"ranks": 2, "what": "one", "value": 1.0}
        raise QuireError("the ranks are gone")

    monkeypatch.setitem(parallel.PARTS, "tokens", parallel.Part("", failing))
    monkeypatch.setitem(parallel.PARTS, "failure", parallel.Part("", lambda place: iter([{"ranks": 2, "what": "two"}])))
    found = results(tmp_path, "parallel", "--part", "tokens", "--part", "failure")
    assert [one.get("left_out", one.get("what")) for one in found[1:]] == [
        "one", "it failed: QuireError the ranks are gone", "two",
    ]  # fmt: skip


def test_goals_are_rescaled_by_what_copies_take() -> None:
    latency, rate = Goal({4: 10.0}, low=True), Goal({4: 1000.0})
    assert goals.rescaled(latency, 4, "large", None) == 10.0  # NVLink
    assert goals.rescaled(latency, 8, "large", None) is None
    slow = goals.rescaled(latency, 4, "large", 39.1)
    more = 161 * 1.5 * 16384 * (1 / 39.1e9 - 1 / 391e9)  # seconds a token
    assert slow == pytest.approx(10.0 + 1e3 * more)
    assert goals.rescaled(rate, 4, "large", 39.1) == pytest.approx(1 / (1e-3 + more))
    assert goals.exchange_goal(2, 3, 512, None) == 35.0
    assert goals.exchange_goal(2, 3, 512, 39.1) == pytest.approx(35.0 + 1e6 * 2**23 * (1 / 39.1e9 - 1 / 391e9))
    assert goals.exchange_goal(8, 0, 1, None) is None


def test_a_table_says_by_how_much_a_goal_is_missed() -> None:
    links = {"gpus": ["NVIDIA H200"] * 2, "link": 39.1, "held": True}
    one = {"part": "large", "ranks": 2, "what": "large, w", "unit": "tok/s", "goal": 100.0, "low": False}
    shown = parallel.show([links, {**one, "value": 90.0}, {**one, "value": 101.0}, {**one, "value": None}])
    assert "no, -10 %" in shown
    assert "yes" in shown
    assert "no NVLink: copies of 39 GB/s, and goals rescaled from 391" in shown
    assert "RANKS DIFFER" in parallel.show([links, {**one, "value": 1.0, "same_bits": False, "exact": False}])


@pytest.mark.soak
def test_all_parts_on_cpu_ranks(tmp_path: Path) -> None:
    _, *found = results(tmp_path, "parallel", "--minutes", "10")
    assert [one["part"] for one in found if "left_out" in one] == ["profile"]
    assert {one["part"] for one in found} == set(parallel.PARTS)
    [tokens] = [one for one in found if one["part"] == "tokens"]
    assert tokens["value"] == 1.0
    [served] = [one["run"] for one in found if one["part"] == "served"]
    assert served["running"] > 0
    assert served["served"]["median"]["requests"] == served["served"]["median"]["attempted"] == 40
    assert "503" in served["health"]
    assert any(line.startswith("quire_rank_restarts_total") and line.endswith(" 1.0") for line in served["metrics"])
    assert sum(line.startswith("quire_rank_memory_bytes") for line in served["metrics"]) == 2
    killed, stopped = (one["run"] for one in found if one["part"] == "failure")
    for run in (killed, stopped):
        assert run["ended"] == run["with_an_error"] == run["clients"] == 32
        assert run["processes_left"] == 0
    assert killed["last_end_s"] < 2 < stopped["last_end_s"] < 12
