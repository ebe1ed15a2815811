"""Sampling by the GPU's kernels where each rank has the logits of its part of the vocabulary, in a CUDA graph or not:
ranks exchange what decides (`kernels.triton.split_sampling`), or gather all logits first, where that takes no longer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.data.layers.cut import vocabulary
from quire.data.layers.exchange import Exchange, gathered
from quire.data.runner.fused import FusedSampling, Tail, cuts

if TYPE_CHECKING:
    from quire.data.kernels.triton.split_sampling import Best

FEW = 16  # rows whose logits are gathered for draws: three exchanges take longer


class SplitFused(FusedSampling):
    """A FusedSampling whose tails and `draw_own` are given this rank's logits [R, room], the last ranks' padded. A row
    sends 8 bytes if all are greedy, 20 if some are drawn, 3,860 if some have top_k or top_p; of few rows that are drawn
    all logits are gathered. `draw` is given whole logits."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Exchange) -> None:
        from quire.data.kernels.triton import split_borders, split_sampling

        super().__init__(vocab_size, device)
        self.exchange, self.cut = exchange, vocabulary(exchange.part, vocab_size)
        self.split, self.borders = split_sampling, split_borders
        self.own = split_sampling.Own(exchange.part.rank, self.cut.own.start, len(self.cut.own))

    def whole(self, logits: Tensor) -> Tensor:
        """The logits [R, vocab_size] of which these are this rank's."""
        return gathered(logits, self.cut, self.exchange)

    def draw_own(
        self, logits: Tensor, shape: np.ndarray, owner: np.ndarray, chance: np.ndarray, slots: np.ndarray, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As FusedSampling.draw, of this rank's logits."""
        rows, draws, random = len(shape), len(owner), bool((shape[:, 0] > 0).any())
        if random and rows <= FEW:
            return self.draw(self.whole(logits), shape, owner, chance, slots, last)
        tokens, faults = torch.empty(draws + rows, dtype=torch.int64, device=self.device).split((draws, rows))
        shapes, owners, chances, places = self.staging.upload_all([shape, owner, chance, slots])
        if random:
            cut = bool(cuts(shape).any())
            self._random(logits, shapes, owners, chances, places, last, tokens, faults, cut=cut)
        else:
            self._greedy(logits, owners, places, last, tokens, faults)
        return tokens, faults

    def tails(self, last: Tensor, largest: int) -> dict[str, Tail]:
        """See FusedSampling.tails."""
        tails = super().tails(last, largest)
        shapes, chances = self.inputs(largest)
        owners = torch.arange(largest, device=self.device)

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=self.device)
            self._greedy(logits, owners[: len(logits)], slots, last, tokens, faults)
            return tokens, faults

        def drawing(name: str, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = len(logits)
            if rows <= FEW:
                return tails[name](self.whole(logits), slots)
            tokens, faults = torch.empty((2, rows), dtype=torch.int64, device=self.device)
            noise = owners[:rows], chances[:rows]
            self._random(logits, shapes, *noise, slots, last, tokens, faults, cut=name == "cut")
            return tokens, faults

        return {"greedy": greedy, **{name: partial(drawing, name) for name in ("random", "cut")}}

    def _greedy(
        self, logits: Tensor, owners: Tensor, slots: Tensor, last: Tensor, tokens: Tensor, faults: Tensor
    ) -> Best:
        """tokens[d] = the greedy one of row owners[d]; the peaks of all ranks, and their ids."""
        several = len(tokens) > len(logits)
        chosen = torch.empty_like(faults) if several else tokens
        every = self.exchange.gather(self.split.best(logits, self.own, self.pdl))
        found = self.split.merge(every, self.vocab_size, slots, last, chosen, faults, self.pdl)
        if several:
            tokens.copy_(chosen.index_select(0, owners))
        return found

    def _random(
        self, logits: Tensor, shapes: Tensor, owners: Tensor, chances: Tensor, slots: Tensor, last: Tensor,
        tokens: Tensor, faults: Tensor, cut: bool,
    ) -> None:  # fmt: skip
        """As kernels.triton.sampling.sample, of this rank's logits."""
        split, gather = self.split, self.exchange.gather
        found = self._greedy(logits, owners, slots, last, tokens, faults)
        if cut:
            kept = self.borders.kept(logits, self.own, shapes, found, gather, self.pdl)
        else:
            kept = split.weigh(logits, self.own, shapes, found, self.pdl)
        totals = gather(kept.totals)
        drawn = split.draw(logits, self.own, shapes, owners, chances, found, kept, totals, self.pdl)
        split.tell(gather(drawn), self.vocab_size, owners, slots, last, tokens, self.pdl)
