"""The scan of Mamba-2 (arXiv:2405.21060), state-space duality, and its gated norm, in plain torch. A head's channels
decay alike, so the tokens of a chunk meet in matrix products, and only chunks follow one another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.mamba_states import StateCache, StatePlan, read_pages, row_groups, write_pages

SSD_CHUNK = 64
"""Tokens that meet in matrix products."""


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, limits: tuple[float, float],
    cache: StateCache, plan: StatePlan,
) -> Tensor:  # fmt: skip
    """Return y of the scan: for each token of a row and each head, with delta = softplus(dt + bias) within `limits`,

        h = exp(delta A) h + delta x B^T,   y = h C + D x.

    x, y [T, heads, head_dim]; dt [T, heads]; A, D, bias [heads] in fp32; B, C [T, groups, d_state], each group for
    heads / groups heads. Computed in fp32 and rounded once. Reads and writes the plan's states, of which a page has
    [heads, head_dim, d_state]."""
    assert cache.ssm is not None, "a scan has states"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for group in row_groups(plan):
        rows, at = len(group.rows), group.tokens
        if group.ends == [1] and cache.ssm.dtype == torch.float32:
            delta = F.softplus(dt[at].float() + bias).clamp_(*limits)
            for row, numbers in zip(group.rows, zip(x[at].float(), delta, B[at].float(), C[at].float())):
                pages = int(plan.read_pages[row]), int(plan.write_pages[row, 0])
                out[plan.offsets[row]] = _advance_in_place(*numbers, A, D, cache.ssm, *pages).to(x.dtype)
            continue
        v, d, b, c = (tensor[at].float().unflatten(0, (rows, -1)) for tensor in (x, dt, B, C))
        delta = F.softplus(d + bias).clamp(*limits)
        h, done, parts = read_pages(cache.ssm, plan.read_pages[group.rows]).float(), 0, []
        for j, end in enumerate(group.ends):
            for first in range(done, end, SSD_CHUNK):
                chunk = slice(first, min(first + SSD_CHUNK, end))
                y, h = _chunk(v[:, chunk], delta[:, chunk], A, b[:, chunk], c[:, chunk], h)
                parts.append(y)
            write_pages(cache.ssm, plan.write_pages[group.rows, j], h)
            done = end
        out[at] = torch.cat(parts, dim=1).addcmul_(v, D[:, None]).flatten(0, 1).to(x.dtype)
    return out


def _chunk(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs without D x, final states) of the rows' next tokens x [rows, length, heads, head_dim] after
    states h [rows, heads, head_dim, d_state]."""
    length, heads = x.shape[1:3]
    decays = (delta * A).transpose(1, 2)  # [rows, heads, length]: logarithms
    # Sums from each token (the last dimension) to each later one. Differences of sums from the chunk's start would lose
    # small ones beside large ones.
    until = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
    pairs = torch.where(until, decays[..., None], 0.0).cumsum_(2)
    left = pairs[..., -1, :].exp()  # what is left of each token's addition at the end of the chunk
    total = pairs[..., 0] + decays[..., :1]  # sums from the chunk's start
    groups, x, steps = B.shape[2], x.transpose(1, 2), delta.transpose(1, 2)
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    pairs = pairs.exp_().tril_().mul_(steps[..., None, :]).unflatten(1, (groups, -1))
    pairs = pairs.mul_((C @ B.transpose(2, 3))[:, :, None]).flatten(1, 2)
    B, C = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in (B, C))
    y = pairs @ x + (C @ h.transpose(2, 3)).mul_(total.exp()[..., None])
    added = (x * left.mul_(steps)[..., None]).transpose(2, 3) @ B
    return y.transpose(1, 2), added.addcmul_(h, total[..., -1].exp()[..., None, None])


def _advance_in_place(
    x: Tensor, delta: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, states: Tensor, read: int, write: int
) -> Tensor:
    """Return the output [heads, head_dim] of one token after the state in page `read`. The new one is computed in page
    `write`, since a copy of a state takes as long as a step."""
    h = states[write] if write >= 0 else torch.empty_like(states[0])
    if read < 0:
        h.zero_()
    elif read != write:
        h.copy_(states[read])
    groups, size = B.shape
    grouped = h.view(groups, -1, size)  # the channels of a group's heads one after another
    h.mul_((delta * A).exp_()[:, None, None])
    grouped.addcmul_((x * delta[:, None]).view(groups, -1, 1), B[:, None])
    return (grouped @ C[:, :, None]).view(x.shape).addcmul_(x, D[:, None])


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return the RMS norm of x silu(gate) [T, N] over each of `groups` equal parts of a row, times weight [N]; computed
    in fp32 and rounded once. `reduce` returns the means of the squares [T, groups] of whole parts from those of the
    columns here."""
    parts = (x.float() * F.silu(gate.float())).unflatten(1, (groups, -1))
    squares = parts.square().mean(2)
    squares = squares if reduce is None else reduce(squares)
    normed: Tensor = (parts * torch.rsqrt(squares + eps)[..., None]).flatten(1).mul_(weight.float()).to(x.dtype)
    return normed
