"""Whole steps through the kernels equal the reference: eager steps of prompts and decode rows, and the step that a CUDA
graph captures, padding included; and steps with prompts whose tokens attend both ways beside other rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from grids import DEVICE
from small_models import SMALL, a_model, a_runner, pages_of

from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.decode import decode_scratch
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice, SlotInit, StepPlan
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.model_runner import ModelRunner
from quire.worker.step_context import StepContext, make_decode_context

pytestmark = pytest.mark.xdist_group(name="triton_steps")  # they share what takes seconds to make


def plans() -> list[StepPlan]:
    """Two prompts, then one of them beside a third prompt's chunks, then all decoding."""
    params = SamplingParams(temperature=0, max_tokens=20).to_device_params()
    births = [SlotInit(slot, slot, -1, params, 0, prompt) for slot, prompt in ((1, 5), (2, 3), (3, 12))]
    rows = (
        (SeqSlice(1, (5, 6, 7, 8, 9), 0, 1), SeqSlice(2, (11, 12, 13), 0, 1)),
        (SeqSlice(1, (LAST_SAMPLED,), 5, 1), SeqSlice(3, tuple(range(20, 29)), 0, 0)),
        (SeqSlice(1, (LAST_SAMPLED,), 6, 1), SeqSlice(2, (LAST_SAMPLED,), 3, 1), SeqSlice(3, (30, 31, 32), 9, 1)),
        (SeqSlice(3, (LAST_SAMPLED,), 12, 1), SeqSlice(1, (LAST_SAMPLED,), 7, 1), SeqSlice(2, (17,), 4, 1)),
    )
    return [StepPlan(tuple(births), tuple(pages_of(1, 2, 3)), rows[0]), *(StepPlan((), (), one) for one in rows[1:])]


@pytest.fixture(scope="module", params=SMALL)
def runners(request) -> tuple[ModelRunner, ModelRunner]:
    """Having run the same steps: by the reference, and by the kernels."""
    model, spec = a_model(request.param)
    both = a_runner(model, spec, "reference"), a_runner(model, spec, "triton")
    for plan in plans():
        expected, got = ([sample.tokens for sample in r.collect(r.submit(plan)).slice_results] for r in both)
        assert got == expected
    return both


def logits(runner: ModelRunner, rows: tuple[SeqSlice, ...], backend: TritonBackend | None = None) -> torch.Tensor:
    batch = build_flat_batch(FlatInputs.from_slices(rows), runner.store, runner.sampled_tokens)
    step = StepContext.from_batch(batch, runner.store.caches, backend or runner.backend)
    with torch.inference_mode():
        return runner.model.logits(runner.model(batch.tokens, step))


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_logits_of_a_mixed_step(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """With `deterministic` one kernel computes prompts and single tokens; it equals the reference too."""
    rows = (SeqSlice(2, (40,), 5, 1), SeqSlice(3, (41, 42, 43, 44), 13, 1), SeqSlice(1, (LAST_SAMPLED,), 8, 1))
    expected = logits(runners[0], rows)
    assert expected.std() > 0.1
    for deterministic in (False, True):
        assert_near(logits(runners[1], rows, TritonBackend(deterministic=deterministic)), expected)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("splits", "deterministic", "drafts"),
    [(4, False, 3), (1, False, 0), (4, False, 1), (1, True, 3)],
    ids=["3 drafts", "no drafts", "1 draft", "deterministic"],
)
def test_rows_of_one_slot_are_steps_one_after_another(
    runners: tuple[ModelRunner, ModelRunner], splits: int, deterministic: bool, drafts: int
) -> None:
    """As draft tokens are computed: in eager steps and in those that graphs capture."""
    reference, runner = runners
    rows = tuple(SeqSlice(slot, (40 + i,), start + i, 1) for slot, start in ((1, 8), (3, 13)) for i in range(3))
    expected = torch.cat([logits(reference, (row,)) for row in rows])
    cache = runner.store.caches[0]
    columns = torch.tensor([(row.tokens[0], row.slot, row.start) for row in (*rows, SeqSlice(0, (0,), 0, 1))])
    tokens, slots, positions = columns.T.contiguous().to(DEVICE)
    backend = TritonBackend(deterministic=deterministic, max_drafts=drafts)
    assert_near(logits(runner, rows, backend), expected)
    scratch = decode_scratch(len(columns), cache.heads, cache.kv_heads, cache.head_dim, splits, DEVICE)
    context = make_decode_context(runner.store, backend, slots, positions, scratch, splits)
    with torch.inference_mode():
        assert_near(runner.model.logits(runner.model(tokens, context))[:-1], expected)


