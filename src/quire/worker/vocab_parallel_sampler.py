"""The samplers of a rank that has the logits of its own part of the vocabulary: on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import Exchange
from quire.worker.pending_samples import PendingSamples, SamplingBatch
from quire.worker.sampler import Sampler
from quire.worker.vocab_parallel_kernels import VocabParallelTritonSampling
from quire.worker.vocab_parallel_sampling import VocabParallelSampling


class VocabParallelSampler(Sampler):
    """A Sampler whose `sample` is given this rank's part [R, room] of the logits, the last ranks' padded. All ranks
    are given the same births and rows, in the same order, and draw the same tokens.

    Rows that ask for no more than a draw exchange what SplitDraws says. The logits of the others are gathered: those
    that return log-probabilities, or have masks, biases, penalties or a method.
    """

    def __init__(self, slots: int, vocab_size: int, eos_ids: tuple[int, ...], exchange: Exchange) -> None:
        super().__init__(slots, vocab_size, torch.device("cpu"), eos_ids)
        self.vocab_parallel = VocabParallelSampling(exchange, vocab_size)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None = None
    ) -> PendingSamples:
        """See Sampler.sample."""
        asked = SamplingBatch.from_rows(rows)
        more = self._needs_processing_rows(asked)
        if not more.any():
            return self._sample_plain(logits, asked, last_sampled)
        some, others = np.flatnonzero(more), np.flatnonzero(~more)
        whole = self.vocab_parallel.gather_logits(self._select(logits, some))
        apart = super().sample(whole, [rows[i] for i in some.tolist()], last_sampled)
        if not len(others):
            return apart
        rest = self._sample_plain(
            self._select(logits, others), SamplingBatch.from_rows([rows[i] for i in others.tolist()]), last_sampled
        )
        return PendingSamples.merge(((some, apart), (others, rest)))

    def _sample_plain(self, logits: Tensor, batch: SamplingBatch, last_sampled: Tensor | None) -> PendingSamples:
        """The samples of rows that ask for no more than draws."""
        tokens, faults = self.vocab_parallel.draw(
            logits, self._params[batch.slots], batch.sample_to_row, self._uniforms(batch)
        )
        if last_sampled is not None:
            last_sampled.index_copy_(0, torch.from_numpy(batch.slots), self._select(tokens, batch.first_sample))
        host = torch.cat((tokens, faults))
        return PendingSamples(tokens, host, None, None, batch.num_samples, self._num_logprobs[batch.slots], None)


class VocabParallelTritonSampler(Sampler):
    """The same on a GPU, by kernels; tails are given a rank's own logits too. Where some row of a step asks for more
    than draws the logits of all rows are gathered."""

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...], exchange: Exchange
    ) -> None:
        super().__init__(slots, vocab_size, device, eos_ids)
        self._kernels = self.vocab_parallel = VocabParallelTritonSampling(vocab_size, device, exchange)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None = None
    ) -> PendingSamples:
        """See Sampler.sample."""
        asked = SamplingBatch.from_rows(rows)
        if last_sampled is None or self._needs_processing_rows(asked).any():
            return super().sample(self.vocab_parallel.gather_logits(logits), rows, last_sampled)
        shape = self._params[asked.slots]
        chance = self._uniforms(asked) if (shape[:, 0] > 0).any() else np.zeros(len(asked.sample_to_row))
        tokens, faults = self.vocab_parallel.draw_local(
            logits, shape, asked.sample_to_row, chance, asked.slots, last_sampled
        )
        return self._pack(logits, None, tokens, faults, asked)
