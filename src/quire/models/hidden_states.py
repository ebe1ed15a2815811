"""The hidden states that a model leaves for a speculation head (quire.models.speculation_heads)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.rows import embedding, has_kernels


class HiddenStates:
    """The hidden states of a step's tokens, in the order of the step: those before each of `layers`, or with none the
    final ones, after the last norm. A step overwrites those of the step before, in the same memory, so graphs and
    recorded steps may write and read them."""

    def __init__(
        self, layers: tuple[int, ...], max_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.states = torch.zeros((max(len(layers), 1), max_tokens, hidden), dtype=dtype, device=device)
        # A recorded step has no copies but lookups.
        self.row_ids = torch.arange(max_tokens) if has_kernels(device, dtype) else None

    @property
    def has_final(self) -> bool:
        """True if the final hidden states are kept: a step then computes those of all tokens."""
        return not self.layers

    def store_layer(self, layer: int, x: Tensor) -> None:
        """Keep the hidden states x [T, hidden] of all tokens before a layer, if they are read."""
        for i, read in enumerate(self.layers):
            if read == layer:
                self._copy(x, self.states[i, : len(x)])

    def store_final(self, x: Tensor) -> None:
        """Keep the final hidden states x [T, hidden] of all tokens, if they are read."""
        if self.has_final:
            self._copy(x, self.states[0, : len(x)])

    def rows(self, count: int) -> Tensor:
        """Return the first `count` tokens' hidden states, a head's input [count, captured_width]."""
        states = self.states[:, :count]
        return states[0] if len(states) == 1 else states.transpose(0, 1).flatten(1)

    def select(self, index: Tensor) -> Tensor:
        """Return the hidden states of the tokens at `index` [R] of the step: [R, captured_width]."""
        return self.states.index_select(1, index).transpose(0, 1).flatten(1)

    def _copy(self, x: Tensor, to: Tensor) -> None:
        if self.row_ids is None:
            to.copy_(x)
        else:
            embedding(self.row_ids[: len(x)], x, out=to)
