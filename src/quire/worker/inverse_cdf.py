"""Sampling by inverse CDF in plain torch: noise, weights after temperature, min_p, top_k and top_p, and the token.

This defines the results of the kernels for GPUs and CPUs: given the same likelihoods, they keep and draw exactly the
same tokens. Likelihoods come from each device's exp and differ in their last bits: between devices a sample can differ
if its noise is within 1e-6 of the border between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import to_device
from quire.protocol.seeds import splitmix64

WEIGHT_SCALE = 2.0**32
"""The weight of the most likely token. Weights are integers, and at most MAX_VOCAB of them: sums are below 2**53."""

MAX_VOCAB = 2**20
SUM_BLOCK = 128  # tokens a block: the block is searched first, then the token
TOP_P_CANDIDATES = 1024  # on a CPU, top_p sorts these first and the whole row only if necessary

ThresholdFn = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]
"""Takes likelihoods [R, V], top_k [R] (0: off) and top_p [R]; returns the least likelihood [R] that both keep."""


def uniform_noise(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform float64 numbers in [0, 1), one for each (seed, position), by SplitMix64 applied twice."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    streams = splitmix64(seeds.astype(np.uint64) + golden)
    bits = splitmix64(streams + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    noise: np.ndarray = (bits >> np.uint64(11)) * 2.0**-53
    return noise


def token_weights(
    logits: Tensor, row_max: Tensor, params: np.ndarray, find_threshold_fn: ThresholdFn | None = None
) -> Tensor:
    """Return integers [R, V], in float32, proportional to the tokens' probabilities; zero for tokens that are cut.

    `row_max` [R] is the greatest logit; params [R, 4] are temperature, min_p, top_k (0: off), top_p. The most likely
    token weighs 2**32. Sums of the weights in float64 are exact, so the order of summation does not change samples.
    `find_threshold_fn` replaces `find_threshold` if the logits are only a part of the vocabulary.
    """
    likelihood = logits - row_max[:, None]  # relative to the most likely token: at most 1 after exp
    if (params[:, 0] != 1).any():
        likelihood.div_(_column(params[:, 0], likelihood))
    likelihood.exp_()
    cut = np.flatnonzero((params[:, 1:] != (0, 0, 1)).any(1))
    if len(cut) == len(params):
        truncate(likelihood, params, find_threshold_fn)
    elif len(cut):
        index = to_device(cut, logits.device)
        part = truncate(likelihood.index_select(0, index), params[cut], find_threshold_fn)
        likelihood.index_copy_(0, index, part)
    return likelihood.mul_(WEIGHT_SCALE).floor_()


def truncate(likelihood: Tensor, params: np.ndarray, find_threshold_fn: ThresholdFn | None = None) -> Tensor:
    """Zero in place the likelihoods [R, V] that min_p, then top_k, then top_p cut."""
    min_p, top_k, top_p = params[:, 1], params[:, 2].astype(np.int64), params[:, 3]
    if (min_p > 0).any():
        likelihood.mul_(likelihood >= _column(min_p, likelihood))
    if (top_k > 0).any() or (top_p < 1).any():
        likelihood.mul_(likelihood >= (find_threshold_fn or find_threshold)(likelihood, top_k, top_p)[:, None])
    return likelihood


def find_threshold(likelihood: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Find the threshold in likelihoods of a whole vocabulary. A ThresholdFn."""
    vocab, on_cpu = likelihood.shape[1], likelihood.device.type == "cpu"
    unbounded = ((top_k == 0) & (top_p < 1)).any()
    width = min(int(max(top_k.max(), (TOP_P_CANDIDATES if on_cpu else vocab) if unbounded else 0)), vocab)
    weights = total_weight(likelihood) if unbounded else None
    threshold, is_final = threshold_of_sorted(top_values(likelihood, width), top_k, top_p, weights)
    if on_cpu and not is_final.all():  # a GPU has sorted all tokens, and this test would wait for it
        rows = (~is_final).nonzero()[:, 0]
        row_weights = None if weights is None else weights[rows]
        values = top_values(likelihood[rows], vocab)
        threshold[rows] = threshold_of_sorted(values, top_k[rows.numpy()], top_p[rows.numpy()], row_weights)[0]
    return threshold


