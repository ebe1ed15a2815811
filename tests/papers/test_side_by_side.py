"""Figures 12a and 13a for real, at a small scale: the bundled model on this CPU, every system over one runner, beside
simulations. What the numbers are is not tested, but that they are what they are called."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from papers import side_by_side
from papers.entry import MEASURED, Result
from papers.pagedattention import ENTRIES
from papers.serving import SYSTEMS, Load
from papers.side_by_side import Place, Plan, Span, by_rate, engine_of, every_system, one_rate, serve, sleep_until
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan
from quire.sim.simulation import TraceRequest

CONFIG = EngineConfig(
    device="cpu", dtype="float32", threads=1, kv_tokens=1536, max_model_len=1024, max_num_seqs=16,
    max_num_batched_tokens=512, enable_prefix_caching=False, preemption="recompute", swap_gib=0.0,
    skip_tokenizer_init=True,
)  # fmt: skip
PLACE = Place(CONFIG, Load("h200-llama3-8b", "alpaca"))
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARM", 0.3), ("CROWD", 200), ("STEPS", 250)):
        monkeypatch.setattr(side_by_side, name, value)


def arriving(*times: float) -> list[TraceRequest]:
    return [TraceRequest(at, [11 + i] * 20, PARAMS) for i, at in enumerate(times)]


def judged(name: str, points: list[dict[str, Any]]) -> list[Result]:
    done = ENTRIES[name].judge(json.loads(json.dumps(points)))
    assert done.draw().axes
    return done.results


def test_figure_13a_at_a_small_scale(capsys: pytest.CaptureFixture[str]) -> None:
    points = one_rate(every_system(PLACE), ("a100-13b", 2.0), ramp=0.1, seconds=0.5)
    assert {(point["system"], point["by"]) for point in points} == {
        (system, by) for system in SYSTEMS.values() for by in ("real", "simulated")
    }
    assert len({point["rate"] for point in points}) == 1
    for point in points:
        assert point["steps"] > 0
        assert point["batch"] > 0
        assert sum(point[kind] for kind in (*side_by_side.Usage._fields,)) == pytest.approx(100)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["batch"] for line in lines] == [point["batch"] for point in points if point["by"] == "real"]
    results = judged("fig13-gpu", points)
    assert [r.what for r in results if r.paper == 30.42] == ["vLLM (paged): mean batch"]
    assert [r.paper for r in results if "/ Orca" in r.what] == [2.23, 3.1, 4.35]


def test_figure_12a_at_a_small_scale() -> None:
    points = by_rate(
        every_system(PLACE), (0.5, 0.8, 1.3), (0.8, 1.3), ramp=0.1, requests=4, least=0.3, most=0.5, drain=0.1
    )
    for system in SYSTEMS.values():
        mine = [point for point in points if point["system"] == system]
        assert [point["by"] for point in mine].count("simulated") == 3
        within, beyond = (point["rate"] for point in mine if point["by"] == "real")
        assert within / beyond == pytest.approx(0.8 / 1.3)
    results = judged("fig12a-gpu", points)
    assert [r.paper for r in results if r.paper is not None] == ["1.7-2.7", "2.7-8", "up to 22, of (a) to (c)"]
    off = [(result.what.split("simulated ")[1].split(",")[0], result.verdict != MEASURED)
           for result in results if "off by" in result.what]  # fmt: skip
    counts = {(what, judged): off.count((what, judged)) for what, judged in off}
    assert counts == {("normalised latency", True): 5, ("normalised latency", False): 5, ("throughput", True): 5,
                      ("throughput", False): 5, ("mean batch", False): 10}  # fmt: skip


@pytest.mark.parametrize("name", ["fig14-gpu", "fig17-gpu"])
def test_what_is_served_beyond_capacity_at_a_small_scale(name: str) -> None:
    load = ENTRIES[name].params["ways"]["vLLM (paged)"].load._replace(calibration="h200-llama3-8b", workload="alpaca")
    place = Place(replace(CONFIG, kv_tokens=16384, max_model_len=1024), load)
    points = by_rate(every_system(place), (1.3,), (1.3,), ramp=0.1, requests=4, least=0.3, most=0.5, drain=0.1)
    results = judged(name, points)
    assert [r.paper for r in results if r.paper is not None] == ([2.0] * 3 if name == "fig17-gpu" else [])
    assert {r.what for r in results if r.real_or_simulated == "simulated"} == {
        f"rate of vLLM (paged) / {system}" for system in list(SYSTEMS.values())[1:]
    }


@pytest.mark.parametrize("name", ["fig12b-gpu", "fig12e-gpu"])
def test_two_ranks_at_a_small_scale(name: str) -> None:
    config = ENTRIES[name].params["ways"]["vLLM (paged)"].config
    assert (config.tp, config.kv_gib) == (2, 21.0)
    place = Place(replace(CONFIG, tp=config.tp), PLACE.load)
    points = by_rate(every_system(place), (3.0,), (3.0,), ramp=0.1, requests=4, least=0.5, most=1.0, drain=0.1)
    results = judged(name, points)
    assert [r.paper for r in results if r.paper is not None] == (
        ["1.7-2.7", "2.7-8", "up to 22, of (a) to (c)"] if name == "fig12b-gpu" else []
    )
    assert not any("off by" in result.what for result in results)


SMALL = {
    "model": "opt-125m", "kv_tokens": 4096, "tp": 2, "device": "cpu", "dtype": "float32", "ramp": 0.1, "seconds": 0.5,
    "drain": 0.1,
}  # fmt: skip


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate in this process."""
    monkeypatch.setattr(side_by_side, "in_parallel", lambda function, jobs: [function(*job) for job in jobs])


