"""Recorded steps keep the hidden states that a speculation head reads: those of eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_draft_tokens import SLOTS, a_runner, pages

from quire.kernels.cpu.library_loader import library
from quire.models.hidden_states import HiddenStates
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import SeqSlice
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.recorded_steps import RecordedDecodeSteps
from quire.worker.step_context import StepContext


@pytest.mark.skipif(library() is None, reason="no kernels are built")
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
