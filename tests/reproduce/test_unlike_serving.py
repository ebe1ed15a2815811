"""Jenga's simulated entries: what is counted of a run is right, small runs run, and verdicts follow made-up numbers."""

from __future__ import annotations

import pytest

from quire.reproduce import articles, decode_batches, memory_timeline, unlike_gpu, unlike_throughput
from quire.reproduce.articles import Found
from quire.reproduce.decode_batches import CASE, Decoded, judged, longest_request
from quire.reproduce.equality import WINDOWED
from quire.reproduce.memory_timeline import DYNAMIC, Timeline
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.reproduce.unlike_gpu import Both
from quire.reproduce.unlike_serving import (
    DOCUMENT,
    H100,
    L4,
    OWN,
    RULES,
    Case,
    Memory,
    Ran,
    burst,
    prompts,
    serve,
    simulated,
)
from quire.reproduce.unlike_throughput import Speed


def test_budgets_are_the_papers() -> None:
    assert Case("ministral-8b", L4, "", halved=True).budget == pytest.approx(12.37, abs=0.01)
    assert Case("ministral-8b", H100, "").budget == pytest.approx(54.45, abs=0.01)
    assert Case("ministral-8b", H100, "", kv_gib=40.0).budget == 40


def test_prompts_share_what_their_documents_do() -> None:
    case = Case("gemma-2-9b", H100, "arxiv-qa@8")
    sketches = case.sketches()
    assert {one.prompt_len + one.output_len for one in sketches} == {8192}
    made = prompts(sketches)
    assert [len(prompt) for prompt in made] == [one.prompt_len for one in sketches]
    assert len({prompt[0] for prompt in made}) == 2
    assert len({prompt[one.prefix_len] for prompt, one in zip(made, sketches)}) == 8
    assert {prompt[-1] for prompt in made} == {OWN}
    assert min(prompt[0] for prompt in made) == DOCUMENT


@pytest.mark.parametrize("rule", RULES)
def test_a_small_run_by_every_rule(rule: str) -> None:
    case = Case("ministral-8b", H100, "longdoc@3", kv_gib=40.0)
    run = simulated(case, rule, sampled=0.2)
    trace = burst(case.sketches())
    assert sum(step.prompt for step in run.steps) == sum(len(one.prompt) for one in trace)
    assert sum(step.decoding for step in run.steps) == run.output - 3, "the first token of each is a prompt's"
    assert 1 <= run.batch <= 3
    assert run.requests_per_s * run.seconds == pytest.approx(3)
    late = [one for one in run.memory if one.full > 2**32]
    wasted = sum(one.wasted for one in late) / sum(one.allocated for one in late)
    if rule in ("uniform", "max"):
        assert 0.3 < wasted < 0.6
    else:
        assert wasted < 0.002, "a page's tail"
    total = {one.allocated + one.free for one in run.memory}
    assert max(total) - min(total) <= 0.001 * max(total)


def test_devices_that_move_and_compute_less_take_longer() -> None:
    fast, slow = (simulated(Case("llama3-8b", device, "fixed:512:32@8", kv_gib=4.0), "jenga") for device in (H100, L4))
    assert 3 < slow.seconds / fast.seconds < 30
    halved = simulated(Case("llama3-8b", L4, "fixed:512:32@8", kv_gib=4.0, halved=True), "jenga")
    assert halved.seconds < 0.8 * slow.seconds


def decoded(batch: float, steps: int) -> Decoded:
    return Decoded(batch, steps, 0.0, [1, 2, 3])


def test_decode_batches_are_judged() -> None:
    runs = {rule: decoded(2.63, 600) for rule in RULES} | {"jenga": decoded(5.2, 310)}
    assert {one.verdict for one in judged(runs, runs) if one.paper is not None} == {HOLDS}
    same = {rule: decoded(2.63, 600) for rule in RULES}
    verdicts = [one.verdict for one in judged(same, runs) if one.verdict != MEASURED]
    assert verdicts == [DIFFERS, DIFFERS, HOLDS, HOLDS, DIFFERS, HOLDS]
    data = {name: {rule: run._asdict() for rule, run in runs.items()} for name in ("h100", "less")}
    assert len(decode_batches.draw(data).axes) == 2
    assert f"{CASE.budget:.1f}" in decode_batches._text(runs, runs)


