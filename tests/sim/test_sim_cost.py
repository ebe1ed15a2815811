"""Costs: a plan's work counted by hand, calibrations that are refused, and what the committed ones are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.bench.workloads import DRAWN
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.model_spec import LayerSpec, ModelSpec, StateTensor
from quire.protocol.step_plan import FIRST_DRAFT, PageCopy, SeqSlice, StepPlan, SwapIn, SwapOut, TableWrite
from quire.sim.cost_model import (
    FOLDER,
    AttentionShape,
    Coefficients,
    CostModel,
    ModelShape,
    add_padding,
    calibration_names,
    draft_passes,
    load_calibration,
    step_work,
)
from quire.startup.checkpoint import read_checkpoint

NOTHING = Coefficients(*(0.0,) * 10)
SHAPE = ModelShape(100, 10, 2, (AttentionShape(None, 8, 4), AttentionShape(3, 16, 2)))


def test_work_of_a_plan() -> None:
    rows = (SeqSlice(1, (5,), 9, 1), SeqSlice(2, (1, 2, 3, 4), 2, 0), SeqSlice(3, (7, 8), 0, 1))
    journal = (TableWrite(1, 0, 0, (1,)), PageCopy(0, 1, 2), SwapOut(1, 3, 1))
    work = step_work(StepPlan((), journal, rows, (SwapIn(0, 1, 3),)), SHAPE, (1000, 10))
    assert (work.rows, work.tokens) == (3, 7)
    assert work.operations == 2 * (100 * 7 + 10 * 2)
    assert work.kv_bytes == 10 * 8 + 3 * 16  # ten positions, of which a window of three shows three
    full = (3 + 4 + 5 + 6) + (1 + 2)  # positions 2 to 5 of one sequence, 0 and 1 of another
    near = (3 + 3 + 3 + 3) + (1 + 2)
    assert work.attention == full * 4 + near * 2
    assert (work.copied, work.swapped) == (1000, 1010)


def test_budgets_are_read_after_a_prompt_that_is_seen_whole() -> None:
    part = AttentionShape(None, 1, 1, budget=5)
    assert [part.visible_tokens(length) for length in (1, 5, 6, 100)] == [1, 5, 5, 5]
    assert part.attended_pairs(10) == 55


def test_layers_that_share_are_read_and_heads_may_differ() -> None:
    layers = (LayerSpec(1, 8), LayerSpec(1, 8, kv_source_layer=0), LayerSpec(1, 8, window=4, heads=3))
    spec = ModelSpec("made up", layers, 64, 32, 16, 2, 1, 2000)
    full, window = ModelShape.from_spec(spec, 2, tied=True).attention
    assert full == AttentionShape(None, 2 * (2 * 8 * 2), 2 * (4 * 2 * 8))
    assert window == AttentionShape(4, 2 * 8 * 2, 4 * 3 * 8)


def test_states_are_read_and_written_by_every_row() -> None:
    state = LayerSpec(0, 0, state_tensors=(StateTensor("ssm", (4, 8), 4),))
    shape = ModelShape.from_spec(
        ModelSpec("made up", (state, LayerSpec(1, 8), state), 64, 32, 16, 2, 1, 2000), 2, tied=True
    )
    assert shape.attention == (AttentionShape(None, 32, 4 * 2 * 8),)
    work = step_work(StepPlan((), (), (SeqSlice(1, (5,), 9, 1), SeqSlice(2, (1, 2, 3), 0, 0))), shape, ())
    assert work.kv_bytes == 10 * 32 + 2 * 2 * 256


def test_few_tokens_read_the_experts_that_they_take_and_many_read_all() -> None:
    """Jamba's: two of sixteen. A token takes two, a second one may take the same."""
    spec = ModelSpec("made up", (LayerSpec(1, 8),), 64, 32, 16, 2, 1, 3000, experts=16, active_experts=2,
                     expert_parameters=1600)  # fmt: skip
    shape = ModelShape.from_spec(spec, 2, tied=True)
    dense = 3000 - 1600
    assert (shape.weight_bytes, shape.weights_per_token) == (2 * 3000, dense - 64 * 16 + 200)
    assert shape.bytes_read(1) == pytest.approx(2 * (dense + 200))
    assert shape.bytes_read(2) == pytest.approx(2 * (dense + 200 + 200 * 7 / 8))
    assert shape.bytes_read(1000) == pytest.approx(2 * 3000)
    work = step_work(StepPlan((), (), (SeqSlice(1, (5,), 0, 1),)), shape, ())
    assert work.operations == 2 * (shape.weights_per_token + 64 * 16)
    reading = CostModel(shape, NOTHING._replace(weight_byte=1.0))
    assert reading.device_seconds(work) == pytest.approx(shape.bytes_read(1))


