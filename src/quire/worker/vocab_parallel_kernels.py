"""Sampling by the GPU's kernels where each rank has the logits of its part of the vocabulary, in a CUDA graph or not:
ranks exchange what decides (`kernels.triton.split_sampling`), or gather all logits first, where that takes no longer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import Exchange, gather_logits
from quire.layers.sharding import shard_vocab
from quire.worker.sampling_kernels import Epilogue, TritonSampling, needs_truncation

if TYPE_CHECKING:
    from quire.kernels.triton.vocab_parallel_sampling import RowMax

MAX_GATHERED_ROWS = 16  # rows whose logits are gathered for draws: three exchanges take longer


class VocabParallelTritonSampling(TritonSampling):
    """A FusedSampling whose tails and `draw_local` are given this rank's logits [R, room], the last ranks' padded. A
    row
    sends 8 bytes if all are greedy, 20 if some are drawn, 3,860 if some have top_k or top_p; of few rows that are drawn
    all logits are gathered. `draw` is given whole logits."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Exchange) -> None:
        from quire.kernels.triton import vocab_parallel_borders, vocab_parallel_sampling

        super().__init__(vocab_size, device)
        self.exchange, self.vocab_range = exchange, shard_vocab(exchange.shard, vocab_size)
        self.vocab_parallel_kernels, self.threshold_kernels = vocab_parallel_sampling, vocab_parallel_borders
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