def test_the_longest_request() -> None:
    found = longest_request().results
    assert [one.verdict for one in found[:2]] == [HOLDS, HOLDS]
    assert 85_000 < found[2].ours < 95_000


def moments(wasted: int, shares: list[int]) -> list[Memory]:
    return [Memory(float(t), share, 100 - share, wasted, 50, 2) for t, share in enumerate(shares)]


def test_timelines_are_judged() -> None:
    ramp = [28] * 50 + [40] * 50 + [54] * 50
    found = [
        Timeline(trace, rule, moments(62 if rule == "uniform" else 0, ramp))
        for trace in ("static", "dynamic")
        for rule in ("uniform", "jenga")
    ]
    assert found[0].wasted() == pytest.approx(100 * 62 / 162)
    assert {one.verdict for one in memory_timeline.judged(found) if one.verdict != MEASURED} == {HOLDS}
    worse = [one._replace(moments=moments(20, [80] * 50)) for one in found]
    assert {one.verdict for one in memory_timeline.judged(worse) if one.verdict != MEASURED} == {DIFFERS}
    drawn = memory_timeline.draw([one._asdict() for one in found])
    assert len(drawn.axes) == 4
    assert DYNAMIC.workload in memory_timeline._text(found)


def speeds(ratio: float, llama: float) -> list[Speed]:
    found = []
    for model, cases in unlike_throughput.CASES.items():
        for device in (case.device.name for case in cases):
            for rule in ("uniform", "jenga"):
                times = 1.0 if rule == "uniform" else llama if model == "Llama" else ratio
                found.append(Speed(model, device, rule, f"{model}, {device}", 3.0, 2 * times, 4.0, 0.5, 0, 40, 1))
    return found


def test_throughputs_are_judged() -> None:
    paper = unlike_throughput.judged(speeds(1.9, 1.01))
    assert {one.verdict for one in paper if one.verdict != MEASURED} == {HOLDS}
    assert [one.ours for one in paper if one.paper is None] == [1.9] * 11
    slower = unlike_throughput.judged(speeds(0.9, 1.1))
    assert {one.verdict for one in slower if one.verdict != MEASURED} == {DIFFERS}
    found = speeds(1.9, 1.0)
    assert len(unlike_throughput.draw([one._asdict() for one in found]).axes) == 2
    assert "calibrated" in unlike_throughput.text(found, "calibrated")


@pytest.mark.parametrize("rule", ["uniform", "jenga"])
def test_pictures_and_states_are_served(rule: str) -> None:
    seeing = Case("llama3.2-vision-11b", H100, "mmmu-pro@8", kv_gib=3.0)
    run = simulated(seeing, rule)
    assert (run.encoder_runs, run.encoder_parts) == (8, 8)
    assert 30 < (run.tokens - run.output) / 8 < 60, "a picture takes one token's place"
    assert run.batch < 4 if rule == "uniform" else run.batch > 4
    states = Case("jamba-52b", H100, "mmlu-pro@8", halved=True, kv_gib=2.0, seqs=16)
    assert simulated(states, rule).requests == 8


def test_a_case_runs_and_drops_what_uniform_pages_cannot_hold() -> None:
    case = Case("ministral-8b", L4, "arxiv-qa@16", halved=True, caching=True, chunk=2048)
    of = {rule: unlike_throughput.speed("Ministral", case, rule) for rule in ("uniform", "jenga")}
    assert of["uniform"].left_out == of["jenga"].left_out
    assert of["uniform"].requests + of["uniform"].left_out == 16


