"""Sampling by a CPU's kernels: a step's operation, and the same as what follows the logits on a tape.

It knows rows and their numbers, not slots' parameters: those are the sampler's. See quire.kernels.cpu.sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES
from quire.kernels.cpu.sampling import sample
from quire.worker.sampling_kernels import Epilogue


class NativeSampling:
    """Samples as quire.worker.sampling_kernels.FusedSampling does."""

    def __init__(self) -> None:
        self._epilogue_params = np.zeros((0, 4))  # of the tails
        self._epilogue_uniforms = np.zeros(0)
        self._num_filled = 0

    def draw(
        self,
        logits: Tensor,
        params: np.ndarray,
        sample_to_row: np.ndarray,
        uniforms: np.ndarray,
        slots: np.ndarray | None = None,
        last_sampled: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [D] and faults [R] from logits [R, V], shape [R, 4], owner and chance [D], in one piece of memory.

        The first draw of each row goes to last[slots] too, if both are given.
        """
        rows, draws = len(params), len(sample_to_row)
        if slots is None or last_sampled is None:
            slots, last_sampled = np.zeros(rows, dtype=np.int64), torch.empty(1, dtype=torch.int64)
        tokens, faults = torch.empty(draws + rows, dtype=torch.int64).split((draws, rows))
        if rows:
            logits = logits if logits.dtype in DTYPE_SUFFIXES else logits.float()
            owners, places = torch.from_numpy(sample_to_row), torch.from_numpy(slots)
            shapes, chances = torch.from_numpy(params), torch.from_numpy(uniforms)
            sample(logits.contiguous(), shapes, owners, chances, places, last_sampled, tokens, faults)
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        """What may follow the logits of up to `max_rows` rows of one draw each: "greedy", and "random" and "cut", of
        rows with any parameters. `fill_epilogue` before a replay of the latter two."""
        self._epilogue_params, self._epilogue_uniforms = np.zeros((max_rows, 4)), np.zeros(max_rows)
        shapes, chances = torch.from_numpy(self._epilogue_params), torch.from_numpy(self._epilogue_uniforms)

        def tail(logits: Tensor, slots: Tensor, drawing: bool) -> tuple[Tensor, Tensor]:
            rows = len(logits)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64)
            drawn = (shapes, None, chances) if drawing else (None, None, None)
            sample(logits, *drawn, slots, last_sampled, tokens, faults)
            return tokens, faults

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return tail(logits, slots, False)

        def drawing(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return tail(logits, slots, True)

        return {"greedy": greedy, "random": drawing, "cut": drawing}

    def fill_epilogue(self, params: np.ndarray, uniforms: np.ndarray) -> None:
        """What the tails read at their next replay: shape [R, 4], chance [R]; padding is greedy."""
        rows = len(params)
        self._epilogue_params[rows : self._num_filled] = 0
        self._epilogue_params[:rows], self._epilogue_uniforms[:rows], self._num_filled = params, uniforms, rows
