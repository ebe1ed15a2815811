"""The samplers of a rank that has the logits of its own part of the vocabulary: on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.data.layers.exchange import Exchange
from quire.data.runner.drawn import Asked, Drawn
from quire.data.runner.sampler import Sampler
from quire.data.runner.split_draws import SplitDraws
from quire.data.runner.split_fused import SplitFused


class SplitSampler(Sampler):
    """A Sampler whose `sample` is given this rank's part [R, room] of the logits, the last ranks' padded. All ranks
    are given the same births and rows, in the same order, and draw the same tokens.

    Rows that ask for no more than a draw exchange what SplitDraws says. The logits of the others are gathered: those
    that return log-probabilities, or have masks, biases, penalties or a method.
    """

    def __init__(self, slots: int, vocab_size: int, eos_ids: tuple[int, ...], exchange: Exchange) -> None:
        super().__init__(slots, vocab_size, torch.device("cpu"), eos_ids)
        self.split = SplitDraws(exchange, vocab_size)

    def sample(self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last: Tensor | None = None) -> Drawn:
        """See Sampler.sample."""
        asked = Asked.of(rows)
        more = self._more(asked)
        if not more.any():
            return self._drawn(logits, asked, last)
        some, others = np.flatnonzero(more), np.flatnonzero(~more)
        whole = self.split.whole(self._take(logits, some))
        apart = super().sample(whole, [rows[i] for i in some.tolist()], last)
        if not len(others):
            return apart
        rest = self._drawn(self._take(logits, others), Asked.of([rows[i] for i in others.tolist()]), last)
        return Drawn.of_parts(((some, apart), (others, rest)))

    def _drawn(self, logits: Tensor, asked: Asked, last: Tensor | None) -> Drawn:
        """The samples of rows that ask for no more than draws."""
        tokens, faults = self.split.draw(logits, self._shape[asked.slots], asked.owner, self._chance(asked))
        if last is not None:
            last.index_copy_(0, torch.from_numpy(asked.slots), self._take(tokens, asked.first))
        host = torch.cat((tokens, faults))
        return Drawn(tokens, host, None, None, asked.draws, self._tops[asked.slots], None)


class FusedSplitSampler(Sampler):
    """The same on a GPU, by kernels; tails are given a rank's own logits too. Where some row of a step asks for more
    than draws the logits of all rows are gathered."""

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...], exchange: Exchange
    ) -> None:
        super().__init__(slots, vocab_size, device, eos_ids)
        self._fused = self.split = SplitFused(vocab_size, device, exchange)

    def sample(self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last: Tensor | None = None) -> Drawn:
        """See Sampler.sample."""
        asked = Asked.of(rows)
        if last is None or self._more(asked).any():
            return super().sample(self.split.whole(logits), rows, last)
        shape = self._shape[asked.slots]
        chance = self._chance(asked) if (shape[:, 0] > 0).any() else np.zeros(len(asked.owner))
        tokens, faults = self.split.draw_own(logits, shape, asked.owner, chance, asked.slots, last)
        return self._packed(logits, None, tokens, faults, asked)
