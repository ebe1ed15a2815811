"""Draws where each rank has the logits of its own part of the vocabulary: the very tokens that quire.worker.inverse_cdf
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

from quire.layers.exchange import Exchange, gather_logits
from quire.layers.sharding import shard_vocab
from quire.worker.inverse_cdf import (
    WEIGHT_SCALE,
    BlockSums,
    draw_targets,
    threshold_of_sorted,
    token_weights,
    top_values,
    total_weight,
)

MAX_SENT_LIKELIHOODS = 512  # likelihoods that a rank sends of a row, before its tokens are counted
MIN_KEY, KEY_ONE = 0x2F800000, 0x3F800000
"""The bits of 2**-32, the least likelihood that weighs anything, and of 1: as integers they rise with the float."""
NUM_MARKS = 16  # a search asks for sums from so many places up, in each round


class VocabParallelSampling:
    """Draws from logits over `vocab_size` tokens of which this rank has its part.

    In bytes that a rank sends of a row with one draw: 8 if it is greedy, 24 if it is drawn without top_k and top_p, and
    at most 3,888 with them; of each further draw 8.
    """

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        self.exchange, self.vocab_size = exchange, vocab_size
        self.vocab_range = shard_vocab(exchange.shard, vocab_size)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """The logits [R, vocab_size] of which these are this rank's [R, room]: they are gathered."""
        return gather_logits(logits, self.vocab_range, self.exchange)

    def draw(
        self, logits: Tensor, params: np.ndarray, sample_to_row: np.ndarray, uniforms: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Tokens [D] and faults [R] from this rank's logits [R, room], whose last may be padding, and of all rows
        shape [R, 4], owner and chance [D]: as FusedSampling.draw of whole logits."""
        assert logits.shape == (len(params), self.vocab_range.padded), (
            f"{tuple(logits.shape)} logits for {len(params)} rows"
        )
        own = logits[:, : len(self.vocab_range.local)].float()
        if not len(self.vocab_range.local):  # a token that no draw can meet
            own = torch.full((len(logits), 1), -torch.inf)
        best, tokens = self._global_max(own)
        faults = (~best.isfinite()).long()
        tokens = torch.where(faults == 0, tokens, 0)[torch.from_numpy(sample_to_row)]
        random = (params[:, 0] > 0) & (faults.numpy() == 0)
        if random.any():
            rows, places = np.flatnonzero(random), np.flatnonzero(random[sample_to_row])
            if len(rows) < len(random):
                index = torch.from_numpy(rows)
                own, best = own.index_select(0, index), best.index_select(0, index)
            weights = token_weights(own, best, params[rows], self._find_threshold)
            renumbered = (np.cumsum(random) - 1)[sample_to_row[places]]
            tokens[torch.from_numpy(places)] = self._draw_tokens(weights, renumbered, uniforms[places])
        return tokens, faults

    def _global_max(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest logits of all ranks [R], and the lowest ids that have them [R]. A NaN is greater than all."""
        best, place = own.max(-1)
        ids = (place + self.vocab_range.local.start).float()  # below 2**24
        told = self.exchange.all_gather(torch.stack((best, ids), -1))
        best, rank = told[..., 0].max(0)
        return best, told[..., 1].gather(0, rank[None])[0].long()

    def _draw_tokens(self, weights: Tensor, sample_to_row: np.ndarray, uniforms: np.ndarray) -> Tensor:
        """As quire.worker.inverse_cdf.draw: the sum over ranks finds whose token it is, and that rank the token."""
        summed, index = BlockSums(weights), torch.from_numpy(sample_to_row)
        parts = self.exchange.all_gather(summed.total)
        sums = parts.cumsum(0)
        goal = draw_targets(sums[-1, index], uniforms)
        rank = (sums[:, index] <= goal).sum(0, keepdim=True)
        before = (sums - parts)[:, index].gather(0, rank)[0]
        found = summed.search(index, goal - before) + self.vocab_range.local.start  # is right on that rank
        return self.exchange.all_gather(found).gather(0, rank)[0]

    def _find_threshold(self, likelihood: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
        """The quire.worker.inverse_cdf.Border of all ranks' likelihoods. Most rows are settled by the likeliest tokens
        of each rank; the tokens of the others are counted."""
        unbounded = ((top_k == 0) & (top_p < 1)).any()
        width = min(
            MAX_SENT_LIKELIHOODS if unbounded else int(top_k.max()), MAX_SENT_LIKELIHOODS, self.vocab_range.padded
        )
        values, known, everything = self._gather_top(likelihood, width)
        border, settled = threshold_of_sorted(values, top_k, top_p, everything)
        rows = (~(settled & (torch.from_numpy(top_k) <= known))).nonzero()[:, 0]
        if len(rows):
            some = rows.numpy()
            border[rows] = self._search_threshold(likelihood[rows], everything[rows], top_k[some], top_p[some])
        return border

    def _gather_top(self, likelihood: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """From `width` tokens of each rank: the greatest likelihoods of all ranks in falling order, and zeros; how many
        they are at least [R], all if no others weigh anything; and what all tokens weigh [R]."""
        rows, own = likelihood.shape
        sent = torch.zeros(rows, width + 2)
        sent[:, : min(width, own)] = top_values(likelihood, min(width, own))
        sent[:, width:] = total_weight(likelihood)[:, None].view(torch.float32)  # the bits of a float64
        told = self.exchange.all_gather(sent)
        every, masses = told[..., :width], told[..., width:].contiguous().view(torch.float64)
        least = every[..., -1].amax(0)  # what a rank didn't send is at most that
        merged = every.transpose(0, 1).reshape(rows, -1)
        values = top_values(merged.mul_(merged >= least[:, None]), merged.shape[1])
        known = torch.where(least * WEIGHT_SCALE < 1, self.vocab_size, (values >= least[:, None]).sum(-1))
        return values, known, masses.sum(0)[:, 0]

    def _search_threshold(
        self, likelihood: Tensor, total_weights: Tensor, top_k: np.ndarray, top_p: np.ndarray
    ) -> Tensor:
        """The Border of likelihoods, given what all tokens of all ranks weigh, by counts and sums alone."""
        values = torch.from_numpy(np.sort(likelihood.numpy(), axis=-1))
        numbers = torch.arange(values.shape[1] + 1, dtype=torch.float64).expand(len(values), -1)
        sums = torch.nn.functional.pad((values * WEIGHT_SCALE).floor_().cumsum(-1, dtype=torch.float64), (1, 0))
        total, k = total_weights, torch.from_numpy(top_k)
        if (top_k > 0).any():
            kth = self._search_key(values, numbers, k.double())
            kept = torch.stack([_sums_above(values, told, kth[:, None])[:, 0] for told in (numbers, sums)])
            count, weight = self.exchange.all_gather(kept).sum(0)
            first = (
                weight - (count - k) * (_keys_to_floats(kth) * WEIGHT_SCALE).floor_()
            )  # equal ones are kept beyond k
            total = torch.where(k > 0, first.minimum(total), total)  # fewer than k weigh anything: all of them
        return _keys_to_floats(self._search_key(values, sums, total * torch.from_numpy(top_p)))

    def _search_key(self, values: Tensor, sums: Tensor, goal: Tensor) -> Tensor:
        """The greatest key [R], the bits of a likelihood, from which up the tokens of all ranks sum up to `goal` [R];
        LEAST if there is none. values [R, W] are this rank's likelihoods in rising order, sums [R, W + 1] from the
        first to before each. For a goal of 0 the key means nothing."""
        key = torch.full((len(values),), MIN_KEY)
        steps, step = torch.arange(1, NUM_MARKS + 1), KEY_ONE - MIN_KEY
        while step > 1:
            step //= NUM_MARKS
            marks = key[:, None] + steps * step
            told = self.exchange.all_gather(_sums_above(values, sums, marks)).sum(0)
            key += (told >= goal[:, None]).sum(-1) * step
        return key


def _sums_above(values: Tensor, sums: Tensor, keys: Tensor) -> Tensor:
    """The sums of this rank's tokens [R, M] from keys [R, M] up: see SplitDraws._reached."""
    return sums[:, -1:] - sums.gather(1, torch.searchsorted(values, _keys_to_floats(keys)))


def _keys_to_floats(keys: Tensor) -> Tensor:
    """The likelihoods of which these are the bits."""
    return keys.int().view(torch.float32)
