"""Jenga's simulated entries: what is counted of a run is right, small runs run, real ones on a CPU beside their
simulation, and verdicts follow made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papers import (
    articles,
    decode_batches,
    memory_timeline,
    picture_latency,
    unlike_gpu,
    unlike_throughput,
    vision_cache,
)
from papers.articles import Found
from papers.decode_batches import CASE, Decoded, judged, longest_request
from papers.equality import WINDOWED
from papers.memory_timeline import DYNAMIC, Timeline
from papers.picture_latency import Latencies
from papers.result import DIFFERS, HOLDS, MEASURED
from papers.unlike_gpu import PICTURES, Both, Load
from papers.unlike_serving import H100, L4, RULES, Case, Memory, Ran, burst, serve, simulated
from papers.unlike_throughput import Speed
from papers.vision_cache import MODELS, MODES, Cached
from quire.models.named_configs import named_config
from quire.models.vision.settings import PREPROCESSOR_KEY
from quire.sim.simulation import ServedRequest


def test_budgets_are_the_papers() -> None:
    assert Case("ministral-8b", L4, "", halved=True).budget == pytest.approx(12.37, abs=0.01)
    assert Case("ministral-8b", H100, "").budget == pytest.approx(54.45, abs=0.01)
    assert Case("ministral-8b", H100, "", kv_gib=40.0).budget == 40


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


def test_real_runs_run() -> None:
    """On a CPU, with a shape so small: both rules, real and simulated, compute the same."""
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


TINY: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 512,
        "use_sliding_window": False, "eos_token_id": 2,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 14, "image_size": 56, "vision_use_head": False,
    },
    "image_token_index": 500,
    "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in (1, 2) for columns in (1, 2)],
    PREPROCESSOR_KEY: {**named_config("llava-onevision-7b")[PREPROCESSOR_KEY], "size": {"height": 56, "width": 56}},
}  # fmt: skip
SMALL = Case("llava-onevision-7b", H100, "mmmu-pro@4", kv_gib=0.004, longest=512, chunk=32, changes=tuple(TINY.items()))


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlike_gpu, "ON", "cpu")
    monkeypatch.setattr(unlike_gpu, "WARM", (16, 40))


# Figure 18


def test_each_request_encodes_once_or_once_a_chunk() -> None:
    runs = {mode: vision_cache.cached("InternVL2 8B", mode, crowd=6, alone=3) for mode in MODES}
    assert {mode: run.alone_runs for mode, run in runs.items()} == {"off": 9, "pages": 3, "inside": 3}
    assert {run.chunks for run in runs.values()} == {9}
    assert runs["off"].requests_per_s < runs["pages"].requests_per_s == runs["inside"].requests_per_s
    assert runs["off"].beyond < runs["pages"].beyond < runs["inside"].beyond
    assert len({run.most for run in runs.values()}) == 1, "no more than a request takes at its end"


def cached(ratio: float, runs: int) -> list[Cached]:
    of = {"off": (1.0, 1.0, 100), "pages": (ratio, 1 / ratio, runs), "inside": (ratio, 1 / ratio, runs)}
    return [Cached(model, mode, speed, late, 1, 1.0, count, 100, 2**30, 2**20)
            for model in MODELS for mode, (speed, late, count) in of.items()]  # fmt: skip


def test_caches_are_judged() -> None:
    good = vision_cache.judged(cached(1.9, vision_cache.ALONE))
    assert {one.verdict for one in good if one.verdict != MEASURED} == {HOLDS}
    assert [one.ours for one in good if one.paper in (1.88, 1.6)] == [1.9, 1.9]
    bad = vision_cache.judged(cached(0.9, 100))
    assert [one.verdict for one in bad[: 2 * len(MODELS)]] == [DIFFERS] * 2 * len(MODELS)
    assert sum(one.verdict == DIFFERS for one in bad if "encoder runs" in one.what) == 2 * len(MODELS)
    assert len(vision_cache.draw([one._asdict() for one in cached(1.9, 20)]).axes) == 4
    assert "PaliGemma2" in vision_cache.text(cached(1.9, 20))


def test_a_real_run_encodes_as_its_simulation_does() -> None:
    found = unlike_gpu.run(Load(SMALL, ways=("off", "pages")))
    assert [both.rule for both in found] == ["off", "pages"]
    for both in found:
        assert both.real.encoder_runs == both.simulated.encoder_runs
        assert both.real.decode_steps == both.simulated.decode_steps
    assert found[1].real.encoder_runs == 4 < found[0].real.encoder_runs
    what = [one.what for one in unlike_gpu.judged_pictures(found)]
    assert "throughput: pages / off (above 1)" in what
    assert unlike_gpu.judged_pictures(found)[-3].verdict == HOLDS, "one run a request"


def test_real_runs_of_pictures_are_judged() -> None:
    less = Ran(10.0, 10, 1000, 100, 50, 2.0, 0.0, 0, 0.1, 2.0, 30, 30, [], [])
    more = less._replace(seconds=6.0, latency=1.0, encoder_runs=10)
    found = [Both("off", less, less), Both("pages", more, more)]
    assert {one.verdict for one in unlike_gpu.judged_pictures(found)} == {HOLDS, MEASURED}
    alike = unlike_gpu.judged_pictures(found, alike=True)
    assert [one.verdict for one in alike if "within 3%" in one.what] == [DIFFERS] * 2
    runs = [{"rule": both.rule, "by": kind, **both.real.facts()} for both in found for kind in ("real", "simulated")]
    assert len(unlike_gpu.draw({"title": "", "runs": runs}).axes) == 3
    assert {load.ways for load in PICTURES.values()} == {("off", "pages")}
    assert unlike_gpu.LOADS["jamba"].here().halved, "in FP8 for real"


# Figure 14


def latencies(rule: str, share: float, e2e: float, ttft: float, tpot: float, by: str = "simulated") -> Latencies:
    return Latencies(rule, by, 10 * share, share, e2e, ttft, tpot, 0)


def test_latencies_are_judged() -> None:
    good = [
        latencies("uniform", 0.5, 2.0, 0.1, 0.01), latencies("jenga", 0.5, 2.02, 0.1, 0.01),
        latencies("uniform", 1.5, 8.0, 6.0, 0.015), latencies("jenga", 1.5, 4.0, 0.5, 0.03),
    ]  # fmt: skip
    results = picture_latency.judged(good)
    assert [one.verdict for one in results] == [HOLDS] * 4
    assert [one.ours for one in results] == [0.01, 2.0, 12.0, 2.0]
    bad = [
        latencies("uniform", 0.5, 2.0, 0.1, 0.01), latencies("jenga", 0.5, 2.2, 0.1, 0.01),
        latencies("uniform", 1.5, 4.0, 0.5, 0.03), latencies("jenga", 1.5, 8.0, 6.0, 0.015),
    ]  # fmt: skip
    assert [one.verdict for one in picture_latency.judged(bad)] == [DIFFERS] * 4
    both = [*good, *(one._replace(by="real", e2e=1.3 * one.e2e) for one in good)]
    assert {one.verdict for one in picture_latency.off(both)} == {DIFFERS}
    assert len(picture_latency.draw([one._asdict() for one in both]).axes) == 3


def test_rates_lie_within_both_capacities_between_them_and_beyond() -> None:
    found = picture_latency.rates(10.0, 20.0)
    assert found == sorted(found)
    assert [rate < 10 for rate in found] == [True] * 3 + [False] * 3
    assert found[-1] > 20
    one = ServedRequest(1.0, 5, 3)
    one.token_times, one.done = [(2.0, 1), (4.0, 2)], True
    made = picture_latency.latencies("jenga", "real", 5.0, 10.0, [one], 9.0)
    assert made[2:] == (5.0, 0.5, 3.0, 1.0, 1.0, 0)


def test_uniform_pages_serve_less_and_later_beyond_their_capacity() -> None:
    case = picture_latency.CASE._replace(workload="mmmu-pro@60", kv_gib=6.0)
    less, more = (picture_latency.capacity(case, rule) for rule in picture_latency.RULES)
    assert less < more
    late, soon = (picture_latency.run(case, rule, 0.95 * more, less, 40) for rule in picture_latency.RULES)
    assert late.ttft > soon.ttft


@pytest.mark.soak
def test_real_latencies_are_those_of_the_same_requests() -> None:
    done = picture_latency.real(SMALL, (0.5, 3), (2.0, 4))
    assert len(done.data) == 8
    assert {one["by"] for one in done.data} == {"real", "simulated"}
    assert sum(one["unfinished"] for one in done.data) == 0
    assert len(done.results) == 4 + 4 + 4


def test_llama_vision_is_simulated_as_its_real_run_was() -> None:
    """On one H200, with what an encoder's work took there."""
    document = Path(__file__).parents[2] / "docs" / "measurements" / "reproduce" / "jenga-fig13-mllama-gpu.json"
    runs = json.loads(document.read_text(encoding="utf-8"))["data"]["runs"]
    real = {run["rule"]: run for run in runs if run["by"] == "real"}
    here = unlike_gpu.LOADS["mllama"].here()
    trace = burst(here.sketches(), here.eyes, pixels=True)
    for rule, wanted in real.items():
        ran = serve(here.plant(rule).simulation().engine, trace, here.spec)
        assert ran.requests == wanted["requests"]
        assert ran.encoder_runs == wanted["encoder_runs"]
        assert abs(ran.seconds / wanted["seconds"] - 1) < 0.03, (rule, ran.seconds, wanted["seconds"])
