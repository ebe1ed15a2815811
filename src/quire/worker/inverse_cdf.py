"""Draws in plain torch: noise, tokens' weights after temperature, min_p, top_k and top_p, and the drawn token.

This is how a CPU samples, and the definition of what quire.kernels.triton.sampling does on a GPU: given the same
likelihoods, the same tokens are kept and drawn, to the bit. Likelihoods themselves are those of each device's exp and
differ in their last bits: between devices a draw can differ, where its noise falls within 1e-6 of a token's edge.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import to_device
from quire.protocol.seeds import splitmix64

WEIGHT_SCALE = 2.0**32
"""The weight of the most likely token. Weights are integers, and at most MAX_VOCAB of them: sums below 2**53."""

MAX_VOCAB = 2**20
SUM_BLOCK = 128  # tokens whose weights are summed before the search for the drawn one
TOP_P_CANDIDATES = 1024  # tokens that top_p looks at before it sorts a whole row (on the CPU)

ThresholdFn = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]
"""From likelihoods [R, V], top_k [R] (0: off) and top_p [R]: the least likelihood [R] that both keep."""


def uniform_noise(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform float64 numbers in [0, 1), one for each (seed, position), by SplitMix64, twice."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    streams = splitmix64(seeds.astype(np.uint64) + golden)
    bits = splitmix64(streams + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)) * 2.0**-53


def token_weights(
    logits: Tensor, row_max: Tensor, params: np.ndarray, find_threshold_fn: ThresholdFn | None = None
) -> Tensor:
    """Integers [R, V], in float32, in proportion to the tokens' probabilities; tokens that are cut have zero.

    `row_max` [R] is the greatest logit; shape [R, 4] temperature, min_p, top_k (0: off), top_p. The best token weighs
    2**32. Sums of the weights in float64 are exact, so no order of summation can change what is drawn.
    `find_threshold_fn` finds what top_k and top_p keep, where these logits are not all that there are.
    """
    likelihood = logits - row_max[:, None]  # of each token beside the best one's: 1 or less, once exp is taken
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
    """Zero, in place, what min_p, then top_k, then top_p cut from likelihoods [R, V]."""
    min_p, top_k, top_p = params[:, 1], params[:, 2].astype(np.int64), params[:, 3]
    if (min_p > 0).any():
        likelihood.mul_(likelihood >= _column(min_p, likelihood))
    if (top_k > 0).any() or (top_p < 1).any():
        likelihood.mul_(likelihood >= (find_threshold_fn or find_threshold)(likelihood, top_k, top_p)[:, None])
    return likelihood


def find_threshold(likelihood: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """The Border of a whole vocabulary."""
    vocab, on_cpu = likelihood.shape[1], likelihood.device.type == "cpu"
    unbounded = ((top_k == 0) & (top_p < 1)).any()
    width = min(int(max(top_k.max(), (TOP_P_CANDIDATES if on_cpu else vocab) if unbounded else 0)), vocab)
    everything = total_weight(likelihood) if unbounded else None
    border, settled = threshold_of_sorted(top_values(likelihood, width), top_k, top_p, everything)
    if on_cpu and not settled.all():  # elsewhere to ask would be to wait, and all the tokens have been sorted
        rows = (~settled).nonzero()[:, 0]
        total = None if everything is None else everything[rows]
        values = top_values(likelihood[rows], vocab)
        border[rows] = threshold_of_sorted(values, top_k[rows.numpy()], top_p[rows.numpy()], total)[0]
    return border


def threshold_of_sorted(
    values: Tensor, top_k: np.ndarray, top_p: np.ndarray, total_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The least likelihood [R] that top_k and then top_p keep, and whether the best tokens told it [R].

    `values` [R, width] are those tokens' likelihoods, in falling order; `total_weights` [R] is what all tokens weigh,
    and is needed where a row has top_p alone. The border is that of the first token, in falling order and among the
    first k, with which the sum reaches top_p of the sum of the first k. The values of the best tokens don't depend on
    their number, so neither does the answer, once settled.
    """
    device, width = values.device, values.shape[1]
    among = torch.arange(width, device=device) < to_device(np.where(top_k > 0, top_k, width), device)[:, None]
    sums = ((values * WEIGHT_SCALE).floor_() * among).cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    if total_weights is not None:
        total = torch.where(to_device((top_k == 0) & (top_p < 1), device), total_weights, total)
    goal = total * to_device(top_p.copy(), device)
    place = (sums < goal[:, None]).sum(-1, keepdim=True).clamp_(max=width - 1)
    border = values.gather(1, place)[:, 0]
    off = (top_k == 0) & (top_p == 1)
    if off.any():
        border = torch.where(to_device(off, device), 0.0, border)
    return border, sums[:, -1] >= goal


def total_weight(likelihood: Tensor) -> Tensor:
    """What the tokens of likelihoods [R, V] weigh together [R]."""
    return (likelihood * WEIGHT_SCALE).floor_().sum(-1, dtype=torch.float64)


def top_values(likelihood: Tensor, width: int) -> Tensor:
    """The `width` greatest numbers of each row, in falling order."""
    vocab = likelihood.shape[1]
    if likelihood.device.type != "cpu":
        return likelihood.topk(width).values if width < vocab else likelihood.sort(-1, descending=True).values
    numbers = likelihood.numpy()  # NumPy's vectorised sort and selection take a tenth of the time of torch's
    if width < vocab:
        numbers = np.partition(numbers, vocab - width, axis=-1)[:, vocab - width :]
    return torch.from_numpy(np.sort(numbers, axis=-1)[:, ::-1].copy())


def draw(weights: Tensor, sample_to_row: np.ndarray, uniforms: np.ndarray) -> Tensor:
    """One token for each draw [D]: the first, by id, at which the sum of its row's weights exceeds chance x total.

    weights [R, V] are integers in float32; owner [D] is the row of each draw, chance [D] in [0, 1). A token of zero
    weight can't be drawn, whatever the chance.
    """
    summed = BlockSums(weights)
    index = to_device(sample_to_row, weights.device)
    return summed.search(index, draw_targets(summed.total[index], uniforms))


def draw_targets(total: Tensor, uniforms: np.ndarray) -> Tensor:
    """Integers [D], in float64, that the sums of the drawn tokens must exceed, given the sums of their rows [D]."""
    # chance <= 1 - 2**-53, so that the rounded product is below the total; floor keeps it an integer
    return (total * to_device(uniforms, total.device)).floor_()


class BlockSums:
    """Weights [R, V] by blocks: the sum over blocks finds the block, the sum within it the token."""

    def __init__(self, weights: Tensor) -> None:
        if weights.shape[1] % SUM_BLOCK:
            weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % SUM_BLOCK))
        self.blocks = weights.view(len(weights), -1, SUM_BLOCK)
        self.block_sums = self.blocks.sum(-1, dtype=torch.float64)
        self.prefix_sums = self.block_sums.cumsum(-1)
        self.total = self.block_sums.sum(-1)

    def search(self, sample_to_row: Tensor, goal: Tensor) -> Tensor:
        """The first token [D], by id, at which the sum of its row's weights exceeds `goal` [D]; `sample_to_row` [D] is
        its row. For a goal that no sum exceeds, or one below 0, any token of the row, or of its padding."""
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
