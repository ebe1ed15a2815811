"""Decode steps of a pipeline stage as CUDA graphs. Hidden states of the stage before are received and copied to the
graphs' input buffer; those for the next stage are sent from the graphs' output buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import StageNeighbours
from quire.protocol.parallel_layout import Shard
from quire.worker.cuda_graphs import DecodeGraphs
from quire.worker.step_context import StepContext


class StageGraphs(DecodeGraphs):
    """Graphs of the layers of stage `shard`; `pipes` connect it to its neighbours. Only the last stage has logits and
    epilogues."""

    def __init__(
        self, shard: Shard, pipes: StageNeighbours, hidden_size: int, dtype: torch.dtype, model: Any,
        logits: Callable[[Any], Any] | None, *args: Any,
    ) -> None:  # fmt: skip
        super().__init__(self._run_layers, self._store_output if logits is None else logits, *args)
        self.shard, self.pipes, self.stage_model, self.dtype = shard, pipes, model, dtype
        shape, device = (2, self.max_rows, hidden_size), self.inputs.device  # x, and delta that is added to it
        self.received = None if shard.is_first_stage else torch.zeros(shape, dtype=dtype, device=device)
        self.output = None if shard.is_last_stage else torch.zeros(shape, dtype=dtype, device=device)
        self.has_delta: dict[tuple[int, bool], bool] = {}  # by size and has_images: the output has a delta

    def run(self, columns: np.ndarray, epilogue: str, has_images: bool = False) -> Any:
        """See DecodeGraphs; only the last stage returns a result."""
        # Capture before receiving: the run before a capture uses the input buffer too.
        count = columns.shape[1]
        size = self.ensure_captured(count, has_images)
        if self.received is not None:
            x, delta = self.pipes.receive(count, self.received.shape[2], self.dtype)
            self.received[0, :count].copy_(x)
            self.received[1, :count].zero_() if delta is None else self.received[1, :count].copy_(delta)
        self.replay(columns, size, has_images)
        if self.output is None:
            end = self.epilogue_graphs[size, has_images, epilogue]
            end.graph.replay()
            return end.result
        x, delta = self.output[:, :count].unbind()
        self.pipes.send(x, delta if self.has_delta[size, has_images] else None)
        return None

    def _run_layers(self, tokens: Tensor, step: StepContext) -> Any:
        """Run the stage's layers. Return hidden states on the last stage, else (x, delta, has_images)."""
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

    def _store_output(self, output: tuple[Tensor, Tensor | None, bool]) -> None:
        """Copy x and delta to the output buffer, in the place of computing logits."""
        x, delta, has_images = output
        assert self.output is not None, "the last stage has logits"
        self.output[0, : len(x)].copy_(x)
        if delta is not None:
            self.output[1, : len(x)].copy_(delta)
        self.has_delta[len(x), has_images] = delta is not None