@pytest.mark.usefixtures("in_turn")
def test_what_eight_gpus_would_do_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates by share of the capacity, for a model divided among ranks; nothing is built."""
    monkeypatch.setattr(side_by_side, "built", None)
    monkeypatch.setattr(side_by_side, "search", lambda load, memory, seconds, start: (start + load.settings["tp"], []))
    first, second = ENTRIES["fig12-tp8"].runs
    assert (first.params["tp"], first.params["model"], first.params["kv_tokens"]) == (8, "opt-175b", 60_112)
    changes = {**SMALL, "model": "opt-13b", "shares": (0.8, 1.3)}
    points = [*first.points(False, changes), *second.points(False, changes)]
    capacities = {(p["workload"], p["system"]): p["capacity"] for p in points if "knee" in p}
    assert len(capacities) == 2 * 4
    assert [p["knee"] for p in points if "knee" in p] == [rate + 2 for rate in capacities.values()]
    assert {point["by"] for point in points} == {"simulated"}
    rates = {(p["workload"], p["system"], p["share"]): p["rate"] for p in points if "share" in p}
    assert len(rates) == 2 * 4 * 2
    assert all(rate == pytest.approx(key[2] * capacities[key[:2]]) for key, rate in rates.items())
    of_four = first.points(False, {**changes, "tp": 4, "shares": (), "knees": 1.0})
    assert all(point["capacity"] > capacities["sharegpt", point["system"]] for point in of_four)
    results = judged("fig12-tp8", points)
    assert [result.verdict for result in results] == [MEASURED] * 6


@pytest.mark.usefixtures("in_turn")
def test_a_panel_of_several_ranks_at_a_small_scale() -> None:
    """Runs of this device are at the rates of simulated ones, and the reason is given for those that are left out."""
    [run] = ENTRIES["fig12f-gpu"].runs
    points = run.points(False, {**SMALL, "real": (1.3,)})
    real = [point for point in points if point.get("by") == "real"]
    left = [point for point in points if "why" in point]
    assert len(real) + len(left) == 4
    assert real
    assert {point["why"] for point in left} <= {"no token came in the measured time"}
    by_rate = {(p["system"], p["rate"]): p for p in points if p.get("by") == "simulated"}
    for point in real:
        ahead = by_rate[point["system"], point["rate"]]
        assert point["batch_off"] == pytest.approx(ahead["batch"] / point["batch"] - 1)
    assert judged("fig12f-gpu", points)


@pytest.mark.usefixtures("in_turn")
def test_a_panel_without_time_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "built", None)
    [run] = ENTRIES["fig12c-gpu"].runs
    points = run.points(False, {**SMALL, "minutes": 0.0})
    assert [point["why"] for point in points if "why" in point] == ["no time was left"] * 8
    results = judged("fig12c-gpu", points)
    assert {result.real_or_simulated for result in results} == {"simulated"}


def test_a_run_that_fails_leaves_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points before it are kept; without a deadline the error is raised."""
    plans = [Plan(f"way {i}", PLACE, 4.0, 0.8, Span(0.1, 0.5, 0.6)) for i in range(3)]
    runs: list[str] = []

    def fail_second(engine: Any, wait: Any, plan: Plan, by: str) -> dict[str, Any]:
        runs.append(plan.way)
        if len(runs) == 2:
            raise QuireError("rank 3 was ended by signal 9")
        return {"system": plan.way, "tokens_per_s": 1.0}

    monkeypatch.setattr(side_by_side, "run", fail_second)
    measured, missing, _ = side_by_side._measure(plans, 1e9)
    assert [point["system"] for point in measured] == ["way 0"]
    assert missing == dict.fromkeys(("way 1 at 4.00/s", "way 2 at 4.00/s"), "QuireError: rank 3 was ended by signal 9")
    runs.clear()
    with pytest.raises(QuireError, match="rank 3"):
        side_by_side._measure(plans)


