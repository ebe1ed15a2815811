"""Jenga's entries with pictures, Figures 14 and 18: small runs run, real ones on a CPU beside their simulation, and
verdicts follow made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.data.models.configs import named_config
from quire.data.models.seeing_settings import PREPARATION
from quire.reproduce import picture_latency, unlike_gpu, vision_cache
from quire.reproduce.picture_latency import Latencies
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.reproduce.unlike_gpu import PICTURES, Both, Load
from quire.reproduce.unlike_serving import H100, Case, Ran, burst, serve
from quire.reproduce.vision_cache import MODELS, MODES, Cached
from quire.sim.simulate import Served

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
    PREPARATION: {**named_config("llava-onevision-7b")[PREPARATION], "size": {"height": 56, "width": 56}},
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
    one = Served(1.0, 5, 3)
    one.events, one.done = [(2.0, 1), (4.0, 2)], True
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
