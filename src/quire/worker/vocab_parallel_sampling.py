"""Sampling on CPU ranks of which each has the logits of its part of the vocabulary. No logits are gathered, and the
tokens equal those of quire.worker.inverse_cdf on all logits. Ranks exchange maxima, sums of weights, and tokens; for
top_k and top_p also the most likely tokens.

Every rank calls the same methods in the same order with the same arguments, apart from its logits, and gets the same
results. Likelihoods are relative to the maximum of all ranks, element by element, so their bits equal those of a full
row; weights are integers, so sums of sums are exact.
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

MAX_SENT_LIKELIHOODS = 512  # likelihoods that a rank sends of a row before a search by sums
MIN_KEY, KEY_ONE = 0x2F800000, 0x3F800000
"""The bits of 2**-32, the least likelihood with a weight, and of 1. Such bits, as integers, rise with the float."""
NUM_MARKS = 16  # keys whose sums are exchanged in a round of the search


class VocabParallelSampling:
    """Samples from logits over `vocab_size` tokens of which this rank has a part.

    Of a row with one sample a rank sends 8 bytes if it is greedy, 24 if it is random without top_k and top_p, and at
    most 3,888 with them; 8 more for each further sample.
    """

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        self.exchange, self.vocab_size = exchange, vocab_size
        self.vocab_range = shard_vocab(exchange.shard, vocab_size)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits [R, vocab_size] of all ranks; `logits` are this rank's, padded."""
        return gather_logits(logits, self.vocab_range, self.exchange)

    def draw(
        self, logits: Tensor, params: np.ndarray, sample_to_row: np.ndarray, uniforms: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [D] and faults [R] from this rank's logits, padded, params [R, 4], sample_to_row and uniforms
        [D]. The same as NativeSampling.draw of all logits."""
        assert logits.shape == (len(params), self.vocab_range.padded), (
            f"{tuple(logits.shape)} logits for {len(params)} rows"
        )
        own = logits[:, : len(self.vocab_range.local)].float()
        if not len(self.vocab_range.local):  # a token that cannot be sampled
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
        """Return the maxima [R] of all ranks' logits and their lowest ids [R]. NaN counts as the greatest."""
        best, place = own.max(-1)
        ids = (place + self.vocab_range.local.start).float()  # below 2**24
        gathered = self.exchange.all_gather(torch.stack((best, ids), -1))
        best, rank = gathered[..., 0].max(0)
        return best, gathered[..., 1].gather(0, rank[None])[0].long()

    def _draw_tokens(self, weights: Tensor, sample_to_row: np.ndarray, uniforms: np.ndarray) -> Tensor:
        """Do the same as quire.worker.inverse_cdf.draw: find the token's rank by sums over ranks, then its id there."""
        block_sums, index = BlockSums(weights), torch.from_numpy(sample_to_row)
        parts = self.exchange.all_gather(block_sums.total)
        sums = parts.cumsum(0)
        goal = draw_targets(sums[-1, index], uniforms)
        rank = (sums[:, index] <= goal).sum(0, keepdim=True)
        before = (sums - parts)[:, index].gather(0, rank)[0]
        tokens = block_sums.search(index, goal - before) + self.vocab_range.local.start  # valid on that rank only
        return self.exchange.all_gather(tokens).gather(0, rank)[0]

    def _find_threshold(self, likelihood: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
        """Return the least likelihood [R] of all ranks that top_k and top_p keep. For most rows the most likely
        tokens of each rank suffice; for the others sums are searched."""
        unbounded = ((top_k == 0) & (top_p < 1)).any()
        most = MAX_SENT_LIKELIHOODS if unbounded else int(top_k.max())
        width = min(most, MAX_SENT_LIKELIHOODS, self.vocab_range.padded)
        values, num_known, weights = self._gather_top(likelihood, width)
        threshold, is_final = threshold_of_sorted(values, top_k, top_p, weights)
        rows = (~(is_final & (torch.from_numpy(top_k) <= num_known))).nonzero()[:, 0]
        if len(rows):
            index = rows.numpy()
            threshold[rows] = self._search_threshold(likelihood[rows], weights[rows], top_k[index], top_p[index])
        return threshold

    def _gather_top(self, likelihood: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gather `width` tokens of each rank. Return the greatest likelihoods of all ranks in falling order, then
        zeros; a lower bound of their number [R], which is the vocabulary's size if no other token has a weight;
        and the weights of all tokens [R]."""
        rows, own = likelihood.shape
        sent = torch.zeros(rows, width + 2)
        sent[:, : min(width, own)] = top_values(likelihood, min(width, own))
        sent[:, width:] = total_weight(likelihood)[:, None].view(torch.float32)  # the bits of a float64
        gathered = self.exchange.all_gather(sent)
        by_rank, weights = gathered[..., :width], gathered[..., width:].contiguous().view(torch.float64)
        least = by_rank[..., -1].amax(0)  # an upper bound of likelihoods that were not sent
        merged = by_rank.transpose(0, 1).reshape(rows, -1)
        values = top_values(merged.mul_(merged >= least[:, None]), merged.shape[1])
        num_known = torch.where(least * WEIGHT_SCALE < 1, self.vocab_size, (values >= least[:, None]).sum(-1))
        return values, num_known, weights.sum(0)[:, 0]

    def _search_threshold(
        self, likelihood: Tensor, total_weights: Tensor, top_k: np.ndarray, top_p: np.ndarray
    ) -> Tensor:
        """Return the threshold by exchanging only counts and sums, given the weights of all ranks' tokens."""
        values = torch.from_numpy(np.sort(likelihood.numpy(), axis=-1))
        counts = torch.arange(values.shape[1] + 1, dtype=torch.float64).expand(len(values), -1)
        sums = torch.nn.functional.pad((values * WEIGHT_SCALE).floor_().cumsum(-1, dtype=torch.float64), (1, 0))
        total, k = total_weights, torch.from_numpy(top_k)
        if (top_k > 0).any():
            kth_key = self._search_key(values, counts, k.double())
            above = torch.stack([_sums_above(values, prefix, kth_key[:, None])[:, 0] for prefix in (counts, sums)])
            count, weight = self.exchange.all_gather(above).sum(0)
            # Subtract tokens equal to the k-th, which are counted beyond k.
            top_k_weight = weight - (count - k) * (_keys_to_floats(kth_key) * WEIGHT_SCALE).floor_()
            # The minimum: if fewer than k tokens have a weight, it is that of all tokens.
            total = torch.where(k > 0, top_k_weight.minimum(total), total)
        return _keys_to_floats(self._search_key(values, sums, total * torch.from_numpy(top_p)))

    def _search_key(self, values: Tensor, sums: Tensor, goal: Tensor) -> Tensor:
        """Return the greatest key [R], the bits of a likelihood, at which the sum over all ranks from the key up
        reaches `goal` [R], or MIN_KEY. values [R, W] are this rank's likelihoods in rising order, sums [R, W + 1] their
        exclusive prefix sums. For a goal of 0 the key is undefined."""
        key = torch.full((len(values),), MIN_KEY)
        steps, step = torch.arange(1, NUM_MARKS + 1), KEY_ONE - MIN_KEY
        while step > 1:
            step //= NUM_MARKS
            marks = key[:, None] + steps * step
            totals = self.exchange.all_gather(_sums_above(values, sums, marks)).sum(0)
            key += (totals >= goal[:, None]).sum(-1) * step
        return key


def _sums_above(values: Tensor, sums: Tensor, keys: Tensor) -> Tensor:
    """Return this rank's sums [R, M] over likelihoods from keys [R, M] up. See VocabParallelSampling._search_key."""
    return sums[:, -1:] - sums.gather(1, torch.searchsorted(values, _keys_to_floats(keys)))


def _keys_to_floats(keys: Tensor) -> Tensor:
    """Return the likelihoods that have these bits."""
    return keys.int().view(torch.float32)