def test_a_registered_prefix_at_a_small_scale() -> None:
    """Figure 16: what is registered is computed once, on this device and simulated."""
    ways = {
        name: Place(
            replace(CONFIG, memory=way.config.memory, kv_tokens=4096, prefix_tokens=way.config.prefix_tokens),
            way.load._replace(calibration="h200-llama3-8b"),
        )
        for name, way in ENTRIES["fig16-gpu"].params["ways"].items()
    }
    assert [place.load.prefix for place in ways.values()] == [341, 0]
    points = by_rate(ways, (1.3,), (1.3,), ramp=0.1, requests=4, least=1.0, most=2.0, drain=0.1)
    results = judged("fig16-gpu", points)
    assert [r.paper for r in results if r.paper is not None] == [3.58]
    registered, apart = (p["served"] for p in points if p["by"] == "simulated")
    assert registered > apart


def test_preemption_at_a_small_scale() -> None:
    """Figure 19b: the same rate for every policy."""
    ways = {
        way: place._replace(config=replace(CONFIG, preemption=way, swap_gib=0.1), load=PLACE.load)
        for way, place in ENTRIES["fig19b-gpu"].params["ways"].items()
    }
    assert list(ways) == ["recompute", "swap", "auto"]
    points = one_rate(ways, ("a100-13b", 2.5), ramp=0.1, seconds=0.5)
    assert len({point["rate"] for point in points}) == 1
    assert [r.row for r in judged("fig19b-gpu", points)].count("C4") == 1


def test_full_runs_are_longer() -> None:
    for name, field in (("fig13-gpu", "seconds"), ("fig12a-gpu", "least"), ("fig12a-gpu", "requests")):
        assert ENTRIES[name].full[field] > ENTRIES[name].params[field]


def test_requests_come_at_their_times() -> None:
    with built(CONFIG) as made:
        engine = engine_of(made, CONFIG)
        began = time.monotonic()
        served, steps, usages = serve(engine, sleep_until, arriving(0.0, 0.3), Span(0.0, 0.5, 60.0))
        took = time.monotonic() - began
    assert all(one.done for one in served)
    assert [sum(count for _, count in one.token_times) for one in served] == [9, 9]
    assert served[1].token_times[0][0] > 0.3
    assert 0.3 < took < 30.0, "it is over when all are done"
    assert sum(step.tokens for step in steps) == 18
    assert usages


def test_what_is_unfinished_is_given_up() -> None:
    simulation = every_system(PLACE)["FasterTransformer"].simulation(1536)
    engine = simulation.engine
    served, steps, _ = serve(engine, simulation.clock.advance_to, arriving(*[0.0] * 8), Span(0.0, 1e-4, 1e-4))
    assert not any(one.done for one in served)
    assert not engine.has_unfinished_requests
    assert len(steps) == 1


def test_a_static_batch_computes_its_padding() -> None:
    """Prompts of 3, 20 and 9 tokens, outputs of 9, 2 and 5: each step has three rows until the last of them ends."""
    plans: list[StepPlan] = []
    asked = [TraceRequest(0.0, [11] * length, replace(PARAMS, max_tokens=count)) for length, count in
             ((3, 9), (20, 2), (9, 5))]  # fmt: skip
    config = replace(CONFIG, max_model_len=64)
    with built(config) as made:
        engine = engine_of(made, replace(config, memory="ft"))
        runner: Any = engine.runner
        submit = made.engine.runner.submit
        runner.runner.submit = lambda plan: plans.append(plan) or submit(plan)
        served, _, _ = serve(engine, sleep_until, asked, Span(0.0, 0.1, 60.0))
    assert [sum(count for _, count in one.token_times) for one in served] == [9, 2, 5]
    assert [len(row.tokens) for row in plans[0].slices] == [20, 20, 20]
    assert [len(plan.slices) for plan in plans[:9]] == [3] * 9
