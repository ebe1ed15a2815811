"""Samplers of a rank that computes the logits of its part of the vocabulary, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import Exchange, gather_logits
from quire.layers.sharding import shard_vocab
from quire.worker.gumbel import truncates
from quire.worker.pending_samples import PendingSamples, SamplingBatch
from quire.worker.sampler import Sampler
from quire.worker.sampling_kernels import Epilogue, TritonSampling
from quire.worker.vocab_parallel_sampling import VocabParallelSampling

MAX_GATHERED_ROWS = 16  # rows with min_p, top_k or top_p whose logits are gathered: ten exchanges would take longer


class VocabParallelSampler(Sampler):
    """A Sampler on a CPU whose `sample` takes this rank's part of the logits, padded to the same width on all ranks.
    All ranks get the same slots and rows, in the same order, and sample the same tokens.

    Rows that only sample are sampled by VocabParallelSampling. Logits are gathered for rows with log-probabilities,
    masks, biases, penalties or a decoding method.
    """

    def __init__(
        self, slots: int, vocab_size: int, eos_ids: tuple[int, ...], exchange: Exchange, max_rows: int = 1
    ) -> None:
        super().__init__(slots, vocab_size, torch.device("cpu"), eos_ids, max_rows)
        self.vocab_parallel = VocabParallelSampling(exchange, vocab_size)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None = None
    ) -> PendingSamples:
        batch = SamplingBatch.from_rows(rows)
        needs_gather = self._needs_processing_rows(batch)
        if not needs_gather.any():
            return self._sample_plain(logits, batch, last_sampled)
        gathered_rows, plain_rows = np.flatnonzero(needs_gather), np.flatnonzero(~needs_gather)
        full_logits = self.vocab_parallel.gather_logits(self._select(logits, gathered_rows))
        gathered = super().sample(full_logits, [rows[i] for i in gathered_rows.tolist()], last_sampled)
        if not len(plain_rows):
            return gathered
        plain_batch = SamplingBatch.from_rows([rows[i] for i in plain_rows.tolist()])
        plain = self._sample_plain(self._select(logits, plain_rows), plain_batch, last_sampled)
        return PendingSamples.merge(((gathered_rows, gathered), (plain_rows, plain)))

    def _sample_plain(self, logits: Tensor, batch: SamplingBatch, last_sampled: Tensor | None) -> PendingSamples:
        """Return the samples of rows that only sample."""
        tokens, faults = self.vocab_parallel.draw(
            logits, self._params[batch.slots], batch.sample_to_row, self._sample_seeds(batch),
            batch.positions[batch.sample_to_row],
        )  # fmt: skip
        if last_sampled is not None:
            last_sampled.index_copy_(0, torch.from_numpy(batch.slots), self._select(tokens, batch.first_sample))
        host = torch.cat((tokens, faults))
        return PendingSamples(tokens, host, None, None, batch.num_samples, self._num_logprobs[batch.slots], None)


class VocabParallelTritonSampler(Sampler):
    """A VocabParallelSampler on a GPU, by kernels; its epilogues take a rank's own logits too. If some row of a step
    needs more than sampling, the logits of all rows are gathered."""

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...], exchange: Exchange,
        max_rows: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(slots, vocab_size, device, eos_ids, max_rows)
        self._kernels = self.vocab_parallel = VocabParallelTritonSampling(vocab_size, device, exchange)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None = None
    ) -> PendingSamples:
        batch = SamplingBatch.from_rows(rows)
        if last_sampled is None or self._needs_processing_rows(batch).any():
            return super().sample(self.vocab_parallel.gather_logits(logits), rows, last_sampled)
        tokens, faults = self.vocab_parallel.draw_local(
            logits, self._params[batch.slots], batch.sample_to_row, self._sample_seeds(batch),
            batch.positions[batch.sample_to_row], batch.slots, last_sampled,
        )  # fmt: skip
        return self._pack(logits, None, tokens, faults, batch)


class VocabParallelTritonSampling(TritonSampling):
    """A TritonSampling whose epilogues and `draw_local` take this rank's logits, padded to the same width on all ranks;
    `draw` takes full logits. A rank sends 8 bytes a sample, and 3,848 more a row if some have min_p, top_k or top_p.
    Of up to MAX_GATHERED_ROWS rows of which some have, all logits are gathered."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Exchange) -> None:
        from quire.kernels.triton import vocab_parallel_sampling

        super().__init__(vocab_size, device)
        self.exchange, self.vocab_range = exchange, shard_vocab(exchange.shard, vocab_size)
        self.vocab_parallel_kernels = vocab_parallel_sampling
        self.vocab_shard = vocab_parallel_sampling.VocabShard(
            self.vocab_range.local.start if self.vocab_range.local else 0, len(self.vocab_range.local)
        )

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of all ranks."""
        return gather_logits(logits, self.vocab_range, self.exchange)

    def draw_local(
        self,
        logits: Tensor,
        params: np.ndarray,
        sample_to_row: np.ndarray,
        seeds: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        last_sampled: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Do the same as TritonSampling.draw, from this rank's logits."""
        rows, count, has_truncation = len(params), len(sample_to_row), bool(truncates(params).any())
        if has_truncation and rows <= MAX_GATHERED_ROWS:
            return self.draw(self.gather_logits(logits), params, sample_to_row, seeds, positions, slots, last_sampled)
        tokens, faults = torch.empty(count + rows, dtype=torch.int64, device=self.device).split((count, rows))
        device_params, device_rows, device_seeds, device_positions, device_slots = self.staging.upload_all(
            [params, sample_to_row, seeds, positions, slots]
        )
        self._draw_random(
            logits, device_params, device_rows, device_seeds, device_positions, device_slots, last_sampled, tokens,
            faults, has_truncation,
        )  # fmt: skip
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        full_epilogues = super().epilogues(last_sampled, max_rows)
        params, seeds, positions = self.epilogue_inputs(max_rows)
        sample_to_row, kernels = torch.arange(max_rows, device=self.device), self.vocab_parallel_kernels

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=self.device)
            maxima = self.exchange.all_gather(kernels.local_max(logits, self.vocab_shard, self.pdl))
            kernels.merge(maxima, self.vocab_size, None, slots, last_sampled, tokens, faults, self.pdl)
            return tokens, faults

        def random(name: str, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            rows, has_truncation = len(logits), name == "cut"
            if has_truncation and rows <= MAX_GATHERED_ROWS:
                return full_epilogues[name](self.gather_logits(logits), slots)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=self.device)
            self._draw_random(
                logits, params, sample_to_row[:rows], seeds, positions, slots, last_sampled, tokens, faults,
                has_truncation,
            )  # fmt: skip
            return tokens, faults

        return {"greedy": greedy, **{name: partial(random, name) for name in ("random", "cut")}}

    def _draw_random(
        self, logits: Tensor, params: Tensor, sample_to_row: Tensor, seeds: Tensor, positions: Tensor, slots: Tensor,
        last_sampled: Tensor, tokens: Tensor, faults: Tensor, has_truncation: bool,
    ) -> None:  # fmt: skip
        """Do the same as kernels.triton.sampling.sample, from this rank's logits."""
        kernels, gather = self.vocab_parallel_kernels, self.exchange.all_gather
        cut = None
        if has_truncation:
            maxima = gather(kernels.local_max(logits, self.vocab_shard, self.pdl))
            row_peaks = maxima[..., 0].view(torch.float32).amax(0)
            cut = row_peaks, kernels.find_thresholds(logits, self.vocab_shard, params, row_peaks, gather, self.pdl)
        scores = kernels.local_scores(logits, self.vocab_shard, params, sample_to_row, seeds, positions, cut, self.pdl)
        kernels.merge(gather(scores), self.vocab_size, sample_to_row, slots, last_sampled, tokens, faults, self.pdl)
