"""Decode steps of a stage as CUDA graphs: between what the stage before gives, which is waited for and copied to where
graphs read it, and what the stage behind gets, which is sent from where graphs leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.data.runner.graphs import DecodeGraphs
from quire.data.runner.step import Step
from quire.vocabulary.layout import Part
from quire.vocabulary.rows import Rows

if TYPE_CHECKING:
    from quire.data.runner.stages import Neighbours


class StageGraphs(DecodeGraphs):
    """Graphs of the stage of `part`, whose layers are the model's; `pipes` are its neighbours'. A stage that isn't the
    last has no logits and no tails."""

    def __init__(
        self, part: Part, pipes: Neighbours, hidden: int, dtype: torch.dtype, model: Any,
        logits: Callable[[Any], Any] | None, *args: Any,
    ) -> None:  # fmt: skip
        super().__init__(self._through, self._leave if logits is None else logits, *args)
        self.part, self.pipes, self.stage, self.dtype = part, pipes, model, dtype
        shape, device = (2, self.largest, hidden), self.inputs.device  # x, and what is to be added to it
        self.given = None if part.starts else torch.zeros(shape, dtype=dtype, device=device)
        self.left = None if part.ends else torch.zeros(shape, dtype=dtype, device=device)
        self.pairs: dict[tuple[int, bool], bool] = {}  # whether there is anything to be added, by size and sight

    def run(self, rows: Rows, tail: str, sees: bool = False) -> Any:
        """See DecodeGraphs; nothing is left by a stage that isn't the last."""
        # What is captured first runs as it is, over what comes from the stage before.
        size, count = self.captured(rows, sees), len(rows)
        if self.given is not None:
            x, delta = self.pipes.receive(count, self.given.shape[2], self.dtype)
            self.given[0, :count].copy_(x)
            self.given[1, :count].zero_() if delta is None else self.given[1, :count].copy_(delta)
        self.replay(rows, size, sees)
        if self.left is None:
            end = self.ends[size, sees, tail]
            end.graph.replay()
            return end.result
        x, delta = self.left[:, :count].unbind()
        self.pipes.send(x, delta if self.pairs[size, sees] else None)
        return None

    def _through(self, tokens: Tensor, step: Step) -> Any:
        """The stage's layers; of the last one its hidden states."""
        if self.given is None:
            x, delta = self.stage.begin(tokens, step)
        else:
            x, delta = self.stage.through(self.given[0, : len(tokens)], step, self.given[1, : len(tokens)])
        return self.stage.behind(x, delta, step) if self.left is None else (x, delta, step.crossing is not None)

    def _leave(self, found: tuple[Tensor, Tensor | None, bool]) -> None:
        x, delta, sees = found
        assert self.left is not None, "the last stage has logits"
        self.left[0, : len(x)].copy_(x)
        if delta is not None:
            self.left[1, : len(x)].copy_(delta)
        self.pairs[len(x), sees] = delta is not None
