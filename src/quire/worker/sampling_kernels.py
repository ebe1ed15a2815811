"""Sampling by kernels, on a GPU and on a CPU: a step's launches, and epilogues of graphs and recorded steps.

Inputs are rows and their parameters; the sampler has the slots' parameters. See quire.kernels.triton.sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.rows import DTYPE_SUFFIXES
from quire.kernels.cpu.sampling import sample
from quire.worker.gumbel import truncates
from quire.worker.staging_buffer import StagingBuffer

Epilogue = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes logits [R, V] and slots [R] (0 for padding), returns tokens and faults [R], and writes tokens to
last_sampled[slots] too."""


class TritonSampling:
    """Launches Triton kernels for logits [R, vocab_size]. A step's parameters and seeds are uploaded in one copy."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        from quire.kernels.triton import launch, sampling

        self.vocab_size, self.device, self.kernels = vocab_size, device, sampling
        self.staging = StagingBuffer(device)
        self.pdl = device.type == "cuda" and launch.supports_pdl(device)
        self._epilogue_inputs: Tensor | None = None  # 8 bytes [6, max_rows]: params, seeds and positions

    def draw(
        self,
        logits: Tensor,
        params: np.ndarray,
        sample_to_row: np.ndarray,
        seeds: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray | None = None,
        last_sampled: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [D] and faults [R], in one storage, of logits [R, V], params [R, 4], and sample_to_row,
        seeds and positions [D].

        The first sample of each row is written to last_sampled[slots] too, if both are given. See
        `kernels.triton.sampling.sample`.
        """
        rows, count = len(params), len(sample_to_row)
        if slots is None or last_sampled is None:
            slots, last_sampled = np.zeros(rows, dtype=np.int64), torch.empty(1, dtype=torch.int64, device=self.device)
        tokens, faults = torch.empty(count + rows, dtype=torch.int64, device=self.device).split((count, rows))
        if count == rows and not (params[:, 0] > 0).any():
            scratch = self.kernels.SamplingScratch.allocate(rows, self.vocab_size, self.device, has_truncation=False)
            self.kernels.greedy(logits, self.staging.upload(slots), last_sampled, tokens, faults, scratch, self.pdl)
            return tokens, faults
        has_truncation = bool(truncates(params).any())
        scratch = self.kernels.SamplingScratch.allocate(rows, self.vocab_size, self.device, has_truncation, count)
        device_params, device_rows, device_seeds, device_positions, device_slots = self.staging.upload_all(
            [params, sample_to_row, seeds, positions, slots]
        )
        self.kernels.sample(
            logits, device_params, device_rows, device_seeds, device_positions, device_slots, last_sampled, tokens,
            faults, scratch, has_truncation, self.pdl,
        )  # fmt: skip
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        """Return the epilogues for up to `max_rows` rows of one sample each: "greedy", "random" (any temperature)
        and "cut" (any min_p, top_k and top_p too). Call `fill_epilogue` before a replay of the latter two. Their
        scratch memory is allocated during capture, so graphs of one pool share it."""
        self._epilogue_inputs = torch.zeros((6, max_rows), dtype=torch.int64, device=self.device)
        params, seeds, positions = self.epilogue_inputs(max_rows)
        sample_to_row = torch.arange(max_rows, device=self.device)
        kernels, vocab, device = self.kernels, self.vocab_size, self.device

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            scratch = kernels.SamplingScratch.allocate(len(logits), vocab, device, has_truncation=False)
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=device)
            kernels.greedy(logits, slots, last_sampled, tokens, faults, scratch, self.pdl)
            return tokens, faults

        def random(has_truncation: bool, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = len(logits)
            scratch = kernels.SamplingScratch.allocate(rows, vocab, device, has_truncation)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=device)
            kernels.sample(
                logits, params, sample_to_row[:rows], seeds, positions, slots, last_sampled, tokens, faults,
                scratch, has_truncation, self.pdl,
            )  # fmt: skip
            return tokens, faults

        return {"greedy": greedy, "random": partial(random, False), "cut": partial(random, True)}

    def epilogue_inputs(self, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return params [max_rows, 4], seeds and positions [max_rows], which `fill_epilogue` sets for epilogues."""
        assert self._epilogue_inputs is not None, "`epilogues` comes first"
        params, seeds, positions = self._epilogue_inputs.split((4, 1, 1))
        return params.view(torch.float64).view(max_rows, 4), seeds[0], positions[0]

    def warmup(self, rows: int, dtype: torch.dtype) -> None:
        """Sample `rows` rows of zeros by all kernels, so that they are compiled and loaded. From any thread."""
        kernels, device = self.kernels, self.device
        logits = torch.zeros((rows, self.vocab_size), dtype=dtype, device=device)
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        params = torch.zeros((rows, 4), dtype=torch.float64, device=device)
        tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=device)
        scratch = kernels.SamplingScratch.allocate(rows, self.vocab_size, device)
        kernels.greedy(logits, zeros, zeros, tokens, faults, scratch, self.pdl)
        for has_truncation in (False, True):
            kernels.sample(
                logits, params, zeros, zeros, zeros, zeros, zeros, tokens, faults, scratch, has_truncation, self.pdl
            )

    def fill_epilogue(self, params: np.ndarray, seeds: np.ndarray, positions: np.ndarray) -> None:
        """Set params [R, 4], seeds and positions [R] of the next replay; padding is greedy."""
        assert self._epilogue_inputs is not None, "`epilogues` comes first"
        values = np.zeros(tuple(self._epilogue_inputs.shape), dtype=np.int64)
        values[:4].view(np.float64).reshape(-1, 4)[: len(params)] = params
        values[4, : len(seeds)], values[5, : len(seeds)] = seeds, positions
        self.staging.upload(values, self._epilogue_inputs)


class NativeSampling:
    """Calls the native CPU kernels, with the interface of TritonSampling."""

    def __init__(self) -> None:
        self._epilogue_params = np.zeros((0, 4))  # [max_rows, 4]
        self._epilogue_noise = np.zeros((2, 0), dtype=np.int64)  # [2, max_rows]: seeds and positions
        self._num_filled = 0

    def draw(
        self,
        logits: Tensor,
        params: np.ndarray,
        sample_to_row: np.ndarray,
        seeds: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray | None = None,
        last_sampled: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, count = len(params), len(sample_to_row)
        if slots is None or last_sampled is None:
            slots, last_sampled = np.zeros(rows, dtype=np.int64), torch.empty(1, dtype=torch.int64)
        tokens, faults = torch.empty(count + rows, dtype=torch.int64).split((count, rows))
        if rows:
            logits = logits if logits.dtype in DTYPE_SUFFIXES else logits.float()
            sample(
                logits.contiguous(), torch.from_numpy(params), torch.from_numpy(sample_to_row),
                torch.from_numpy(seeds), torch.from_numpy(positions), torch.from_numpy(slots), last_sampled, tokens,
                faults,
            )  # fmt: skip
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        self._epilogue_params, self._epilogue_noise = np.zeros((max_rows, 4)), np.zeros((2, max_rows), dtype=np.int64)
        params, (seeds, positions) = torch.from_numpy(self._epilogue_params), torch.from_numpy(self._epilogue_noise)

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64)
            sample(logits, None, None, None, None, slots, last_sampled, tokens, faults)
            return tokens, faults

        def random(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64)
            sample(logits, params, None, seeds, positions, slots, last_sampled, tokens, faults)
            return tokens, faults

        return {"greedy": greedy, "random": random, "cut": random}

    def fill_epilogue(self, params: np.ndarray, seeds: np.ndarray, positions: np.ndarray) -> None:
        rows = len(params)
        self._epilogue_params[rows : self._num_filled] = 0
        self._epilogue_params[:rows], self._epilogue_noise[:, :rows], self._num_filled = (
            params,
            (seeds, positions),
            rows,
        )