def threshold_of_sorted(
    values: Tensor, top_k: np.ndarray, top_p: np.ndarray, total_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the least likelihood [R] that top_k and then top_p keep, and whether it is final [R].

    `values` [R, width] are the greatest likelihoods in falling order; `total_weights` [R] are the weights of all
    tokens, needed for rows with top_p and no top_k. The threshold is the likelihood of the first of the k tokens at
    which the cumulative weight reaches top_p of the weight of all k. A final one does not depend on `width`.
    """
    device, width = values.device, values.shape[1]
    in_top_k = torch.arange(width, device=device) < to_device(np.where(top_k > 0, top_k, width), device)[:, None]
    sums = ((values * WEIGHT_SCALE).floor_() * in_top_k).cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    if total_weights is not None:
        total = torch.where(to_device((top_k == 0) & (top_p < 1), device), total_weights, total)
    goal = total * to_device(top_p.copy(), device)
    place = (sums < goal[:, None]).sum(-1, keepdim=True).clamp_(max=width - 1)
    threshold = values.gather(1, place)[:, 0]
    off = (top_k == 0) & (top_p == 1)
    if off.any():
        threshold = torch.where(to_device(off, device), 0.0, threshold)
    return threshold, sums[:, -1] >= goal


def total_weight(likelihood: Tensor) -> Tensor:
    """Return the sums [R] of the weights of likelihoods [R, V]."""
    return (likelihood * WEIGHT_SCALE).floor_().sum(-1, dtype=torch.float64)


def top_values(likelihood: Tensor, width: int) -> Tensor:
    """Return the `width` greatest values of each row, in falling order."""
    vocab = likelihood.shape[1]
    if likelihood.device.type != "cpu":
        return likelihood.topk(width).values if width < vocab else likelihood.sort(-1, descending=True).values
    values = likelihood.numpy()  # NumPy's vectorised sort and selection take a tenth of the time of torch's
    if width < vocab:
        values = np.partition(values, vocab - width, axis=-1)[:, vocab - width :]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def draw(weights: Tensor, sample_to_row: np.ndarray, uniforms: np.ndarray) -> Tensor:
    """Return a token for each sample [D]: the first, by id, at which the cumulative weight of its row exceeds
    uniform x total.

    weights [R, V] are integers in float32; sample_to_row [D]; uniforms [D] are in [0, 1). A token of zero weight is
    never drawn.
    """
    sums = BlockSums(weights)
    index = to_device(sample_to_row, weights.device)
    return sums.search(index, draw_targets(sums.total[index], uniforms))


def draw_targets(total: Tensor, uniforms: np.ndarray) -> Tensor:
    """Return integers [D], in float64, that cumulative weights must exceed, given the total weights of the rows [D]."""
    # uniform <= 1 - 2**-53, so that the rounded product is below the total; floor keeps it an integer
    return (total * to_device(uniforms, total.device)).floor_()


class BlockSums:
    """Cumulative weights [R, V] in two levels: over blocks, to find the block, and within it, to find the token."""

    def __init__(self, weights: Tensor) -> None:
        if weights.shape[1] % SUM_BLOCK:
            weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % SUM_BLOCK))
        self.blocks = weights.view(len(weights), -1, SUM_BLOCK)
        self.block_sums = self.blocks.sum(-1, dtype=torch.float64)
        self.prefix_sums = self.block_sums.cumsum(-1)
        self.total = self.block_sums.sum(-1)

    def search(self, sample_to_row: Tensor, goal: Tensor) -> Tensor:
        """Return the first token [D], by id, at which the cumulative weight of row sample_to_row[d] exceeds `goal` [D].
        If no sum exceeds the goal, or it is negative, return any token of the row or its padding."""
        parts, sums, goal = self.block_sums, self.prefix_sums, goal[:, None]
        if len(sample_to_row) > len(parts):
            parts, sums = parts.index_select(0, sample_to_row), sums.index_select(0, sample_to_row)
        block = torch.searchsorted(sums, goal, right=True).clamp_(max=sums.shape[1] - 1)
        goal = goal - (sums.gather(1, block) - parts.gather(1, block))
        inside = self.blocks[sample_to_row, block[:, 0]].cumsum(-1, dtype=torch.float64)
        place = torch.searchsorted(inside, goal, right=True).clamp_(max=SUM_BLOCK - 1)
        return (block * SUM_BLOCK + place)[:, 0]


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return to_device(values.astype(np.float32), like.device)[:, None]
