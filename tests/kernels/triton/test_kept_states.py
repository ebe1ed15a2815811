"""Graphs keep the hidden states that a speculation head reads: of all tokens, those that the reference computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grids import DEVICE
from small_models import a_model, a_runner, pages_of
from test_mixed_steps import SLOTS, Again, with_graphs

from quire.kernels.triton import backend
from quire.models.hidden_states import HiddenStates
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import SeqSlice
from quire.worker.cuda_graphs import DecodeGraphs, GraphCapturer
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.mixed_graphs import MixedGraphs
from quire.worker.step_context import StepContext

STEPS = [
    (SeqSlice(1, (5, 6, 7, 8, 9), 0, 1), SeqSlice(2, (11, 12, 13), 0, 1)),
    (SeqSlice(1, (40,), 5, 1), SeqSlice(3, tuple(range(20, 29)), 0, 0), SeqSlice(2, (41,), 3, 1)),
    (SeqSlice(2, (42,), 4, 1), SeqSlice(1, (43,), 6, 1)),
    (SeqSlice(1, (44,), 7, 1), SeqSlice(3, (30, 31, 32), 9, 1)),
]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("layers", [(1, 0), (), (1, 1)], ids=["layers", "final", "twice"])
def test_graphs_keep_hidden_states(layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = a_model("llama-125m")
    assert len(spec.layers) == 2
    reference, runner = a_runner(model, spec, "reference", SLOTS), a_runner(model, spec, "triton", SLOTS)
    expected, kept = (HiddenStates(layers, 24, spec.hidden, torch.float32, DEVICE) for _ in range(2))
    with_graphs(runner, monkeypatch)  # for its sizes
    logits = torch.zeros((SLOTS, spec.vocab_size), device=DEVICE)
    ends = {"": lambda found, slots: logits[: len(found)].copy_(found)}
    of_runner = model, model.logits, runner.store, runner.backend, runner.sampled_tokens
    capturer: Any = GraphCapturer(DEVICE) if DEVICE.type == "cuda" else Again()
    decode = DecodeGraphs(*of_runner, runner.store.staging, SLOTS - 1, ends, capturer, hidden_states=kept)
    mixed = MixedGraphs(*of_runner, spec.hidden, [1, 2, 5, SLOTS - 1], ends, capturer, kept)
    for each in (reference, runner):
        each.store.apply_page_ops(tuple(pages_of(1, 2, 3)))
    for slices in STEPS:
        rows = SeqSlices.from_slices(slices)
        flat = FlatInputs.from_slices(rows)
        batch = build_flat_batch(flat, reference.store, reference.sampled_tokens)
        step = StepContext.from_batch(
            batch, reference.store.caches, reference.backend, sampled_only=True, hidden_states=expected
        )
        with torch.inference_mode():
            hidden = model(batch.tokens, step)
            assert len(hidden) == (len(batch.sampled_rows) if layers else len(batch.tokens))
            want = model.logits(hidden if layers else hidden[batch.logits_indices])
            if decode.can_run(rows):
                got = decode.run(rows.decode_columns, "")
            else:
                sizes = mixed.choose_sizes(rows, flat)
                assert sizes is not None
                got = mixed.run(flat, sizes, "")
        count = len(batch.tokens)
        assert expected.rows(count).shape == (count, max(len(layers), 1) * spec.hidden)
        torch.testing.assert_close(kept.rows(count), expected.rows(count), atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(got[: len(want)], want, atol=2e-4, rtol=2e-4)
        assert expected.rows(count).std() > 0.01
    assert decode.model_graphs
    assert backend.multiprocessors(DEVICE) == 9
