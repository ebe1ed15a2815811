"""What pictures cost a simulated step: encoders, layers that attend to pictures, and requests that have any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config import EngineConfig
from quire.sim.cost import Coefficients, Cost, Shape, work_of
from quire.sim.sight import Sight, seen
from quire.sim.simulate import Arriving, Simulation
from quire.vocabulary.media import Medium
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Encode, Row, StepPlan
from quire.vocabulary.specs import LayerSpec, ModelSpec, VisionSpec

KEYS = [bytes([i]) * 32 for i in range(3)]
NOTHING = Coefficients(*(0.0,) * 10)
EYES = VisionSpec(16, 32, 500, part_tokens=4, part_operations=160_000)
SELF, CROSS = LayerSpec(1, 8), LayerSpec(1, 8, cross=True)
TEXT = ModelSpec("made up", (SELF, SELF), 64, 256, 16, 2, 8, 20_000)
CROSSED = replace(TEXT, layers=(SELF, CROSS), vision=EYES)
PLACED = replace(TEXT, vision=EYES)
PICTURE = Medium(KEYS[0], 3, 1, 20, 2)


def test_each_token_sees_the_latest_picture() -> None:
    media = (Medium(KEYS[0], 2, 1, 10), Medium(KEYS[1], 6, 1, 30))
    assert list(seen(media, 0, 2)) == []
    assert list(seen(media, 0, 9)) == [(4, 10), (3, 30)]
    assert list(seen(media, 8, 9)) == [(1, 30)]


def test_encoding_reads_its_weights_once_and_computes_every_part() -> None:
    shape = Shape.of(PLACED, 2, tied=True)
    assert shape == Shape.of(TEXT, 2, tied=True)._replace(sight=Sight.of(PLACED, 2))
    rows = (Row(1, (5,), 9, 1), Row(2, (1, 2, 3), 0, 0))
    text = work_of(StepPlan((), (), rows), shape, ())
    journal = (Encode(1, 2, 0, 0, 0, 1), Encode(1, 2, 0, 0, 1, 1))
    work = work_of(StepPlan((), journal, rows), shape, (), {2: (PICTURE,)})
    assert work.operations - text.operations == 2 * EYES.part_operations
    assert (work.kv_bytes, work.attention, work.encoded) == (text.kv_bytes, text.attention, 2)
    reading = Cost(shape, NOTHING._replace(weight_byte=1.0))
    assert reading.device(work) - reading.device(text) == 2 * EYES.parameters
    computing = Cost(shape, NOTHING._replace(operation=1.0, encoder=3.0))
    assert computing.device(work) - computing.device(text) == 3 * (work.operations - text.operations)
    alone = work_of(StepPlan((), journal[:1], ()), shape, (), {2: (PICTURE,)})
    assert reading.device(alone) == 2 * EYES.parameters, "no text is read for it"


def test_layers_for_pictures_are_left_out_where_nobody_sees_one() -> None:
    shape = Shape.of(CROSSED, 2, tied=True)
    assert shape.sight is not None
    crossing, projecting = 16 * (2 * 16 + 3 * 8), 2 * 16 * 8
    assert (shape.sight.crossing, shape.sight.projecting) == (crossing, projecting)
    assert shape.body == 20_000 - 64 * 16 - crossing - projecting
    assert shape.attention == Shape.of(replace(TEXT, layers=(SELF,)), 2, tied=True).attention
    reading = Cost(shape, NOTHING._replace(weight_byte=1.0))
    blind, before = Row(1, (5,), 9, 1), Row(2, (5,), 2, 1)
    text = work_of(StepPlan((), (), (blind, before)), shape, (), {2: (PICTURE,)})
    assert reading.device(text) == shape.weight_bytes
    work = work_of(StepPlan((), (), (blind, before._replace(start=3))), shape, (), {2: (PICTURE,)})
    assert reading.device(work) - reading.device(text) == 2 * crossing
    assert work.operations - text.operations == 2 * crossing * 2
    assert work.kv_bytes - text.kv_bytes == shape.attention[0].token_bytes + 20 * CROSS.token_bytes(2)


def test_rows_are_projected_once_and_prompts_attend_to_them() -> None:
    shape = Shape.of(CROSSED, 2, tied=True)
    assert shape.sight is not None
    rows = (Row(2, (1, 2, 3, 4, 5), 0, 0),)
    plans = [StepPlan((), (Encode(1, 2, 0, 0, first, 1),), rows) for first in (0, 1)]
    first, last = (work_of(plan, shape, (), {2: (PICTURE,)}) for plan in plans)
    assert last.operations - first.operations == 2 * shape.sight.projecting * 20
    alone = work_of(StepPlan((), (), rows), shape, ())
    assert first.attention - alone.attention == 2 * 20 * 4 * 2 * 8  # two tokens see it


def test_weights_in_fp8_are_read_as_such_for_pictures_too() -> None:
    weights = 20_000 - 64 * 16
    plain, fp8 = (Shape.of(CROSSED, 2, True, saved) for saved in (0, weights // 2))
    assert plain.sight is not None
    assert fp8.sight is not None
    assert fp8.sight.text_itemsize == 1.5
    others = plain.sight.crossing + plain.sight.projecting
    assert plain.weight_bytes - fp8.weight_bytes == (weights - others) // 2


@pytest.mark.parametrize(("mode", "runs"), [("pages", 1), ("inside", 1), ("off", 3)])
def test_requests_with_pictures_are_served_and_take_longer_where_each_chunk_encodes(mode: str, runs: int) -> None:
    config = EngineConfig(
        page_size=4, max_num_seqs=2, max_num_batched_tokens=8, swap_gib=0, vision_cache=mode,
        enable_prefix_caching=False,
    )  # fmt: skip
    cost = Cost(Shape.of(PLACED, 2, True), NOTHING._replace(operation=1e-6))
    simulation = Simulation(config, PLACED, cost, 256)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    media = (Medium(KEYS[0], 2, 20, 20, 1),)
    outcome = simulation.run([Arriving(0.0, [9] * 26, params, media)])
    assert outcome.totals.finished
    assert simulation.engine.scheduler.memory.account().sharing.encoder_runs == runs
    tokens = 26 + 4 - 1
    text = 2.0 * ((20_000 - 64 * 16) * tokens + 64 * 16 * 4)
    assert outcome.totals.seconds == pytest.approx(1e-6 * (text + runs * EYES.part_operations))
