"""The samplers of a rank that has the logits of its own part of the vocabulary: on a CPU, and on a GPU."""

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


MAX_GATHERED_ROWS = 16  # rows whose logits are gathered for draws: three exchanges take longer


class VocabParallelTritonSampling(TritonSampling):
    """A FusedSampling whose tails and `draw_local` are given this rank's logits [R, room], the last ranks' padded. A
    row sends 8 bytes if all are greedy, 20 if some are drawn, 3,860 if some have top_k or top_p; of few rows that are
    drawn all logits are gathered. `draw` is given whole logits."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Exchange) -> None:
        from quire.kernels.triton import vocab_parallel_sampling

        super().__init__(vocab_size, device)
        self.exchange, self.vocab_range = exchange, shard_vocab(exchange.shard, vocab_size)
        self.vocab_parallel_kernels, self.threshold_kernels = vocab_parallel_sampling, vocab_parallel_sampling
        self.vocab_shard = vocab_parallel_sampling.VocabShard(
            exchange.shard.tp_rank, self.vocab_range.local.start, len(self.vocab_range.local)
        )

    def gather_logits(self, logits: Tensor) -> Tensor:
        """The logits [R, vocab_size] of which these are this rank's."""
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
        """As FusedSampling.draw, of this rank's logits."""
        rows, draws, random = len(params), len(sample_to_row), bool((params[:, 0] > 0).any())
        if random and rows <= MAX_GATHERED_ROWS:
            return self.draw(self.gather_logits(logits), params, sample_to_row, uniforms, slots, last_sampled)
        tokens, faults = torch.empty(draws + rows, dtype=torch.int64, device=self.device).split((draws, rows))
        shapes, owners, chances, places = self.staging.upload_all([params, sample_to_row, uniforms, slots])
        if random:
            cut = bool(needs_truncation(params).any())
            self._draw_random(logits, shapes, owners, chances, places, last_sampled, tokens, faults, truncates=cut)
        else:
            self._draw_greedy(logits, owners, places, last_sampled, tokens, faults)
        return tokens, faults

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        """See FusedSampling.tails."""
        tails = super().epilogues(last_sampled, max_rows)
        shapes, chances = self.epilogue_inputs(max_rows)
        owners = torch.arange(max_rows, device=self.device)

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=self.device)
            self._draw_greedy(logits, owners[: len(logits)], slots, last_sampled, tokens, faults)
            return tokens, faults

        def drawing(name: str, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = len(logits)
            if rows <= MAX_GATHERED_ROWS:
                return tails[name](self.gather_logits(logits), slots)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=self.device)
            noise = owners[:rows], chances[:rows]
            self._draw_random(logits, shapes, *noise, slots, last_sampled, tokens, faults, truncates=name == "cut")
            return tokens, faults

        return {"greedy": greedy, **{name: partial(drawing, name) for name in ("random", "cut")}}

    def _draw_greedy(
        self, logits: Tensor, sample_to_row: Tensor, slots: Tensor, last_sampled: Tensor, tokens: Tensor, faults: Tensor
    ) -> RowMax:
        """tokens[d] = the greedy one of row owners[d]; the peaks of all ranks, and their ids."""
        several = len(tokens) > len(logits)
        chosen = torch.empty_like(faults) if several else tokens
        every = self.exchange.all_gather(self.vocab_parallel_kernels.local_max(logits, self.vocab_shard, self.pdl))
        found = self.vocab_parallel_kernels.merge_max(
            every, self.vocab_size, slots, last_sampled, chosen, faults, self.pdl
        )
        if several:
            tokens.copy_(chosen.index_select(0, sample_to_row))
        return found

    def _draw_random(
        self, logits: Tensor, params: Tensor, sample_to_row: Tensor, uniforms: Tensor, slots: Tensor,
        last_sampled: Tensor,
        tokens: Tensor, faults: Tensor, truncates: bool,
    ) -> None:  # fmt: skip
        """As kernels.triton.sampling.sample, of this rank's logits."""
        split, gather = self.vocab_parallel_kernels, self.exchange.all_gather
        found = self._draw_greedy(logits, sample_to_row, slots, last_sampled, tokens, faults)
        if truncates:
            kept = self.threshold_kernels.find_thresholds(logits, self.vocab_shard, params, found, gather, self.pdl)
        else:
            kept = split.weigh_tokens(logits, self.vocab_shard, params, found, self.pdl)
        totals = gather(kept.row_weights)
        drawn = split.draw_local(
            logits, self.vocab_shard, params, sample_to_row, uniforms, found, kept, totals, self.pdl
        )
        split.merge_draws(gather(drawn), self.vocab_size, sample_to_row, slots, last_sampled, tokens, self.pdl)