def test_cost_is_the_sum_of_its_parts() -> None:
    work = step_work(StepPlan((), (PageCopy(0, 1, 2),), (SeqSlice(1, (5,), 9, 1),)), SHAPE, (1000,))
    coefficients = Coefficients(1e-3, 1e-2, 1.0, 1.0, 1.0, 1.0, 5.0, 7.0, 0.5, 0.25)
    assert CostModel(SHAPE, coefficients).device_seconds(work) == pytest.approx(0.22 + 2.2 + 128 + 1000 + 5 + 7)
    assert CostModel(SHAPE, coefficients).host_seconds(work) == 0.75
    only_copies = step_work(StepPlan((), (PageCopy(0, 1, 2),), ()), SHAPE, (1000,))
    assert CostModel(SHAPE, coefficients).device_seconds(only_copies) == 1000


def test_reading_and_computing_overlap_and_launches_take_time() -> None:
    decode = step_work(StepPlan((), (), (SeqSlice(1, (5,), 9, 1),)), SHAPE, ())
    prompt = step_work(StepPlan((), (), (SeqSlice(1, (5, 6), 0, 1),)), SHAPE, ())
    coefficients = NOTHING._replace(weight_byte=1.0, operation=1.0)
    reading = 220
    for work in (decode, prompt):
        assert CostModel(SHAPE, coefficients).device_seconds(work) == pytest.approx(reading + work.operations)
        half = CostModel(SHAPE, coefficients._replace(overlap=2.0)).device_seconds(work)
        assert half == pytest.approx((reading**2 + work.operations**2) ** 0.5)
    launched = CostModel(SHAPE, coefficients._replace(launch=1e4))
    assert launched.device_seconds(decode) == pytest.approx(reading + decode.operations), "one graph"
    assert launched.device_seconds(prompt) == 1e4


def test_the_largest_coefficients_overflow_nothing() -> None:
    work = step_work(StepPlan((), (), (SeqSlice(1, (5,), 9, 1),)), SHAPE, ())
    most = Coefficients(*(1e6,) * 10, overlap=16.0, launch=1e6)
    huge = ModelShape(10**15, 10**15, 2, SHAPE.attention)
    assert (
        CostModel(SHAPE, most).device_seconds(work)
        < CostModel(huge, most).device_seconds(work._replace(operations=1e25))
        < 1e32
    )
    assert CostModel(SHAPE, NOTHING._replace(step=1.0, overlap=2.0)).device_seconds(work) == 1.0, (
        "neither takes any time"
    )


DRAFTS = (FIRST_DRAFT, FIRST_DRAFT - 1, FIRST_DRAFT - 2)


def test_a_verification_is_a_row_for_each_position() -> None:
    work = step_work(StepPlan((), (), (SeqSlice(1, (5,), 9, 1, (), DRAFTS), SeqSlice(2, (5,), 4, 1))), SHAPE, ())
    assert (work.rows, work.drafts, work.tokens) == (5, 3, 5)
    assert work.operations == 2 * 5 * (100 + 10)
    assert work.kv_bytes == (13 + 5) * 8 + 2 * 3 * 16, "rows of a sequence share a read"
    assert work.attention == 0
    c = NOTHING._replace(row=1.0, host_row=10.0)
    assert CostModel(SHAPE, c).device_seconds(work) == 5
    assert CostModel(SHAPE, c).host_seconds(work) == 20, "the host plans sequences"