def found(hits: dict[str, float]) -> list[Found]:
    few = [Found(n, way, 0.8, 0.5) for n in (1, 2, 3) for way in articles.WAYS]
    return few + [Found(5, way, hits[way], hits[way]) for way in articles.WAYS]


def test_articles_are_judged() -> None:
    ours = found({"uniform": 0.45, "paper": 0.4, "slack": 0.8, "boundary": 0.75})
    assert [one.verdict for one in articles.judged(ours) if one.verdict != MEASURED] == [HOLDS] * 3
    worse = [
        one._replace(hit_rate=0.9) if one[:2] == (2, "boundary") else one
        for one in found(dict.fromkeys(articles.WAYS, 0.4))
    ]
    assert [one.verdict for one in articles.judged(worse) if one.verdict != MEASURED] == [DIFFERS] * 3
    assert len(articles.draw([one._asdict() for one in ours]).axes) == 2
    assert "40.0%" in articles.text(ours, "")


def test_articles_that_fit_are_found_again() -> None:
    """Where both of two articles fit, all but the first question about each hit."""
    small = Case("ministral-8b", H100, "docqa:2:4000@6", kv_gib=2.0, caching=True)
    runs = {}
    for rule in ("uniform", "jenga"):
        engine = small.plant(rule).simulation().engine
        runs[rule] = serve(engine, burst(small.sketches()), small.spec, concurrency=1)
    assert {round(run.hit_rate, 1) for run in runs.values()} == {0.7}


def ran(seconds: float, batch: float, hits: float) -> Ran:
    return Ran(seconds, 10, 1000, 100, 50, batch, hits, 0, 0.1, 1.0, 0, 0, [], [])


def test_real_runs_are_judged_beside_their_simulation() -> None:
    less, more = ran(10.0, 2.0, 0.4), ran(6.0, 4.0, 0.6)
    good = [Both("uniform", less, less._replace(seconds=10.5)), Both("jenga", more, more)]
    for judge in (unlike_gpu.judged_speed, unlike_gpu.judged_batches, unlike_gpu.judged_articles):
        assert {one.verdict for one in judge(good)} == {HOLDS, MEASURED}
    bad = [Both("uniform", more, more), Both("jenga", less, less._replace(seconds=5.0))]
    for judge in (unlike_gpu.judged_speed, unlike_gpu.judged_batches, unlike_gpu.judged_articles):
        assert DIFFERS in {one.verdict for one in judge(bad) if "LCM pages / uniform" in one.what}
        assert [one.verdict for one in judge(bad) if "off by" in one.what] == [HOLDS, DIFFERS]
    assert unlike_gpu.judged_speed(good, equal=True)[-3].verdict == DIFFERS
    runs = [{"rule": both.rule, "by": kind, **both.real.facts()} for both in good for kind in ("real", "simulated")]
    assert len(unlike_gpu.draw({"title": "", "runs": runs}).axes) == 3


def test_loads_of_real_runs_fit_their_memory() -> None:
    for name, load in unlike_gpu.LOADS.items():
        if not name.startswith("pyramid"):
            here = load.here()
            assert here.budget == pytest.approx(load.case.budget)
            assert f"--kv-gib {here.budget:.2f}" in unlike_gpu.text(load, [])


def test_real_runs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a shape so small: both rules, real and simulated, compute the same."""
    monkeypatch.setattr(unlike_gpu, "ON", "cpu")
    monkeypatch.setattr(unlike_gpu, "WARM", (16, 40))
    small = Case(
        "ministral-8b", H100, "docqa:2:120@6", kv_gib=0.004, caching=True, longest=512, changes=(*WINDOWED.items(),)
    )
    found = unlike_gpu.run(unlike_gpu.Load(small, concurrency=1))
    assert [both.rule for both in found] == ["uniform", "jenga"]
    for both in found:
        assert both.real.decode_steps == both.simulated.decode_steps > 300
        assert both.real.hit_rate == both.simulated.hit_rate > 0.4
        assert both.real.seconds > 0
    assert len(unlike_gpu.judged_articles(found)) == 14
