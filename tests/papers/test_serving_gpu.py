"""Figures 12a and 13a for real, at a small scale: the bundled model on this CPU, every system over one runner, beside
simulations. What the numbers are is not tested, but that they are what they are called.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from papers import side_by_side
from papers.result import DIFFERS, HOLDS, MEASURED, Reproduction
from papers.serving import SYSTEMS
from papers.serving_gpu import GPU, Setting, _ratios, batches, rates
from papers.side_by_side import Place, Plan, Span, engine_of, serve, sleep_until
from quire.bench.document import document, write
from quire.bench.plots import save
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.protocol.sampling_params import SamplingParams
from quire.sim.simulation import TraceRequest

CONFIG = EngineConfig(
    device="cpu", dtype="float32", threads=1, kv_tokens=1536, max_model_len=1024, max_num_seqs=16,
    max_num_batched_tokens=512, enable_prefix_caching=False, preemption="recompute", swap_gib=0.0,
    skip_tokenizer_init=True,
)  # fmt: skip
PLACE = Place(CONFIG, "h200-llama3-8b", "alpaca")
SMALL = Setting(PLACE, ramp=0.1, seconds=0.5, requests=4, least=0.3, most=0.5, drain=0.1)
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARM", 0.3), ("CROWD", 200), ("FILLING", 50), ("SATURATED", 200)):
        monkeypatch.setattr(side_by_side, name, value)


def arriving(*times: float) -> list[TraceRequest]:
    return [TraceRequest(at, [11 + i] * 20, PARAMS) for i, at in enumerate(times)]


def written(done: Reproduction, folder: Path) -> str:
    """It becomes a document and a picture."""
    results = [result._asdict() for result in done.results]
    write(folder / "a.json", {**document("a", "quire reproduce", [], results), "data": done.data})
    save(done.draw(), folder / "a.png")
    return (folder / "a.json").read_text()


def test_figure_13a_at_a_small_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = batches(SMALL)
    written(done, tmp_path)
    assert {(run["system"], run["by"]) for run in done.data} == {
        *((system, by) for system in SYSTEMS for by in ("real", "simulated")), ("ft", "simulated, padded"),
    }  # fmt: skip
    assert len({run["rate"] for run in done.data}) == 1
    for run in done.data:
        assert run["steps"] > 0
        assert run["batch"] > 0
        assert sum(run["shares"].values()) == pytest.approx(1)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert told == [run for run in done.data if run["by"] == "real"]
    assert [r.what for r in done.results if r.paper == 30.42] == ["vLLM (paged): mean batch"]
    assert [r.paper for r in done.results if "/ Orca" in r.what] == [2.23, 3.1, 4.35]


def test_figure_12a_at_a_small_scale(tmp_path: Path) -> None:
    done = rates(SMALL)
    written(done, tmp_path)
    for system in SYSTEMS:
        mine = [run for run in done.data if run["system"] == system]
        assert [run["by"] for run in mine].count("real") == 2
        within, beyond = (run["rate"] for run in mine if run["by"] == "real")
        assert within / beyond == pytest.approx(0.8 / 1.3)
    off = [(result.what.split("simulated ")[1].split(",")[0], result.verdict != MEASURED)
           for result in done.results if "off by" in result.what]  # fmt: skip
    within = [("throughput", False), ("mean batch", False), ("normalised latency", True)]
    beyond = [("throughput", True), ("mean batch", False), ("normalised latency", False)]
    assert off == (within + beyond) * len(SYSTEMS), "what a device's costs decide is judged"
    assert [r.paper for r in done.results if r.paper is not None] == ["1.7-2.7", "2.7-8", "up to 22"]


@pytest.mark.parametrize(("ratio", "verdict"), [(8.2, DIFFERS), (21.0, HOLDS), (30.0, DIFFERS)])
def test_fastertransformer_is_judged_by_the_paper_s_most(ratio: float, verdict: str) -> None:
    plan = Plan("ft", 400.0, Span(0.1, 1.0, 9.0))
    one = PLACE.simulate(plan, 4096)
    judged = _ratios("ft", ratio, {"paged": [one], "ft": [one]})[0]
    assert (judged.paper, judged.verdict) == ("up to 22", verdict)


def test_full_runs_are_longer() -> None:
    assert all(plan.span.end >= 60 for system in ("paged", "ft") for plan in GPU.longer().plans(system, (0.8, 1.3)))
    assert GPU.longer().seconds > GPU.seconds >= 60


def test_requests_come_at_their_times() -> None:
    with built(CONFIG) as made:
        engine = engine_of(made, CONFIG, "paged")
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
    simulation = PLACE.simulation("ft", 1536)
    engine = simulation.engine
    served, steps, _ = serve(engine, simulation.clock.advance_to, arriving(*[0.0] * 8), Span(0.0, 1e-4, 1e-4))
    assert not any(one.done for one in served)
    assert not engine.has_unfinished_requests
    assert len(steps) == 1


def test_padding_is_only_simulated_where_asked() -> None:
    plan = Plan("ft", 400.0, Span(0.1, 1.0, 9.0))
    without, with_it = PLACE.simulate(plan, 4096), PLACE.simulate(plan, 4096, padded=True)
    assert with_it.tokens_per_s < without.tokens_per_s


def test_rates_are_scaled_to_equal_saturation() -> None:
    one = Setting(PLACE._replace(calibration="a100-13b"))
    assert one.rate() == pytest.approx(2.0), "on the paper's device it is the paper's"
