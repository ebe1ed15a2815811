"""Steps of a model that is divided among ranks, by hand, and against what two H200s took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.simulate import main, read_deployment
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.parallel_layout import ParallelLayout
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice, StepPlan
from quire.sim.cost_model import Coefficients, CostModel, Division, Links, ModelShape, StepWork
from quire.sim.runner import SimRunner, VirtualClock

MEASUREMENTS = Path(__file__).parents[2] / "docs/measurements"
SHAPE = ModelShape(body_weights=100, head_weights=0, itemsize=2, attention=())
READING = Coefficients(1.0, 0, 0, 0, 0, 0, 0, 0, 0, 0)  # a second for each byte of weights
LINKS = Links(one_shot=1.0, one_shot_byte=0.5, two_shots=3.0, two_shots_byte=0.25, hidden_from=100, hidden_share=0.5,
              layer=2.0, stage=10.0, stage_byte=0.125)  # fmt: skip


def test_sums_take_the_faster_way() -> None:
    assert LINKS.sum_seconds(1, 8) == 0.0
    assert LINKS.sum_seconds(2, 8) == 1 + 0.5 * 8
    assert LINKS.sum_seconds(4, 8) == 3 + 0.25 * 8 * 2 * 3 / 4
    assert LINKS.sum_seconds(2, 128) == (3 + 0.25 * 128) / 2, "half of a long one is hidden"


def test_ranks_divide_the_work_and_add_their_own() -> None:
    """200 bytes of weights, four ranks; three layers with seven sums of 2 tokens of 4 bytes."""
    work = StepWork(rows=2, tokens=2, operations=0, kv_bytes=0, attention=0, copied=0, swapped=0)
    assert CostModel(SHAPE, READING).device_seconds(work) == 200
    divided = CostModel(SHAPE, READING, division=Division(ParallelLayout(4), 3, 4, LINKS))
    assert divided.device_seconds(work) == pytest.approx(200 / 4 + 7 * LINKS.sum_seconds(4, 8) + 3 * 2 * 3 / 4)
    staged = CostModel(SHAPE, READING, division=Division(ParallelLayout(1, 2), 3, 4, LINKS))
    assert staged.device_seconds(work) == 200 + 2 * 10


def test_steps_pass_one_stage_after_another() -> None:
    """Two stages of 110 s, with 1 s for a row between them; the second step follows the first one in each stage."""
    clock = VirtualClock()
    runner = SimRunner(CostModel(SHAPE, READING, division=Division(ParallelLayout(1, 2), 3, 4, LINKS)), clock, 2)
    for slot in range(2):
        runner.submit(StepPlan((), (), (SeqSlice(slot, (LAST_SAMPLED,), 5, 1),)))
    ends = []
    for ticket in range(2):
        runner.collect(ticket)
        ends.append(clock.now)
    assert ends == [221.0, 331.0]
    assert runner.busy_seconds == 220.0


def test_memory_is_that_of_all_ranks() -> None:
    one, four = (
        read_deployment(EngineConfig(model_config="llama3-8b", tp=tp, pp=pp), "h200-llama3-8b").kv_tokens
        for tp, pp in ((1, 1), (2, 2))
    )
    assert 4.2 < four / one < 4.6, "the weights are there once"
    with pytest.raises(StartupError, match="--tp is 3, which doesn't divide"):
        read_deployment(EngineConfig(model_config="llama3-8b", tp=3), "h200-llama3-8b")
    with pytest.raises(StartupError, match="--pp is 33, and the model has 32 layers"):
        read_deployment(EngineConfig(model_config="llama3-8b", pp=33), "h200-llama3-8b")


MEASURED: dict[str, tuple[str, str, float]] = {  # file, name of the result, and the error that is allowed
    "--tp 2 fixed:1000:128@32": ("h200x2_8b", "small, fixed:1000:128@32", 0.09),
    "--tp 2 fixed:1024:128@512": ("h200x2_8b", "small, fixed:1024:128@512", 0.09),
    "--tp 2 --model-config llama3-70b fixed:1000:128@32": ("h200x2_70b", "large, fixed:1000:128@32", 0.05),
    "--tp 2 --model-config llama3-70b fixed:1024:128@512": ("h200x2_70b", "large, fixed:1024:128@512", 0.05),
}


@pytest.mark.parametrize("run", MEASURED)
def test_two_gpus_take_about_the_simulated_time(run: str, tmp_path: Path) -> None:
    """Of Llama-3-70B no measurement was used in the calibration."""
    file, what, most = MEASURED[run]
    *flags, workload = run.split()
    out = tmp_path / "out.json"
    main([*flags, "--calibration", "h200-llama3-8b", "--workload", workload, "--rate", "100000", "--out", str(out)])
    [found] = json.loads(out.read_text())["results"]
    results: list[dict[str, Any]] = json.loads((MEASUREMENTS / f"{file}.json").read_text())["results"]
    [measured] = [one["value"] for one in results if one.get("what") == what and one.get("ranks") == 2]
    assert found["total_tokens_per_s"] == pytest.approx(measured, rel=most)