@pytest.mark.share(3)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("capped", [False, True], ids=["uncapped", "capped"])
@pytest.mark.parametrize(
    ("splits", "deterministic"), [(1, False), (4, False), (1, True)], ids=["1 split", "4 splits", "deterministic"]
)
def test_the_step_that_graphs_capture(
    runners: tuple[ModelRunner, ModelRunner], capped: bool, splits: int, deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Eager steps and captured ones launch the same: what a layer says of its attention counts in both."""
    reference, runner = runners
    rows = (SeqSlice(1, (40,), 8, 1), SeqSlice(3, (41,), 13, 1), SeqSlice(2, (42,), 5, 1))
    plain = logits(reference, rows)
    tokens, slots, positions = torch.tensor(
        [(40, 1, 8), (41, 3, 13), (42, 2, 5), (0, 0, 0)], device=DEVICE
    ).T.contiguous()
    for each in runners if capped else ():
        caches = each.store.caches.items()
        bounded = {layer: replace(cache, softcap=0.5, scale=2 * cache.scale) for layer, cache in caches}
        monkeypatch.setattr(each.store, "caches", bounded)
    expected = logits(reference, rows)
    assert ((expected - plain).abs().max() > 1e-3) == capped
    cache = runner.store.caches[0]
    backend = TritonBackend(deterministic=deterministic)
    assert_near(logits(runner, rows, backend), expected)
    scratch = decode_scratch(4, cache.heads, cache.kv_heads, cache.head_dim, splits, DEVICE)
    context = make_decode_context(runner.store, backend, slots, positions, scratch, splits)
    with torch.inference_mode():
        got = runner.model.logits(runner.model(tokens, context))
    assert got.isfinite().all(), "padding is finite"
    assert_near(got[:3], expected)


small = cache(lambda: a_model("gemma-2-2b"))


def runner_of(attention: str) -> ModelRunner:
    model, spec = small()
    runner = a_runner(model, spec, attention)
    runner.bind(replace(runner.store.kv_config, both_ways=True))
    runner.store.group_pages[0][1:].fill_(torch.nan)
    return runner


def whole_plans() -> list[StepPlan]:
    """Prompts alone, beside rows that decode, behind tokens that are there; each of their last layers is asked for the
    last token alone, and one prompt scores all of its tokens."""
    params = SamplingParams(temperature=0, max_tokens=20).to_device_params()
    births = [SlotInit(slot, slot, -1, params, 0, prompt) for slot, prompt in ((1, 9), (2, 1), (3, 12), (4, 10))]
    tables = tuple(pages_of(1, 2, 3, 4))
    return [
        StepPlan(tuple(births), tables, (SeqSlice(1, tuple(range(9)), 0, 1), SeqSlice(2, (11,), 0, 1))),
        StepPlan(
            (), (), (SeqSlice(1, (40,), 9, 1), SeqSlice(3, tuple(range(20, 32)), 0, 1), SeqSlice(2, (41, 42), 1, 1))
        ),
        StepPlan((), (), (SeqSlice(3, (43,), 12, 1), SeqSlice(1, (44,), 10, 1), SeqSlice(2, (45,), 3, 1))),
        StepPlan((), (), (SeqSlice(4, tuple(range(6)), 0, 0), SeqSlice(3, (46,), 13, 1))),
        StepPlan((), (), (SeqSlice(4, (6, 7, 8, 9), 6, 1), SeqSlice(1, (47,), 11, 1))),
    ]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_steps_equal_the_reference(attention: str) -> None:
    runners = runner_of("reference"), runner_of(attention)
    seen = []
    for plan in whole_plans():
        for runner in runners:
            logits = runner.model.logits
            runner.model.logits = lambda hidden, of=logits: seen.append(of(hidden)) or seen[-1]
            runner.collect(runner.submit(plan))
            runner.model.logits = logits
        torch.testing.assert_close(seen[-1], seen[-2], atol=2e-4, rtol=2e-4)
        assert seen[-1].std() > 0.1
    assert len(seen) == 2 * len(whole_plans())
