"""Sampling by Gumbel-max in plain torch: min_p, top_k and top_p, and the token that noise chooses among those kept.

The token of the greatest score, logit / temperature - log E, has the probability softmax(logits / temperature) if the E
of the tokens are independent and exponentially distributed. E is a function of the seed, the position and the token's
id alone, so two models that sample with the same noise mostly choose the same token where their distributions are
similar: with a probability of at least (1 - TV) / (1 + TV), given the distance TV in total variation (Daliri et al.
2024).

This defines the results of the kernels for GPUs and CPUs: given the same likelihoods, they keep the same tokens, and
given the same scores, they choose the same one. CPU kernels compute scores in float64, as this module does; kernels for
GPUs in float32, so that between devices a sample can differ if two scores agree in their first 6 digits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import to_device

WEIGHT_SCALE = 2.0**32
"""The weight of the most likely token. Weights are integers, and at most MAX_VOCAB of them: sums are below 2**53."""

MAX_VOCAB = 2**20
WORD = 2**32 - 1
SCORE_BATCH = 2**20  # scores that are computed together
TOP_P_CANDIDATES = 1024  # on a CPU, top_p sorts these first and the whole row only if necessary

ThresholdFn = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]
"""Takes likelihoods [R, V], top_k [R] (0: off) and top_p [R]; returns the least likelihood [R] that both keep."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the four words of Philox4x32-10 (Salmon et al. 2011). All words are int64 below 2**32; they broadcast."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for i in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2**64
        c0, c1 = (p1 >> 32 & WORD) ^ c1 ^ (k0 + i * 0x9E3779B9 & WORD), p1 & WORD
        c2, c3 = (p0 >> 32 & WORD) ^ c3 ^ (k1 + i * 0xBB67AE85 & WORD), p0 & WORD
    return [c0, c1, c2, c3]


def exponential_noise(seeds: Tensor, positions: Tensor, first_id: int, count: int) -> Tensor:
    """Return the noise E of `count` tokens from the id `first_id` on, a multiple of 64, float64 [D, count], for seeds
    [D] and positions [D], both int64.

    The key of Philox is the seed, its counter is (16 * (id // 64) + id % 16, position, position >> 32, 0), and the
    token has word id // 16 % 4 of the four: the tokens of a word are in the order of the counters, as vector units
    compute them.
    """
    assert first_id % 64 == 0, f"noise from the token {first_id} on"
    counters = first_id // 4 + torch.arange((count + 63) // 64 * 16, device=seeds.device)[None, :]
    seed, position = seeds[:, None], positions[:, None]
    words = philox(
        (counters, position & WORD, position >> 32 & WORD, torch.zeros_like(position)),
        (seed & WORD, seed >> 32 & WORD),
    )
    bits = torch.stack(words, 1).view(len(seeds), 4, -1, 16).transpose(1, 2).reshape(len(seeds), -1)[:, :count]
    return ((bits.double() + 0.5) * -(2.0**-32)).log1p_().neg_()


def best_scores(
    logits: Tensor, temperatures: np.ndarray, sample_to_row: np.ndarray, seeds: np.ndarray, positions: np.ndarray,
    first_id: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the greatest score of each sample [D], float64, and the lowest id of a token that has it [D].

    Sample d is of row sample_to_row[d] of logits [R, V], of the tokens from the id `first_id` on, a multiple of 64;
    tokens that may not be sampled have -inf. temperatures [R]; where one is 0 the scores are the logits. seeds and
    positions [D] are int64.
    """
    step = max(SCORE_BATCH // logits.shape[1], 1)
    parts = []
    for start in range(0, len(sample_to_row), step):
        of_rows = sample_to_row[start : start + step]
        scores = logits.index_select(0, to_device(of_rows, logits.device)).double()
        random = np.flatnonzero(temperatures[of_rows] > 0)
        if len(random):
            index, samples = to_device(random, logits.device), start + random
            scaled = scores.index_select(0, index).div_(_column(temperatures[of_rows[random]], scores))
            noise = exponential_noise(
                to_device(seeds[samples], logits.device), to_device(positions[samples], logits.device),
                first_id, logits.shape[1],
            )  # fmt: skip
            scores.index_copy_(0, index, scaled.sub_(noise.log_()))
        parts.append(scores.max(-1))
    return torch.cat([best for best, _ in parts]), torch.cat([place for _, place in parts]).add_(first_id)


def keep_tokens(
    logits: Tensor, row_max: Tensor, params: np.ndarray, find_threshold_fn: ThresholdFn | None = None
) -> Tensor:
    """Return logits [R, V] with -inf for the tokens that min_p, top_k or top_p cut.

    `row_max` [R] is the greatest logit; params [R, 4] are temperature, min_p, top_k (0: off), top_p. Likelihoods are
    relative to the most likely token's, which weighs 2**32. Weights are integers and their sums in float64 exact, so
    the order of summation does not change which tokens are kept. `find_threshold_fn` replaces `find_threshold` if the
    logits are only a part of the vocabulary.
    """
    cut = np.flatnonzero(truncates(params))
    if not len(cut):
        return logits
    index = to_device(cut, logits.device)
    kept = logits.index_select(0, index)
    likelihood = kept - row_max.index_select(0, index)[:, None]
    if (params[cut, 0] != 1).any():
        likelihood.div_(_column(params[cut, 0], likelihood))
    likelihood = truncate(likelihood.exp_(), params[cut], find_threshold_fn)
    return logits.index_copy(0, index, kept.masked_fill_(likelihood * WEIGHT_SCALE < 1, -torch.inf))


def truncates(params: np.ndarray) -> np.ndarray:
    """Return for each row of params [R, 4] (temperature, min_p, top_k, top_p) if it is random with min_p, top_k or
    top_p."""
    result: np.ndarray = (params[:, 0] > 0) & (params[:, 1:] != (0, 0, 1)).any(1)
    return result


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


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return to_device(values, like.device).to(like.dtype)[:, None]
