"""What follows logits in a CUDA graph where each rank has those of its part of the vocabulary: ranks exchange what
decides (`kernels.triton.split_sampling`), or gather all logits first, where that isn't enough or takes no longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.data.layers.cut import vocabulary
from quire.data.layers.exchange import Exchange, gathered
from quire.data.runner.fused import FusedSampling, Tail

if TYPE_CHECKING:
    from quire.data.kernels.triton.split_sampling import Best

FEW = 16  # rows whose logits are gathered for draws: three exchanges take longer


class SplitFused(FusedSampling):
    """A FusedSampling whose tails are given this rank's logits [R, room], the last ranks' padded. A row that is greedy
    or drawn without top_k and top_p sends 8 or 20 bytes; others, and few rows that are drawn, have all logits gathered.
    `draw` is given whole logits."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Exchange) -> None:
        from quire.data.kernels.triton import split_sampling

        super().__init__(vocab_size, device)
        self.exchange, self.cut, self.split = exchange, vocabulary(exchange.part, vocab_size), split_sampling
        self.own = split_sampling.Own(exchange.part.rank, self.cut.own.start, len(self.cut.own))

    def whole(self, logits: Tensor) -> Tensor:
        """The logits [R, vocab_size] of which these are this rank's."""
        return gathered(logits, self.cut, self.exchange)

    def tails(self, last: Tensor, largest: int) -> dict[str, Tail]:
        """See FusedSampling.tails."""
        tails = super().tails(last, largest)
        shapes, chances = self.inputs(largest)

        def greedy(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return self._greedy(logits, slots, last)[:2]

        def random(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            if len(logits) <= FEW:
                return tails["random"](self.whole(logits), slots)
            split, gather, rows = self.split, self.exchange.gather, len(logits)
            tokens, faults, found = self._greedy(logits, slots, last)
            masses, totals = split.weigh(logits, self.own, shapes, found, self.pdl)
            drawn = split.draw(logits, self.own, shapes, chances[:rows], found, masses, gather(totals), self.pdl)
            split.tell(gather(drawn), self.vocab_size, slots, last, tokens, self.pdl)
            return tokens, faults

        def cut(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return tails["cut"](self.whole(logits), slots)

        return {"greedy": greedy, "random": random, "cut": cut}

    def _greedy(self, logits: Tensor, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Best]:
        tokens, faults = torch.empty((2, len(logits)), dtype=torch.int64, device=self.device)
        every = self.exchange.gather(self.split.best(logits, self.own, self.pdl))
        return tokens, faults, self.split.merge(every, self.vocab_size, slots, last, tokens, faults, self.pdl)
