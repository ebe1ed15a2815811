"""Whole steps through the kernels equal the reference: eager steps of prompts and decode rows, and the step that a CUDA
graph captures, padding included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import DEVICE, SMALL, WIDTH, a_model, a_runner

from quire.data.runner.inputs import build_batch
from quire.data.runner.model_runner import ModelRunner
from quire.data.runner.step import Step
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import LAST, Birth, Row, StepPlan, Table


def plans() -> list[StepPlan]:
    """Two prompts, then one of them beside a third prompt's chunks, then all decoding."""
    params = SamplingParams(temperature=0, max_tokens=20).sampling()
    births = [Birth(slot, slot, -1, params, 0, prompt) for slot, prompt in ((1, 5), (2, 3), (3, 12))]
    tables = tuple(Table(slot, 0, 0, tuple(range(1 + slot * WIDTH, 1 + (slot + 1) * WIDTH))) for slot in (1, 2, 3))
    return [
        StepPlan(tuple(births), tables, (Row(1, (5, 6, 7, 8, 9), 0, 1), Row(2, (11, 12, 13), 0, 1)), ()),
        StepPlan((), (), (Row(1, (LAST,), 5, 1), Row(3, tuple(range(20, 29)), 0, 0)), ()),
        StepPlan((), (), (Row(1, (LAST,), 6, 1), Row(2, (LAST,), 3, 1), Row(3, (30, 31, 32), 9, 1)), ()),
        StepPlan((), (), (Row(3, (LAST,), 12, 1), Row(1, (LAST,), 7, 1), Row(2, (17,), 4, 1)), ()),
    ]


@pytest.fixture(scope="module", params=SMALL)
def runners(request) -> tuple[ModelRunner, ModelRunner]:
    """Having run the same steps: by the reference, and by the kernels."""
    model, spec = a_model(request.param)
    both = a_runner(model, spec, "reference"), a_runner(model, spec, "triton")
    for plan in plans():
        expected, got = ([sample.tokens for sample in r.collect(r.submit(plan)).samples] for r in both)
        assert got == expected
    return both


def logits(runner: ModelRunner, rows: tuple[Row, ...]) -> torch.Tensor:
    batch = build_batch(rows, runner.store, runner.last)
    with torch.inference_mode():
        return runner.model.logits(runner.model(batch.tokens, Step.of(batch, runner.store.caches, runner.backend)))


def test_logits_of_a_mixed_step(runners: tuple[ModelRunner, ModelRunner]) -> None:
    rows = (Row(2, (40,), 5, 1), Row(3, (41, 42, 43, 44), 13, 1), Row(1, (LAST,), 8, 1))
    expected, got = (logits(runner, rows) for runner in runners)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.share(3)
def test_the_step_that_graphs_capture(runners: tuple[ModelRunner, ModelRunner]) -> None:
    from quire.data.kernels.triton.attention import decode_scratch
    from quire.data.kernels.triton.backend import TritonBackend
    from quire.data.runner.step import token_step

    reference, runner = runners
    rows = (Row(1, (40,), 8, 1), Row(3, (41,), 13, 1), Row(2, (42,), 5, 1))
    expected = logits(reference, rows)
    cache = runner.store.caches[0]
    tokens, slots, positions = torch.tensor([(40, 1, 8), (41, 3, 13), (42, 2, 5), (0, 0, 0)], device=DEVICE).T
    for splits, deterministic in ((1, False), (4, False), (1, True)):
        scratch = decode_scratch(4, cache.heads, cache.kv_heads, cache.head_dim, splits, DEVICE)
        backend = TritonBackend(deterministic=deterministic)
        context = token_step(runner.store, backend, slots.contiguous(), positions.contiguous(), scratch, splits)
        with torch.inference_mode():
            got = runner.model.logits(runner.model(tokens.contiguous(), context))
        assert got.isfinite().all(), "padding is finite"
        torch.testing.assert_close(got[:3], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.share(4)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("deterministic", [False, True])
def test_caps_and_scales_hold_in_steps_of_graphs_too(
    runners: tuple[ModelRunner, ModelRunner], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager steps and captured ones launch the same: what a layer says of its attention counts in both."""
    from quire.data.kernels.triton.backend import TritonBackend
    from quire.data.runner.step import token_step

    reference, runner = runners
    rows = (Row(1, (40,), 8, 1), Row(3, (41,), 13, 1), Row(2, (42,), 5, 1))
    plain = logits(reference, rows)
    for each in runners:
        caches = each.store.caches.items()
        capped = {layer: replace(cache, softcap=0.5, scale=2 * cache.scale) for layer, cache in caches}
        monkeypatch.setattr(each.store, "caches", capped)
    expected = logits(reference, rows)
    assert (expected - plain).abs().max() > 1e-3
    backend = TritonBackend(deterministic=deterministic)
    monkeypatch.setattr(runner, "backend", backend)
    torch.testing.assert_close(logits(runner, rows), expected, atol=2e-4, rtol=2e-4)
    tokens, slots, positions = torch.tensor([(40, 1, 8), (41, 3, 13), (42, 2, 5)], device=DEVICE).T.contiguous()
    with torch.inference_mode():
        got = runner.model.logits(runner.model(tokens, token_step(runner.store, backend, slots, positions)))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_deterministic_steps(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """One kernel computes prompts and single tokens; it equals the reference too."""
    from quire.data.kernels.triton.backend import TritonBackend

    reference, runner = runners
    rows = (Row(2, (40,), 5, 1), Row(3, (41, 42, 43, 44), 13, 1), Row(1, (LAST,), 8, 1))
    batch = build_batch(rows, runner.store, runner.last)
    context = Step.of(batch, runner.store.caches, TritonBackend(deterministic=True))
    with torch.inference_mode():
        got = runner.model.logits(runner.model(batch.tokens, context))
    torch.testing.assert_close(got, logits(reference, rows), atol=2e-4, rtol=2e-4)