def test_a_draft_model_makes_a_pass_for_each_token_that_it_proposes() -> None:
    draft = ModelShape(20, 5, 2, (AttentionShape(None, 2, 1),))
    slices = (SeqSlice(1, (), 10, 3), SeqSlice(2, (1, 2, 3, 4, 5), 2, 0), SeqSlice(3, (7,), 4, 2))
    rows = (SeqSlice(1, (6,), 9, 1, (), DRAFTS[:2]), SeqSlice(3, (7,), 4, 1))
    plan = StepPlan((), (), rows, draft_slices=slices)
    known, first, second, third = draft_passes(plan, draft)
    assert (known.rows, known.tokens, known.operations) == (2, 6, 2 * 20 * 6)
    assert (known.kv_bytes, known.attention) == (2 * 5, 3 + 4 + 5 + 6 + 7)
    assert (first.rows, first.operations, first.kv_bytes) == (4, 4 * 2 * 25, 2 * (11 + 12 + 13 + 6))
    assert (second.rows, second.operations, second.kv_bytes) == (2, 2 * 2 * 25, 2 * (14 + 7))
    assert (third.rows, third.operations, third.kv_bytes) == (1, 2 * 25, 2 * 15)
    cost = CostModel(SHAPE, NOTHING._replace(weight_byte=1.0, step=3.0), draft)
    assert cost.draft_seconds(plan) == 4 * (2 * 25 + 3), "every pass reads the weights"
    assert cost.draft_seconds(plan._replace(draft_slices=())) == CostModel(SHAPE, NOTHING).draft_seconds(plan) == 0
    again = cost._replace(coefficients=NOTHING._replace(operation=1.0, attention=1.0)).preemption_costs()
    assert (again.compute_token, again.compute_pair) == (2 * (100 + 20), 4 + 2 + 1)


def test_a_head_computes_the_slices_before_it_proposes() -> None:
    head = ModelShape(20, 5, 2, (AttentionShape(None, 2, 1),), reads_hidden_states=True)
    rows = (
        SeqSlice(1, (6,), 9, 1, (), DRAFTS[:2]), SeqSlice(2, (1, 2, 3, 4, 5), 2, 0), SeqSlice(3, (7,), 4, 1),
        SeqSlice(4, (7,), 30, 1),
    )  # fmt: skip
    slices = (SeqSlice(1, (), 10, 3), SeqSlice(2, (6,), 7, 0), SeqSlice(3, (), 5, 2))
    plan = StepPlan((), (), rows, draft_slices=slices)
    first, second, third = draft_passes(plan, head)
    assert (first.rows, first.tokens, first.operations) == (5, 9, 2 * (20 * 9 + 5 * 4)), "slot 4 does not draft"
    assert (first.kv_bytes, first.attention) == (2 * (12 + 5), 3 + 4 + 5 + 6 + 7)
    assert (second.rows, second.operations, second.kv_bytes) == (2, 2 * 2 * 25, 2 * (13 + 6))
    assert (third.rows, third.operations, third.kv_bytes) == (1, 2 * 25, 2 * 14)
    idle = plan._replace(slices=rows[1:], draft_slices=(slices[1], SeqSlice(3, (), 5, 0)))
    [only] = draft_passes(idle, head)
    assert (only.tokens, only.operations) == (6, 2 * 20 * 6), "it samples nothing where it proposes nothing"


def test_padding_costs_as_much_as_what_it_pads() -> None:
    work = step_work(StepPlan((), (), (SeqSlice(1, (5,), 9, 1), SeqSlice(2, (5,), 4, 1))), SHAPE, ())
    more = add_padding(work, SHAPE, 3, 2)
    assert (more.rows, more.tokens) == (4, 7)
    assert more.operations == 2 * (100 * 7 + 10 * 4)
    assert more.kv_bytes == 2 * work.kv_bytes


def test_shape_of_a_model() -> None:
    spec = read_checkpoint(EngineConfig(model_config="llama3-8b"), weights=False).spec
    shape = ModelShape.from_spec(spec, 2, tied=False)
    assert shape.weight_bytes == pytest.approx(15.01e9, rel=1e-3)  # the embedding table isn't read
    assert shape.attention == (AttentionShape(None, 131072, 4 * 32 * 128 * 32),)
    opt = read_checkpoint(EngineConfig(model_config="opt-13b"), weights=False).spec
    assert ModelShape.from_spec(opt, 2, tied=True).weight_bytes == pytest.approx(2 * opt.parameters)


@pytest.mark.parametrize("bound", [{}, {"window": 3}, {"chunk": 4}, {"chunk": 1}])
def test_what_tokens_attend_to_is_counted_as_they_see_it(bound: dict[str, int]) -> None:
    part = AttentionShape(**{"window": None, "token_bytes": 1, "pair_operations": 1, **bound})
    window, chunk = bound.get("window", 99), bound.get("chunk", 99)

    def sees(token: int, other: int) -> bool:
        return token - other < window and token // chunk == other // chunk

    for length in range(1, 20):
        assert part.visible_tokens(length) == sum(sees(length - 1, q) for q in range(length))
        assert part.attended_pairs(length) == sum(sees(p, q) for p in range(length) for q in range(p + 1))
    assert part.attended_pairs(0) == 0


def calibration(**changed: Any) -> str:
    content = json.loads((FOLDER / "h200-llama3-8b.json").read_text())
    return json.dumps({**content, **changed})


