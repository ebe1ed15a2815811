"""Sampling on CPU ranks of which each has the logits of its part of the vocabulary. No logits are gathered, and the
tokens equal those of quire.worker.gumbel on all logits. Ranks exchange their greatest scores and the tokens that have
them; for min_p, top_k and top_p also maxima, sums of weights and the most likely tokens.

Every rank calls the same methods in the same order with the same arguments, apart from its logits, and gets the same
results. Scores and likelihoods, relative to the maximum of all ranks, are computed element by element, so their bits
equal those of a full row; weights are integers, so sums of sums are exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import Exchange, gather_logits
from quire.layers.sharding import shard_vocab
from quire.worker.gumbel import (
    WEIGHT_SCALE,
    best_scores,
    keep_tokens,
    threshold_of_sorted,
    top_values,
    total_weight,
    truncates,
)

MAX_SENT_LIKELIHOODS = 512  # likelihoods that a rank sends of a row before a search by sums
MIN_KEY, KEY_ONE = 0x2F800000, 0x3F800000
"""The bits of 2**-32, the least likelihood with a weight, and of 1. Such bits, as integers, rise with the float."""
NUM_MARKS = 16  # keys whose sums are exchanged in a round of the search


class VocabParallelSampling:
    """Samples from logits over `vocab_size` tokens of which this rank has a part.

    A rank sends 16 bytes of a sample, and at most 3,864 of a row that has min_p, top_k or top_p.
    """

    def __init__(self, exchange: Exchange, vocab_size: int) -> None:
        self.exchange, self.vocab_size = exchange, vocab_size
        self.vocab_range = shard_vocab(exchange.shard, vocab_size)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits [R, vocab_size] of all ranks; `logits` are this rank's, padded."""
        return gather_logits(logits, self.vocab_range, self.exchange)

    def draw(
        self, logits: Tensor, params: np.ndarray, sample_to_row: np.ndarray, seeds: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [D] and faults [R] from this rank's logits, padded, params [R, 4], sample_to_row, seeds and
        positions [D]. The same as NativeSampling.draw of all logits."""
        assert logits.shape == (len(params), self.vocab_range.padded), (
            f"{tuple(logits.shape)} logits for {len(params)} rows"
        )
        local = self.vocab_range.local
        own = logits[:, : len(local)].float() if local else torch.full((len(logits), 1), -torch.inf)
        cut = np.flatnonzero(truncates(params))
        if len(cut):
            best = self._row_peaks(own.index_select(0, torch.from_numpy(cut)))
            cut, best = cut[best.isfinite().numpy()], best[best.isfinite()]  # the scores of others are not finite
            index = torch.from_numpy(cut)
            kept = keep_tokens(own.index_select(0, index), best, params[cut], self._find_threshold)
            own = own.index_copy(0, index, kept)
        scores, tokens = best_scores(own, params[:, 0], sample_to_row, seeds, positions, local.start if local else 0)
        gathered = self.exchange.all_gather(torch.stack((scores, tokens.double()), -1))
        scores, rank = gathered[..., 0].max(0)  # a NaN counts as the greatest
        faulty = ~scores.isfinite()
        tokens = gathered[..., 1].gather(0, rank[None])[0].long().masked_fill_(faulty, 0)
        faults = torch.zeros(len(params), dtype=torch.int64)
        faults[torch.from_numpy(sample_to_row)] = faulty.long()
        return tokens, faults

    def _row_peaks(self, own: Tensor) -> Tensor:
        """Return the greatest logits [R] of all ranks; NaN if one is."""
        return self.exchange.all_gather(own.amax(-1)).amax(0)

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
