"""Samplers of a rank that computes the logits of its part of the vocabulary, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import Exchange, gather_logits
from quire.layers.sharding import shard_vocab
from quire.worker.pending_samples import PendingSamples, SamplingBatch
from quire.worker.sampler import Sampler
from quire.worker.sampling_kernels import Epilogue, TritonSampling, needs_truncation
from quire.worker.vocab_parallel_sampling import VocabParallelSampling

if TYPE_CHECKING:
    from quire.kernels.triton.vocab_parallel_sampling import RowMax

MAX_GATHERED_ROWS = 16  # random rows whose logits are gathered: three exchanges would take longer


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
            logits, self._params[batch.slots], batch.sample_to_row, self._uniforms(batch)
        )
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
        params = self._params[batch.slots]
        uniforms = self._uniforms(batch) if (params[:, 0] > 0).any() else np.zeros(len(batch.sample_to_row))
        tokens, faults = self.vocab_parallel.draw_local(
            logits, params, batch.sample_to_row, uniforms, batch.slots, last_sampled
        )
        return self._pack(logits, None, tokens, faults, batch)


class VocabParallelTritonSampling(TritonSampling):
    """A TritonSampling whose epilogues and `draw_local` take this rank's logits, padded to the same width on all ranks;
    `draw` takes full logits. A rank sends 8 bytes a row if all are greedy, 20 if some are random, 3,860 if some have
    top_k or top_p. Of up to MAX_GATHERED_ROWS random rows all logits are gathered."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Exchange) -> None:
        from quire.kernels.triton import vocab_parallel_sampling

        super().__init__(vocab_size, device)
        self.exchange, self.vocab_range = exchange, shard_vocab(exchange.shard, vocab_size)
        self.vocab_parallel_kernels = vocab_parallel_sampling
        self.vocab_shard = vocab_parallel_sampling.VocabShard(
            exchange.shard.tp_rank, self.vocab_range.local.start, len(self.vocab_range.local)
        )

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of all ranks."""
        return gather_logits(logits, self.vocab_range, self.exchange)

    def draw_local(
        self,
        logits: Tensor,
        params: np.ndarray,
        sample_to_row: np.ndarray,
        uniforms: np.ndarray,
        slots: np.ndarray,
        last_sampled: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Do the same as TritonSampling.draw, from this rank's logits."""
        rows, count, random = len(params), len(sample_to_row), bool((params[:, 0] > 0).any())
        if random and rows <= MAX_GATHERED_ROWS:
            return self.draw(self.gather_logits(logits), params, sample_to_row, uniforms, slots, last_sampled)
        tokens, faults = torch.empty(count + rows, dtype=torch.int64, device=self.device).split((count, rows))
        inputs = self.staging.upload_all([params, sample_to_row, uniforms, slots])
        device_params, device_rows, device_uniforms, device_slots = inputs
        if random:
            self._draw_random(
                logits, device_params, device_rows, device_uniforms, device_slots, last_sampled, tokens, faults,
                truncates=bool(needs_truncation(params).any()),
            )  # fmt: skip
        else:
            self._draw_greedy(logits, device_rows, device_slots, last_sampled, tokens, faults)
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        full_epilogues = super().epilogues(last_sampled, max_rows)
        params, uniforms = self.epilogue_inputs(max_rows)
        sample_to_row = torch.arange(max_rows, device=self.device)

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=self.device)
            self._draw_greedy(logits, sample_to_row[: len(logits)], slots, last_sampled, tokens, faults)
            return tokens, faults

        def random(name: str, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = len(logits)
            if rows <= MAX_GATHERED_ROWS:
                return full_epilogues[name](self.gather_logits(logits), slots)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=self.device)
            self._draw_random(
                logits, params, sample_to_row[:rows], uniforms[:rows], slots, last_sampled, tokens, faults,
                truncates=name == "cut",
            )  # fmt: skip
            return tokens, faults

        return {"greedy": greedy, **{name: partial(random, name) for name in ("random", "cut")}}

    def _draw_greedy(
        self, logits: Tensor, sample_to_row: Tensor, slots: Tensor, last_sampled: Tensor, tokens: Tensor, faults: Tensor
    ) -> RowMax:
        """Set tokens[d] to the greedy token of row sample_to_row[d]. Return the maxima of all ranks, and their ids."""
        kernels = self.vocab_parallel_kernels
        has_several = len(tokens) > len(logits)
        row_tokens = torch.empty_like(faults) if has_several else tokens
        maxima = self.exchange.all_gather(kernels.local_max(logits, self.vocab_shard, self.pdl))
        row_max: RowMax = kernels.merge_max(maxima, self.vocab_size, slots, last_sampled, row_tokens, faults, self.pdl)
        if has_several:
            tokens.copy_(row_tokens.index_select(0, sample_to_row))
        return row_max

    def _draw_random(
        self, logits: Tensor, params: Tensor, sample_to_row: Tensor, uniforms: Tensor, slots: Tensor,
        last_sampled: Tensor, tokens: Tensor, faults: Tensor, truncates: bool,
    ) -> None:  # fmt: skip
        """Do the same as kernels.triton.sampling.sample, from this rank's logits."""
        kernels, gather = self.vocab_parallel_kernels, self.exchange.all_gather
        row_max = self._draw_greedy(logits, sample_to_row, slots, last_sampled, tokens, faults)
        if truncates:
            weights = kernels.find_thresholds(logits, self.vocab_shard, params, row_max, gather, self.pdl)
        else:
            weights = kernels.weigh_tokens(logits, self.vocab_shard, params, row_max, self.pdl)
        totals = gather(weights.row_weights)
        drawn = kernels.draw_local(
            logits, self.vocab_shard, params, sample_to_row, uniforms, row_max, weights, totals, self.pdl
        )
        kernels.merge_draws(gather(drawn), self.vocab_size, sample_to_row, slots, last_sampled, tokens, self.pdl)
