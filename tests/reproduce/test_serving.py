"""Serving by simulation: loads, searches and curves on short traces, and the figures' verdicts on numbers made up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from quire.config import MEMORIES
from quire.reproduce import basic_sampling, batches, chat, main, shared_prefix, waste
from quire.reproduce.result import DIFFERS, HOLDS, Reproduction
from quire.reproduce.serving import (
    LIMIT,
    OWN,
    SHARED,
    SHOWN,
    SYSTEMS,
    Curve,
    Load,
    Point,
    curve,
    in_parallel,
    measure,
)

ALPACA = Load("a100-13b", "alpaca")


def made(system: str, highest: float) -> Curve:
    """A curve with two points."""
    points = (Point(highest / 4, LIMIT / 4, 1.0, 0.05, 0), Point(highest, LIMIT, 2.0, 0.05, 0))
    return Curve(system, highest, points)


def verdicts(done: Reproduction) -> dict[str, str]:
    assert all(result.real_or_simulated == "simulated" for result in done.results)
    return {result.what: result.verdict for result in done.results}


def test_traces_of_two_rates_have_the_same_requests() -> None:
    slow, fast = ALPACA.trace(2.0, 10.0), ALPACA.trace(4.0, 10.0)
    assert (len(slow), len(fast)) == (20, 40)
    assert [one.prompt for one in slow] == [one.prompt for one in fast[:20]]
    assert [one.params.max_tokens for one in slow] == [one.params.max_tokens for one in fast[:20]]
    assert [one.at for one in slow] == pytest.approx([2 * one.at for one in fast[:20]])


def test_blocks_of_requests_differ() -> None:
    lengths = [one.prompt_len for one in ALPACA.sketches(8192)]
    assert lengths[:4096] != lengths[4096:]
    assert lengths[:50] == [one.prompt_len for one in ALPACA.sketches(50)]


def test_a_registered_prefix_is_held_once() -> None:
    apart = Load("a100-13b", "wmt5shot", "llama-13b", 12.0)
    shared = apart._replace(prefix=341)
    prompt = shared.arriving([0.0])[0].prompt
    assert prompt[:341] == [SHARED] * 341
    assert set(prompt[341:]) == {OWN}
    trace = shared.arriving([0.0] * 200)
    running = [load.serve("paged", trace, until=2.0).moments[-1].running for load in (shared, apart)]
    assert running[0] > 2 * running[1]
    held = [load.serve("paged", trace[:20], until=1.0).moments[-1].usage.used for load in (shared, apart)]
    assert held[1] - held[0] > 0.9 * 19 * 341 * shared.plant("paged").spec.token_bytes(2)


def test_lengths_can_be_stretched() -> None:
    load = Load("a100-13b", "wmt1shot")
    short, long = load.sketches(100), load._replace(stretch=2.0).sketches(100)
    assert [one.output_len for one in long] == [2 * one.output_len for one in short]
    assert [one.prompt_len - 80 for one in long] == [2 * (one.prompt_len - 80) for one in short]


def test_runs_that_are_too_slow_are_given_up() -> None:
    slow = measure(ALPACA, "orca-max", 20.0, 30.0, limit=0.05)
    assert slow.latency is None
    assert not slow.keeps(math.inf)
    fine = measure(ALPACA, "orca-max", 1.0, 30.0)
    assert fine.latency is not None
    assert 0.02 < fine.latency < LIMIT
    assert fine.keeps(fine.latency)
    assert not fine.keeps(fine.latency / 1.01)


def test_a_curve_finds_the_highest_rate() -> None:
    found = curve(ALPACA, "orca-max", 40.0)
    rates = [point.rate for point in found.points]
    assert rates == sorted(rates)
    assert found.knee.keeps(LIMIT)
    assert found.knee.running <= 7.5  # slots of 2,048 tokens in 15.7K
    above = [point for point in found.points if point.rate > found.highest]
    assert above
    assert not above[0].keeps(LIMIT)
    assert above[0].rate <= 1.021 * found.highest


def test_rates_at_other_limits() -> None:
    found = made("paged", 4.0)
    assert found.at(LIMIT / 2) == pytest.approx(2.5)
    assert math.isnan(found.at(LIMIT / 5))
    assert math.isnan(found.at(SHOWN))


def test_jobs_come_back_in_order() -> None:
    assert in_parallel(math.pow, [(2.0, 3.0), (3.0, 2.0)], most=1) == [8.0, 9.0]
    assert in_parallel(math.pow, [(2.0, float(k)) for k in range(5)]) == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_batches_are_what_memory_holds() -> None:
    load = Load("a100-13b", "sharegpt")
    mean = {system: batches.mean_running(load, system, 4.0, 60.0) for system in batches.PAPER}
    assert list(mean.values()) == sorted(mean.values(), reverse=True)
    assert 6.5 < mean["orca-max"] <= 7.0  # 15.7K / 2,048 slots


def test_shares_of_the_memory() -> None:
    load = Load("a100-13b", "sharegpt")
    found = {system: waste.shares(load, system, 4.0, 60.0) for system in waste.COMPARED}
    assert all(sum(kinds.values()) == pytest.approx(100, abs=0.3) for kinds in found.values())
    assert found["paged"]["used"] > 95
    assert found["paged"]["reserved"] == found["paged"]["external"] == 0
    assert found["orca-oracle"]["internal"] < found["orca-pow2"]["internal"] < found["orca-max"]["internal"]


def test_growth_of_the_memory() -> None:
    """Orca (Max) takes 2,048 tokens a request; both generate the same tokens a second with the same batch."""
    load = Load("a100-13b", "sharegpt")
    orca, paged = (waste.batch(load, system, 2) for system in ("orca-max", "paged"))
    assert [orca.running, paged.running] == pytest.approx([2, 2], rel=0.01)
    assert orca.memory == pytest.approx(2 * 2048 * 819_200 / 1e9, rel=0.01)
    assert paged.memory < 0.5 * orca.memory
    assert orca.throughput == pytest.approx(paged.throughput, rel=0.01)


@pytest.mark.parametrize(("oracle", "verdict"), [(1.0, HOLDS), (0.6, DIFFERS)])
def test_verdicts_of_figure_12(oracle: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"paged": 2.0, "orca-oracle": oracle, "orca-pow2": 0.55, "orca-max": 0.5, "ft": 0.1}
    asked: list[float] = []

    def curves(loads: list[Load], systems: tuple[str, ...], seconds: list[float]) -> list[dict[str, Curve]]:
        asked.extend(seconds)
        return [{system: made(system, rates[system]) for system in systems} for _ in loads]

    monkeypatch.setattr(basic_sampling, "curves", curves)
    one = verdicts(basic_sampling.figure_12a())
    assert one["(a) OPT-13B, ShareGPT: vLLM / Orca (Oracle) (by 10%)"] == verdict
    assert one["(a) OPT-13B, ShareGPT: vLLM / Orca (Max) (by 10%)"] == HOLDS
    every = basic_sampling.figure_12(full=True)
    assert verdicts(every)["the most of (a) to (c): vLLM / FasterTransformer (by 20%)"] == HOLDS
    assert verdicts(every)["vLLM / Orca (Pow2), median of all panels (by 10%)"] == HOLDS
    assert {result.row for result in every.results} == {"P-F12", "P-X3"}
    assert asked == [600.0, 3600.0, 3600.0, 900.0, 3600.0, 3600.0, 900.0]
    assert len(every.draw().axes) == 6


@pytest.mark.parametrize(("paged", "verdict"), [(3.58, HOLDS), (2.0, DIFFERS)])
def test_verdicts_of_figure_16(paged: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(_: object, jobs: list[tuple[Load, str, float]]) -> list[Curve]:
        rates = [1.0 if system == "orca-oracle" else paged if load.prefix else 1.5 for load, system, _ in jobs]
        return [made(system, rate) for (_, system, _), rate in zip(jobs, rates)]

    monkeypatch.setattr(shared_prefix, "in_parallel", fake)
    monkeypatch.setattr(Load, "capacity", lambda load, system: load.stretch * (1 if system == "paged" else 2))
    done = shared_prefix.figure_16()
    assert verdicts(done)["five examples, 341 tokens: vLLM / Orca (Oracle) (within 20%)"] == verdict
    assert verdicts(done)["a longer prefix, more gain"] == DIFFERS  # here the two are the same
    assert len(done.draw().axes) == 2


@pytest.mark.parametrize(("pow2", "verdict"), [(1.05, HOLDS), (1.5, DIFFERS)])
def test_verdicts_of_figure_17(pow2: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"paged": 2.1, "orca-oracle": 1.0, "orca-pow2": pow2, "orca-max": 1.0}
    monkeypatch.setattr(chat, "curves", lambda *_: [{system: made(system, rates[system]) for system in rates}])
    done = chat.figure_17()
    assert set(verdicts(done).values()) == ({HOLDS} if verdict == HOLDS else {HOLDS, DIFFERS})
    assert done.results[-1].verdict == verdict
    assert done.draw().axes


def test_every_system_has_a_memory() -> None:
    assert set(SYSTEMS) <= set(MEMORIES)


def test_simulated_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """--all --simulated: each figure once, nothing that is timed or needs a GPU."""
    ran: list[str] = []

    def record(name: str, *_: object) -> Reproduction:
        ran.append(name)
        return Reproduction([], "", Figure)

    monkeypatch.setattr("quire.reproduce.reproduce", record)
    assert main(["--all", "--simulated"]) == 0
    assert {"fig1", "fig2", "fig12", "fig13", "fig15", "fig16", "fig17", "table1"} <= set(ran)
    assert not {"fig12a", "fig18a", "fig18b", "fig19a", "step-overhead"} & set(ran)


def test_what_a_picture_shows_is_in_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "curves", lambda *_: [{system: made(system, 1.0) for system in chat.COMPARED}])
    assert main(["fig17", "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "fig17.json").read_text())
    assert content["real"] is False
    assert [point["rate"] for point in content["data"]["paged"]["points"]] == [0.25, 1.0]


@pytest.mark.soak
def test_panel_a_is_in_the_papers_range() -> None:
    said = verdicts(basic_sampling.figure_12a())
    assert DIFFERS not in said.values()
