"""What pictures cost a simulated step: encoders, layers that attend to pictures, and requests that have any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config import EngineConfig
from quire.protocol.images import ImageItem
from quire.protocol.model_spec import LayerSpec, ModelSpec, VisionSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import ImageEncoding, SeqSlice, StepPlan
from quire.sim.cost_model import Coefficients, CostModel, ModelShape, VisionShape, attended_images, step_work
from quire.sim.simulation import Simulation, TraceRequest

KEYS = [bytes([i]) * 32 for i in range(3)]
NOTHING = Coefficients(*(0.0,) * 10)
EYES = VisionSpec(16, 32, 500, part_tokens=4, part_operations=160_000)
SELF, CROSS = LayerSpec(1, 8), LayerSpec(1, 8, is_cross_attention=True)
TEXT = ModelSpec("made up", (SELF, SELF), 64, 256, 16, 2, 8, 20_000)
CROSSED = replace(TEXT, layers=(SELF, CROSS), vision=EYES)
PLACED = replace(TEXT, vision=EYES)
PICTURE = ImageItem(KEYS[0], 3, 1, 20, 2)


def test_each_token_sees_the_latest_picture() -> None:
    media = (ImageItem(KEYS[0], 2, 1, 10), ImageItem(KEYS[1], 6, 1, 30))
    assert list(attended_images(media, 0, 2)) == []
    assert list(attended_images(media, 0, 9)) == [(4, 10), (3, 30)]
    assert list(attended_images(media, 8, 9)) == [(1, 30)]


def test_encoding_reads_its_weights_once_and_computes_every_part() -> None:
    shape = ModelShape.from_spec(PLACED, 2, tied=True)
    assert shape == ModelShape.from_spec(TEXT, 2, tied=True)._replace(vision=VisionShape.from_spec(PLACED, 2))
    rows = (SeqSlice(1, (5,), 9, 1), SeqSlice(2, (1, 2, 3), 0, 0))
    text = step_work(StepPlan((), (), rows), shape, ())
    journal = (ImageEncoding(1, 2, 0, 0, 0, 1), ImageEncoding(1, 2, 0, 0, 1, 1))
    work = step_work(StepPlan((), journal, rows), shape, (), {2: (PICTURE,)})
    assert work.operations - text.operations == 2 * EYES.part_operations
    assert (work.kv_bytes, work.attention, work.encoded) == (text.kv_bytes, text.attention, 2)
    reading = CostModel(shape, NOTHING._replace(weight_byte=1.0))
    assert reading.device_seconds(work) - reading.device_seconds(text) == 2 * EYES.parameters
    computing = CostModel(shape, NOTHING._replace(operation=1.0, encoder=3.0))
    assert computing.device_seconds(work) - computing.device_seconds(text) == 3 * (work.operations - text.operations)
    alone = step_work(StepPlan((), journal[:1], ()), shape, (), {2: (PICTURE,)})
    assert reading.device_seconds(alone) == 2 * EYES.parameters, "no text is read for it"


def test_layers_for_pictures_are_left_out_where_nobody_sees_one() -> None:
    shape = ModelShape.from_spec(CROSSED, 2, tied=True)
    assert shape.vision is not None
    crossing, projecting = 16 * (2 * 16 + 3 * 8), 2 * 16 * 8
    assert (shape.vision.cross_attention_weights, shape.vision.projection_weights) == (crossing, projecting)
    assert shape.body_weights == 20_000 - 64 * 16 - crossing - projecting
    assert shape.attention == ModelShape.from_spec(replace(TEXT, layers=(SELF,)), 2, tied=True).attention
    reading = CostModel(shape, NOTHING._replace(weight_byte=1.0))
    blind, before = SeqSlice(1, (5,), 9, 1), SeqSlice(2, (5,), 2, 1)
    text = step_work(StepPlan((), (), (blind, before)), shape, (), {2: (PICTURE,)})
    assert reading.device_seconds(text) == shape.weight_bytes
    work = step_work(StepPlan((), (), (blind, before._replace(start=3))), shape, (), {2: (PICTURE,)})
    assert reading.device_seconds(work) - reading.device_seconds(text) == 2 * crossing
    assert work.operations - text.operations == 2 * crossing * 2
    assert work.kv_bytes - text.kv_bytes == shape.attention[0].token_bytes + 20 * CROSS.token_bytes(2)


def test_rows_are_projected_once_and_prompts_attend_to_them() -> None:
    shape = ModelShape.from_spec(CROSSED, 2, tied=True)
    assert shape.vision is not None
    rows = (SeqSlice(2, (1, 2, 3, 4, 5), 0, 0),)
    plans = [StepPlan((), (ImageEncoding(1, 2, 0, 0, first, 1),), rows) for first in (0, 1)]
    first, last = (step_work(plan, shape, (), {2: (PICTURE,)}) for plan in plans)
    assert last.operations - first.operations == 2 * shape.vision.projection_weights * 20
    alone = step_work(StepPlan((), (), rows), shape, ())
    assert first.attention - alone.attention == 2 * 20 * 4 * 2 * 8  # two tokens see it


def test_weights_in_fp8_are_read_as_such_for_pictures_too() -> None:
    weights = 20_000 - 64 * 16
    plain, fp8 = (ModelShape.from_spec(CROSSED, 2, True, saved) for saved in (0, weights // 2))
    assert plain.vision is not None
    assert fp8.vision is not None
    assert fp8.vision.text_itemsize == 1.5
    others = plain.vision.cross_attention_weights + plain.vision.projection_weights
    assert plain.weight_bytes - fp8.weight_bytes == (weights - others) // 2


@pytest.mark.parametrize(("mode", "runs"), [("pages", 1), ("inside", 1), ("off", 3)])
def test_requests_with_pictures_are_served_and_take_longer_where_each_chunk_encodes(mode: str, runs: int) -> None:
    config = EngineConfig.of(
        page_size=4, max_num_seqs=2, max_num_batched_tokens=8, swap_gib=0, vision_cache=mode,
        enable_prefix_caching=False,
    )  # fmt: skip
    cost = CostModel(ModelShape.from_spec(PLACED, 2, True), NOTHING._replace(operation=1e-6))
    simulation = Simulation(config, PLACED, cost, 256)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    media = (ImageItem(KEYS[0], 2, 20, 20, 1),)
    outcome = simulation.run([TraceRequest(0.0, [9] * 26, params, media)])
    assert outcome.totals.finished
    assert simulation.engine.scheduler.memory.account().sharing.encoder_runs == runs
    tokens = 26 + 4 - 1
    text = 2.0 * ((20_000 - 64 * 16) * tokens + 64 * 16 * 4)
    assert outcome.totals.seconds == pytest.approx(1e-6 * (text + runs * EYES.part_operations))