def costing(**coefficients: Any) -> str:
    return calibration(coefficients={**NOTHING._asdict(), **coefficients})


BAD = {  # what is said of a file, and what is in it
    "Expecting": "{",
    "can't decode": "\udc80",
    "recursion": "[" * 100_000,
    "not a JSON object": "[]",
    '"coefficients" must have exactly weight_byte': "{}",
    "must have exactly": calibration(coefficients={"step": 1.0}),
    "coefficient step is -1.0": costing(step=-1.0),
    "coefficient row is 1": costing(row="1"),
    "coefficient row is True": costing(row=True),
    "coefficient step is inf": costing(step=float("inf")),
    "from 0 to 1,000,000": costing(step=10**400),
    "would take no time": costing(),
    "coefficient overlap is 0.5": costing(step=1.0, overlap=0.5),
    "coefficient overlap is 99": costing(step=1.0, overlap=99),
    "\"kind\" is 'tpu'": calibration(kind="tpu"),
    '"depth" is 0, and must be from 1 to 8': calibration(depth=0),
    '"depth" is 9, and must be from 1 to 8': calibration(depth=9),
    '"memory_bytes" is 1000': calibration(memory_bytes=10**400),
    '"memory_bytes" must be of the type int': calibration(memory_bytes=2.5),
    '"kv_bytes" is 1125899906842625, and must be from 1 to ': calibration(kv_bytes=2**50 + 1),
    "half a character": calibration(device="an A100\udc80"),
    '"source" must be of the type str': calibration(source=None),
    '"error" must be of the type dict': calibration(error=[]),
    "median 'x', and it must be a number from 0": calibration(error={"median": "x"}),
    "median 'nan'": calibration(error={"median": float("nan")}),
    "not finite": calibration(error={"kinds": {"decode": float("inf")}}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_calibrations_are_refused(tmp_path: Path, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(BAD[words].encode("utf-8", "surrogateescape"))
    with pytest.raises(StartupError) as refused:
        load_calibration(str(path))
    assert words in str(refused.value)
    assert "quire bench calibrate" in str(refused.value)


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(StartupError, match=r"there is no calibration 'h100'.*a100-13b.*h200-llama3-8b"):
        load_calibration("h100")


@pytest.mark.parametrize("name", calibration_names())
def test_committed_calibrations_say_where_they_are_from(name: str) -> None:
    found = load_calibration(name)
    assert len(found.source) > 100
    if found.error is not None:
        assert found.error["median"] <= found.error["target"]


def test_the_paper_s_device_follows_from_its_numbers() -> None:
    """The host's time of a100-13b, from Figure 13's mean batches by Little's law."""
    c = load_calibration("a100-13b").coefficients
    shape = ModelShape.from_spec(
        read_checkpoint(EngineConfig(model_config="opt-13b"), weights=False).spec, 2, tied=True
    )
    assert 1 / c.weight_byte == pytest.approx(0.8 * 1.555e12, rel=1e-4)
    assert 1 / c.operation == pytest.approx(0.5 * 312e12, rel=1e-4)
    for name, rate, batch, prompt, output in (("sharegpt", 2, 30.42, 161, 338), ("alpaca", 30, 132.44, 19, 58)):
        step = batch / (rate * output)
        kinds = DRAWN[name].prompt, DRAWN[name].output
        rng = np.random.default_rng(0)
        lengths = np.stack([kind.clip(kind.draw(rng, 50_000)) for kind in kinds], axis=1)
        context = (lengths[:, 1] * (lengths[:, 0] + lengths[:, 1] / 2)).sum() / lengths[:, 1].sum()
        operations = 2 * (shape.body_weights * (batch + rate * prompt * step) + shape.head_weights * batch)
        explained = shape.weight_bytes * c.weight_byte + operations * c.operation
        explained += batch * context * shape.attention[0].token_bytes * c.kv_byte
        assert c.host_step + batch * c.host_row == pytest.approx(step - explained, rel=1e-3)


@pytest.mark.parametrize(("name", "slots"), [("a100-13b", 15_700), ("a100-66b", 9_700), ("a100-175b", 60_100)])
def test_the_paper_s_memories_hold_the_slots_of_table_1(name: str, slots: int) -> None:
    found = load_calibration(name)
    spec = read_checkpoint(EngineConfig(model_config=found.model), weights=False).spec
    assert found.kv_bytes is not None
    assert found.kv_bytes / spec.token_bytes(2) == pytest.approx(slots, rel=0.02)
