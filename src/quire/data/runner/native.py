"""Sampling by a CPU's kernels: a step's operation, and the same as what follows the logits on a tape.

It knows rows and their numbers, not slots' parameters: those are the sampler's. See quire.data.kernels.cpu.sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.cpu.rows import NAMES
from quire.data.kernels.cpu.sampling import sample
from quire.data.runner.fused import Tail


class NativeSampling:
    """Samples as quire.data.runner.fused.FusedSampling does."""

    def __init__(self) -> None:
        self._shapes = np.zeros((0, 4))  # of the tails
        self._chances = np.zeros(0)
        self._filled = 0

    def draw(
        self,
        logits: Tensor,
        shape: np.ndarray,
        owner: np.ndarray,
        chance: np.ndarray,
        slots: np.ndarray | None = None,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [D] and faults [R] from logits [R, V], shape [R, 4], owner and chance [D], in one piece of memory.

        The first draw of each row goes to last[slots] too, if both are given.
        """
        rows, draws = len(shape), len(owner)
        if slots is None or last is None:
            slots, last = np.zeros(rows, dtype=np.int64), torch.empty(1, dtype=torch.int64)
        tokens, faults = torch.empty(draws + rows, dtype=torch.int64).split((draws, rows))
        if rows:
            logits = logits if logits.dtype in NAMES else logits.float()
            owners, places = torch.from_numpy(owner), torch.from_numpy(slots)
            shapes, chances = torch.from_numpy(shape), torch.from_numpy(chance)
            sample(logits.contiguous(), shapes, owners, chances, places, last, tokens, faults)
        return tokens, faults

    def tails(self, last: Tensor, largest: int) -> dict[str, Tail]:
        """What may follow the logits of up to `largest` rows of one draw each: "greedy", and "random" and "cut", of
        rows with any parameters. `fill` before a replay of the latter two."""
        self._shapes, self._chances = np.zeros((largest, 4)), np.zeros(largest)
        shapes, chances = torch.from_numpy(self._shapes), torch.from_numpy(self._chances)

        def tail(logits: Tensor, slots: Tensor, drawing: bool) -> tuple[Tensor, Tensor]:
            rows = len(logits)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64)
            drawn = (shapes, None, chances) if drawing else (None, None, None)
            sample(logits, *drawn, slots, last, tokens, faults)
            return tokens, faults

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return tail(logits, slots, False)

        def drawing(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return tail(logits, slots, True)

        return {"greedy": greedy, "random": drawing, "cut": drawing}

    def fill(self, shape: np.ndarray, chance: np.ndarray) -> None:
        """What the tails read at their next replay: shape [R, 4], chance [R]; padding is greedy."""
        rows = len(shape)
        self._shapes[rows : self._filled] = 0
        self._shapes[:rows], self._chances[:rows], self._filled = shape, chance, rows
