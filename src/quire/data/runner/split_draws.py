"""Draws where each rank has the logits of its own part of the vocabulary: the very tokens that quire.data.runner.draws
would draw from all of them, though no logits are gathered. Ranks exchange peaks, sums of weights, and tokens; where
top_k or top_p cut, the likeliest tokens too. On a CPU.

Every rank calls the same methods in the same order with the same arguments, its logits aside, and has the same answers.
Likelihoods are taken beside the peak of all ranks, number by number, so their bits are those of an undivided row;
weights are integers, so that sums of sums are exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.data.layers.cut import vocabulary
from quire.data.layers.exchange import Exchange, gathered
from quire.data.runner.draws import SCALE, Summed, border_among, goals, likeliest, mass, token_weights

MOST_SENT = 512  # likelihoods that a rank sends of a row, before its tokens are counted
LEAST, ONE = 0x2F800000, 0x3F800000
"""The bits of 2**-32, the least likelihood that weighs anything, and of 1: as integers they rise with the float."""
MARKS = 16  # a search asks for sums from so many places up, in each round


class SplitDraws:
    """Draws from logits over `vocab_size` tokens of which this rank has its part.

    In bytes that a rank sends of a row with one draw: 8 if it is greedy, 24 if it is drawn without top_k and top_p, and
    at most 3,888 with them; of each further draw 8.
    """

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        self.exchange, self.vocab_size = exchange, vocab_size
        self.cut = vocabulary(exchange.part, vocab_size)

    def whole(self, logits: Tensor) -> Tensor:
        """The logits [R, vocab_size] of which these are this rank's [R, room]: they are gathered."""
        return gathered(logits, self.cut, self.exchange)

    def draw(self, logits: Tensor, shape: np.ndarray, owner: np.ndarray, chance: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens [D] and faults [R] from this rank's logits [R, room], whose last may be padding, and of all rows
        shape [R, 4], owner and chance [D]: as FusedSampling.draw of whole logits."""
        assert logits.shape == (len(shape), self.cut.room), f"{tuple(logits.shape)} logits for {len(shape)} rows"
        own = logits[:, : len(self.cut.own)].float()
        if not len(self.cut.own):  # a token that no draw can meet
            own = torch.full((len(logits), 1), -torch.inf)
        best, tokens = self._peaks(own)
        faults = (~best.isfinite()).long()
        tokens = torch.where(faults == 0, tokens, 0)[torch.from_numpy(owner)]
        random = (shape[:, 0] > 0) & (faults.numpy() == 0)
        if random.any():
            rows, places = np.flatnonzero(random), np.flatnonzero(random[owner])
            if len(rows) < len(random):
                index = torch.from_numpy(rows)
                own, best = own.index_select(0, index), best.index_select(0, index)
            weights = token_weights(own, best, shape[rows], self._border)
            renumbered = (np.cumsum(random) - 1)[owner[places]]
            tokens[torch.from_numpy(places)] = self._drawn(weights, renumbered, chance[places])
        return tokens, faults

    def _peaks(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest logits of all ranks [R], and the lowest ids that have them [R]. A NaN is greater than all."""
        best, place = own.max(-1)
        ids = (place + self.cut.own.start).float()  # below 2**24
        told = self.exchange.gather(torch.stack((best, ids), -1))
        best, rank = told[..., 0].max(0)
        return best, told[..., 1].gather(0, rank[None])[0].long()

    def _drawn(self, weights: Tensor, owner: np.ndarray, chance: np.ndarray) -> Tensor:
        """As quire.data.runner.draws.draw: the sum over ranks finds whose token it is, and that rank the token."""
        summed, index = Summed(weights), torch.from_numpy(owner)
        parts = self.exchange.gather(summed.total)
        sums = parts.cumsum(0)
        goal = goals(sums[-1, index], chance)
        rank = (sums[:, index] <= goal).sum(0, keepdim=True)
        before = (sums - parts)[:, index].gather(0, rank)[0]
        found = summed.reach(index, goal - before) + self.cut.own.start  # is right on that rank
        return self.exchange.gather(found).gather(0, rank)[0]

    def _border(self, likelihood: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
        """The quire.data.runner.draws.Border of all ranks' likelihoods. Most rows are settled by the likeliest tokens
        of each rank; the tokens of the others are counted."""
        unbounded = ((top_k == 0) & (top_p < 1)).any()
        width = min(MOST_SENT if unbounded else int(top_k.max()), MOST_SENT, self.cut.room)
        values, known, everything = self._likeliest(likelihood, width)
        border, settled = border_among(values, top_k, top_p, everything)
        rows = (~(settled & (torch.from_numpy(top_k) <= known))).nonzero()[:, 0]
        if len(rows):
            some = rows.numpy()
            border[rows] = self._counted(likelihood[rows], everything[rows], top_k[some], top_p[some])
        return border

    def _likeliest(self, likelihood: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """From `width` tokens of each rank: the greatest likelihoods of all ranks in falling order, and zeros; how many
        they are at least [R], all if no others weigh anything; and what all tokens weigh [R]."""
        rows, own = likelihood.shape
        sent = torch.zeros(rows, width + 2)
        sent[:, : min(width, own)] = likeliest(likelihood, min(width, own))
        sent[:, width:] = mass(likelihood)[:, None].view(torch.float32)  # the bits of a float64
        told = self.exchange.gather(sent)
        every, masses = told[..., :width], told[..., width:].contiguous().view(torch.float64)
        least = every[..., -1].amax(0)  # what a rank didn't send is at most that
        merged = every.transpose(0, 1).reshape(rows, -1)
        values = likeliest(merged.mul_(merged >= least[:, None]), merged.shape[1])
        known = torch.where(least * SCALE < 1, self.vocab_size, (values >= least[:, None]).sum(-1))
        return values, known, masses.sum(0)[:, 0]

    def _counted(self, likelihood: Tensor, everything: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
        """The Border of likelihoods, given what all tokens of all ranks weigh, by counts and sums alone."""
        values = torch.from_numpy(np.sort(likelihood.numpy(), axis=-1))
        numbers = torch.arange(values.shape[1] + 1, dtype=torch.float64).expand(len(values), -1)
        sums = torch.nn.functional.pad((values * SCALE).floor_().cumsum(-1, dtype=torch.float64), (1, 0))
        total, k = everything, torch.from_numpy(top_k)
        if (top_k > 0).any():
            kth = self._reached(values, numbers, k.double())
            kept = torch.stack([_from(values, told, kth[:, None])[:, 0] for told in (numbers, sums)])
            count, weight = self.exchange.gather(kept).sum(0)
            first = weight - (count - k) * (_floats(kth) * SCALE).floor_()  # equal ones are kept beyond k
            total = torch.where(k > 0, first.minimum(total), total)  # fewer than k weigh anything: all of them
        return _floats(self._reached(values, sums, total * torch.from_numpy(top_p)))

    def _reached(self, values: Tensor, sums: Tensor, goal: Tensor) -> Tensor:
        """The greatest key [R], the bits of a likelihood, from which up the tokens of all ranks sum up to `goal` [R];
        LEAST if there is none. values [R, W] are this rank's likelihoods in rising order, sums [R, W + 1] from the
        first to before each. For a goal of 0 the key means nothing."""
        key = torch.full((len(values),), LEAST)
        steps, step = torch.arange(1, MARKS + 1), ONE - LEAST
        while step > 1:
            step //= MARKS
            marks = key[:, None] + steps * step
            told = self.exchange.gather(_from(values, sums, marks)).sum(0)
            key += (told >= goal[:, None]).sum(-1) * step
        return key


def _from(values: Tensor, sums: Tensor, keys: Tensor) -> Tensor:
    """The sums of this rank's tokens [R, M] from keys [R, M] up: see SplitDraws._reached."""
    return sums[:, -1:] - sums.gather(1, torch.searchsorted(values, _floats(keys)))


def _floats(keys: Tensor) -> Tensor:
    """The likelihoods of which these are the bits."""
    return keys.int().view(torch.float32)
