"""Sampling by the GPU's kernels: a step's launches, and the same as what follows the logits in a CUDA graph.

It knows rows and their numbers, not slots' parameters: those are the sampler's. See quire.kernels.triton.sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES
from quire.kernels.cpu.sampling import sample
from quire.worker.staging_buffer import StagingBuffer

Epilogue = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From logits [R, V] and slots [R] (0 for padding) to tokens and faults [R]; the tokens go to last[slots] too."""


def needs_truncation(params: np.ndarray) -> np.ndarray:
    """Which rows of shape [R, 4] (temperature, min_p, top_k, top_p) are drawn from those that top_k or top_p keep."""
    return (params[:, 0] > 0) & ((params[:, 2] > 0) | (params[:, 3] < 1))


class TritonSampling:
    """Launches the kernels for logits over `vocab_size` tokens; a step's parameters and noise travel in one copy."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        from quire.kernels.triton import launch, sampling

        self.vocab_size, self.device, self.kernels = vocab_size, device, sampling
        self.staging = StagingBuffer(device)
        self.pdl = device.type == "cuda" and launch.supports_pdl(device)
        self._epilogue_inputs: Tensor | None = None  # of the tails: float64 [5, largest]

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

        The first draw of each row goes to last[slots] too, if both are given. See `kernels.triton.sampling.sample`.
        """
        rows, draws = len(params), len(sample_to_row)
        if slots is None or last_sampled is None:
            slots, last_sampled = np.zeros(rows, dtype=np.int64), torch.empty(1, dtype=torch.int64, device=self.device)
        tokens, faults = torch.empty(draws + rows, dtype=torch.int64, device=self.device).split((draws, rows))
        if draws == rows and not (params[:, 0] > 0).any():
            scratch = self.kernels.SamplingScratch.allocate(rows, self.vocab_size, self.device, has_random=False)
            self.kernels.greedy(logits, self.staging.upload(slots), last_sampled, tokens, faults, scratch, self.pdl)
            return tokens, faults
        cut = bool(needs_truncation(params).any())
        scratch = self.kernels.SamplingScratch.allocate(rows, self.vocab_size, self.device, has_truncation=cut)
        shapes, owners, chances, places = self.staging.upload_all([params, sample_to_row, uniforms, slots])
        self.kernels.sample(
            logits, shapes, owners, chances, places, last_sampled, tokens, faults, scratch, cut, self.pdl
        )
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        """What may follow the logits of up to `max_rows` rows of one draw each: "greedy", "random" (rows of any
        temperature and min_p, greedy ones too) and "cut" (any top_k and top_p too). `fill_epilogue` before a replay of
        the latter two. Their scratch memory is allocated where they are captured, so graphs of one pool share it."""
        self._epilogue_inputs = torch.zeros((5, max_rows), dtype=torch.float64, device=self.device)
        shapes, chances = self.epilogue_inputs(max_rows)
        owners = torch.arange(max_rows, device=self.device)
        kernels, vocab, device = self.kernels, self.vocab_size, self.device

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            scratch = kernels.SamplingScratch.allocate(len(logits), vocab, device, has_random=False)
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=device)
            kernels.greedy(logits, slots, last_sampled, tokens, faults, scratch, self.pdl)
            return tokens, faults

        def drawing(cut: bool) -> Epilogue:
            def tail(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
                rows = len(logits)
                scratch = kernels.SamplingScratch.allocate(rows, vocab, device, has_truncation=cut)
                tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=device)
                kernels.sample(
                    logits, shapes, owners[:rows], chances, slots, last_sampled, tokens, faults, scratch, cut, self.pdl
                )
                return tokens, faults

            return tail

        return {"greedy": greedy, "random": drawing(False), "cut": drawing(True)}

    def epilogue_inputs(self, max_rows: int) -> tuple[Tensor, Tensor]:
        """The shapes [largest, 4] and chances [largest] that tails read, which `fill_epilogue` fills."""
        assert self._epilogue_inputs is not None, "there are no tails"
        return self._epilogue_inputs[:4].view(max_rows, 4), self._epilogue_inputs[4]

    def warmup(self, rows: int, dtype: torch.dtype) -> None:
        """Sample `rows` rows of zeros in every way, so that the kernels are compiled and loaded. From any thread."""
        kernels, device = self.kernels, self.device
        logits = torch.zeros((rows, self.vocab_size), dtype=dtype, device=device)
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        shapes, chances = torch.zeros((5, rows), dtype=torch.float64, device=device).split((4, 1))
        tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=device)
        scratch = kernels.SamplingScratch.allocate(rows, self.vocab_size, device)
        kernels.greedy(logits, nothing, nothing, tokens, faults, scratch, self.pdl)
        for cut in (False, True):
            kernels.sample(
                logits, shapes.view(rows, 4), nothing, chances, nothing, nothing, tokens, faults, scratch, cut, self.pdl
            )

    def fill_epilogue(self, params: np.ndarray, uniforms: np.ndarray) -> None:
        """What the tails read at their next replay: shape [R, 4], chance [R]; padding is greedy."""
        assert self._epilogue_inputs is not None, "there are no tails"
        values = np.zeros(tuple(self._epilogue_inputs.shape))
        values[:4].reshape(-1, 4)[: len(params)] = params
        values[4, : len(uniforms)] = uniforms
        self.staging.upload(values, self._epilogue_inputs)


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
