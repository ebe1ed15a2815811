"""Decode steps of a stage as CUDA graphs: between what the stage before gives, which is waited for and copied to where
graphs read it, and what the stage behind gets, which is sent from where graphs leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.protocol.parallel_layout import Shard
from quire.protocol.seq_slices import SeqSlices
from quire.worker.cuda_graphs import DecodeGraphs
from quire.worker.step_context import StepContext

if TYPE_CHECKING:
    from quire.layers.exchange import StageNeighbours


class StageGraphs(DecodeGraphs):
    """Graphs of the stage of `shard`, whose layers are the model's; `pipes` are its neighbours'. A stage that isn't the
    last has no logits and no tails."""

    def __init__(
        self, shard: Shard, pipes: StageNeighbours, hidden_size: int, dtype: torch.dtype, model: Any,
        logits: Callable[[Any], Any] | None, *args: Any,
    ) -> None:  # fmt: skip
        super().__init__(self._run_layers, self._store_output if logits is None else logits, *args)
        self.shard, self.pipes, self.stage_model, self.dtype = shard, pipes, model, dtype
        shape, device = (2, self.max_rows, hidden_size), self.inputs.device  # x, and what is to be added to it
        self.received = None if shard.is_first_stage else torch.zeros(shape, dtype=dtype, device=device)
        self.output = None if shard.is_last_stage else torch.zeros(shape, dtype=dtype, device=device)
        self.has_delta: dict[tuple[int, bool], bool] = {}  # whether there is anything to be added, by size and sight

    def run(self, slices: SeqSlices, epilogue: str, has_images: bool = False) -> Any:
        """See DecodeGraphs; nothing is left by a stage that isn't the last."""
        # What is captured first runs as it is, over what comes from the stage before.
        size, count = self.ensure_captured(slices, has_images), len(slices)
        if self.received is not None:
            x, delta = self.pipes.receive(count, self.received.shape[2], self.dtype)
            self.received[0, :count].copy_(x)
            self.received[1, :count].zero_() if delta is None else self.received[1, :count].copy_(delta)
        self.replay(slices, size, has_images)
        if self.output is None:
            end = self.epilogue_graphs[size, has_images, epilogue]
            end.graph.replay()
            return end.result
        x, delta = self.output[:, :count].unbind()
        self.pipes.send(x, delta if self.has_delta[size, has_images] else None)
        return None

    def _run_layers(self, tokens: Tensor, step: StepContext) -> Any:
        """The stage's layers; of the last one its hidden states."""
        if self.received is None:
            x, delta = self.stage_model.embed(tokens, step)
        else:
            x, delta = self.stage_model.run_layers(
                self.received[0, : len(tokens)], step, self.received[1, : len(tokens)]
            )
        return (
            self.stage_model.finish(x, delta, step)
            if self.output is None
            else (x, delta, step.cross_attention is not None)
        )

    def _store_output(self, found: tuple[Tensor, Tensor | None, bool]) -> None:
        x, delta, sees = found
        assert self.output is not None, "the last stage has logits"
        self.output[0, : len(x)].copy_(x)
        if delta is not None:
            self.output[1, : len(x)].copy_(delta)
        self.has_delta[len(x), sees] = delta is not None
