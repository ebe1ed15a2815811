"""Recorded steps keep the hidden states that a speculation head reads: those of eager steps. A head computes the same
with each attention backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_draft_tokens import CONFIG, DEVICE, NATIVE, OTHER, SLOTS, VOCAB, a_model, a_runner, pages

from quire.kernels.cpu.library_loader import library
from quire.kernels.reference import ReferenceBackend
from quire.models import read_spec, resolve_model_class
from quire.models.head_config import eagle3_config, mtp_config
from quire.models.hidden_states import HiddenStates
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import SeqSlice
from quire.weights.dummy import fill_dummy_weights
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.recorded_steps import RecordedDecodeSteps
from quire.worker.step_context import StepContext

ATTENTION = ["triton"] if DEVICE.type == "cuda" else ["sdpa", pytest.param("native", marks=NATIVE)]


@NATIVE
@pytest.mark.parametrize("layers", [(1, 0), (), (1, 1)], ids=["layers", "final", "twice"])
@torch.inference_mode()
def test_recorded_steps_keep_hidden_states(layers: tuple[int, ...]) -> None:
    runner: Any = a_runner("native", False)
    expected, kept = (HiddenStates(layers, 16, 32, torch.float32, torch.device("cpu")) for _ in range(2))
    recorded = RecordedDecodeSteps(
        runner.model, runner.store, runner.backend, runner.sampled_tokens, SLOTS - 1, {}, library(), kept
    )
    runner.store.apply_page_ops(tuple(op for slot in (1, 2) for op in pages(slot, 1)))
    steps = [
        (SeqSlice(1, (5, 6, 7), 0, 1), SeqSlice(2, (8, 9), 0, 1)),
        (SeqSlice(1, (10,), 3, 1), SeqSlice(2, (11,), 2, 1)),
        (SeqSlice(2, (12,), 3, 1),),
        (SeqSlice(2, (13,), 4, 1), SeqSlice(1, (14,), 4, 1)),
    ]
    for slices in steps:
        rows = SeqSlices.from_slices(slices)
        batch = build_flat_batch(FlatInputs.from_slices(rows), runner.store, runner.sampled_tokens)
        step = StepContext.from_batch(batch, runner.store.caches, runner.backend, True, hidden_states=expected)
        hidden = runner.model(batch.tokens, step)
        want = runner.model.logits(hidden if step.query_batch is not None else hidden[batch.logits_indices])
        if not rows.is_decode_only:
            continue
        logits = recorded.run(rows.decode_columns, "") if recorded.can_run(rows) else None
        assert logits is not None, "the model is recorded with the states that it keeps"
        assert torch.equal(kept.rows(len(slices)), expected.rows(len(slices)))
        assert torch.equal(logits[: len(slices)], want)


def a_head(kind: str) -> tuple[Any, Any]:
    """A head of `a_model()`, and its spec."""
    model, spec = a_model()
    if kind == "mtp":
        config = mtp_config({**CONFIG, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}, spec)
    else:
        section = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}
        own = {**OTHER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, "eagle_config": section}
        config = eagle3_config(own, spec, None)
    head = resolve_model_class(config)(config, torch.float32, DEVICE)
    fill_dummy_weights(head, 5)
    for parameter in head.parameters():
        parameter.mul_(8)
    head.prepare(64)
    head.attach(model)
    return head, read_spec(config)


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@torch.inference_mode()
def test_a_head_computes_in_pages_what_the_reference_does(kind: str, backend: str) -> None:
    """In all steps the same rows of the same hidden states; what is not selected is not computed to the end."""
    head, spec = a_head(kind)
    runner: Any = a_runner(backend, False, (head, spec))
    store, random = runner.draft_runner.store, torch.Generator().manual_seed(1)
    plain: Any = a_runner("reference", False, (head, spec))
    for each in (runner, plain):
        each.store.apply_page_ops(tuple(op for slot in (1, 2) for op in pages(slot, 2)))
    for slices in [
        (SeqSlice(1, (5, 6, 7), 0, 0), SeqSlice(2, (8, 9), 0, 1)),
        (SeqSlice(1, (10, 11, 12, 13), 3, 1), SeqSlice(2, (11,), 2, 1)),
        (SeqSlice(2, (13,), 3, 1), SeqSlice(1, (14,), 7, 1)),
    ]:
        flat = FlatInputs.from_slices(SeqSlices.from_slices(slices))
        count = flat.token_columns.shape[1]
        states = torch.randn(count, head.config.captured_width, generator=random).to(DEVICE)
        batch = build_flat_batch(flat, plain.draft_runner.store, plain.sampled_tokens)
        step = StepContext.from_batch(batch, plain.draft_runner.store.caches, ReferenceBackend())
        head.start_pass(states)
        want = head(batch.tokens, step).clone()
        assert want.shape == (count, 32)
        batch = build_flat_batch(flat, store, runner.sampled_tokens)
        for sampled_only in (False, True):
            step = StepContext.from_batch(batch, store.caches, runner.backend, sampled_only)
            head.start_pass(states)
            got = head(batch.tokens, step)
            some = want[batch.logits_indices] if sampled_only else want
            torch.testing.assert_close(got, some, atol=1e-4, rtol=1e-4)
            logits = head.logits(got)
            assert logits.shape == (len(some), VOCAB)
            assert int(logits[0].isfinite().sum()) == (40 if kind == "eagle3" else VOCAB)
