"""Sampling by the GPU's kernels: a step's launches, and the same as what follows the logits in a CUDA graph.

It knows rows and their numbers, not slots' parameters: those are the sampler's. See quire.data.kernels.triton.sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.data.runner.staging import Staging

Tail = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From logits [R, V] and slots [R] (0 for padding) to tokens and faults [R]; the tokens go to last[slots] too."""


def cuts(shape: np.ndarray) -> np.ndarray:
    """Which rows of shape [R, 4] (temperature, min_p, top_k, top_p) are drawn from those that top_k or top_p keep."""
    return (shape[:, 0] > 0) & ((shape[:, 2] > 0) | (shape[:, 3] < 1))


class FusedSampling:
    """Launches the kernels for logits over `vocab_size` tokens; a step's parameters and noise travel in one copy."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        from quire.data.kernels.triton import launch, sampling

        self.vocab_size, self.device, self.kernels = vocab_size, device, sampling
        self.staging = Staging(device)
        self.pdl = device.type == "cuda" and launch.early(device)
        self._inputs: Tensor | None = None  # of the tails: float64 [5, largest]

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

        The first draw of each row goes to last[slots] too, if both are given. See `kernels.triton.sampling.sample`.
        """
        rows, draws = len(shape), len(owner)
        if slots is None or last is None:
            slots, last = np.zeros(rows, dtype=np.int64), torch.empty(1, dtype=torch.int64, device=self.device)
        tokens, faults = torch.empty(draws + rows, dtype=torch.int64, device=self.device).split((draws, rows))
        if draws == rows and not (shape[:, 0] > 0).any():
            scratch = self.kernels.Scratch.of(rows, self.vocab_size, self.device, random=False)
            self.kernels.greedy(logits, self.staging.upload(slots), last, tokens, faults, scratch, self.pdl)
            return tokens, faults
        cut = bool(cuts(shape).any())
        scratch = self.kernels.Scratch.of(rows, self.vocab_size, self.device, cut=cut)
        shapes, owners, chances, places = self.staging.upload_all([shape, owner, chance, slots])
        self.kernels.sample(logits, shapes, owners, chances, places, last, tokens, faults, scratch, cut, self.pdl)
        return tokens, faults

    def tails(self, last: Tensor, largest: int) -> dict[str, Tail]:
        """What may follow the logits of up to `largest` rows of one draw each: "greedy", "random" (rows of any
        temperature and min_p, greedy ones too) and "cut" (any top_k and top_p too). `fill` before a replay of the
        latter two. Their scratch memory is allocated where they are captured, so graphs of one pool share it."""
        self._inputs = torch.zeros((5, largest), dtype=torch.float64, device=self.device)
        shapes, chances = self.inputs(largest)
        owners = torch.arange(largest, device=self.device)
        kernels, vocab, device = self.kernels, self.vocab_size, self.device

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            scratch = kernels.Scratch.of(len(logits), vocab, device, random=False)
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=device)
            kernels.greedy(logits, slots, last, tokens, faults, scratch, self.pdl)
            return tokens, faults

        def drawing(cut: bool) -> Tail:
            def tail(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
                rows = len(logits)
                scratch = kernels.Scratch.of(rows, vocab, device, cut=cut)
                tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=device)
                kernels.sample(
                    logits, shapes, owners[:rows], chances, slots, last, tokens, faults, scratch, cut, self.pdl
                )
                return tokens, faults

            return tail

        return {"greedy": greedy, "random": drawing(False), "cut": drawing(True)}

    def inputs(self, largest: int) -> tuple[Tensor, Tensor]:
        """The shapes [largest, 4] and chances [largest] that tails read, which `fill` fills."""
        assert self._inputs is not None, "there are no tails"
        return self._inputs[:4].view(largest, 4), self._inputs[4]

    def rehearse(self, rows: int, dtype: torch.dtype) -> None:
        """Sample `rows` rows of zeros in every way, so that the kernels are compiled and loaded. From any thread."""
        kernels, device = self.kernels, self.device
        logits = torch.zeros((rows, self.vocab_size), dtype=dtype, device=device)
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        shapes, chances = torch.zeros((5, rows), dtype=torch.float64, device=device).split((4, 1))
        tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=device)
        scratch = kernels.Scratch.of(rows, self.vocab_size, device)
        kernels.greedy(logits, nothing, nothing, tokens, faults, scratch, self.pdl)
        for cut in (False, True):
            kernels.sample(
                logits, shapes.view(rows, 4), nothing, chances, nothing, nothing, tokens, faults, scratch, cut, self.pdl
            )

    def fill(self, shape: np.ndarray, chance: np.ndarray) -> None:
        """What the tails read at their next replay: shape [R, 4], chance [R]; padding is greedy."""
        assert self._inputs is not None, "there are no tails"
        values = np.zeros(tuple(self._inputs.shape))
        values[:4].reshape(-1, 4)[: len(shape)] = shape
        values[4, : len(chance)] = chance
        self.staging.upload(values, self._inputs)
