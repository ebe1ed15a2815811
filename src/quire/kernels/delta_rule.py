"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) over the rows of a step, in plain torch: for any device, but
slow. Where states are, and which a step reads and writes, is as for Mamba: see quire.kernels.mamba_states.

A head's state S is a matrix [key_dim, value_dim]. For each token, with its key k and query q, which have length 1 (q is
then divided by sqrt(key_dim)), its value v, decay = exp(A softplus(a + dt_bias)) and rate = sigmoid(b):

    S = decay S
    S = S + k (rate (v - S^T k))^T
    output = S^T q
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.mamba_states import StatePlan, read_pages, row_groups, write_pages

CHUNK = 64
"""Tokens that are computed together, by products of matrices."""
L2_EPS = 1e-6
"""Added to the squared length of a key or query before it is divided by its length."""


def gated_delta_rule(qkv: Tensor, ba: Tensor, A: Tensor, dt_bias: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
    """Return the outputs [T, heads value_dim] of qkv [T, 2 key_heads key_dim + heads value_dim], queries, keys and
    values, and of ba [T, 2 heads], b and a; the query and key of a key head serve heads / key_heads adjacent heads.

    `states` [pages, heads, key_dim, value_dim] are in fp32, or in a shorter dtype, to which they are rounded when they
    are written. A, below 0, and dt_bias [heads] are in fp32. Computed in fp32 and rounded once. Reads and writes the
    plan's states."""
    _, heads, key_dim, value_dim = states.shape
    values = heads * value_dim
    keys = (qkv.shape[1] - values) // 2
    out = torch.empty((len(qkv), values), dtype=qkv.dtype, device=qkv.device)
    for group in row_groups(plan):
        rows, done = len(group.rows), 0
        tokens, state = group.tokens.view(rows, -1), read_pages(states, plan.read_pages[group.rows]).float()
        for j, end in enumerate(group.ends):
            for first in range(done, end, CHUNK):
                at = tokens[:, first : min(first + CHUNK, end)].flatten()
                parts = zip(qkv[at].split((keys, keys, values), dim=1), (key_dim, key_dim, value_dim))
                q, k, v = (_by_head(x, rows, heads, dim) for x, dim in parts)
                b, a = ba[at].float().view(rows, -1, 2, heads).permute(2, 0, 3, 1)
                decay = A[:, None] * F.softplus(a + dt_bias[:, None])  # its logarithm
                y, state = _run_chunk(_unit(q) * key_dim**-0.5, _unit(k), v, decay, b.sigmoid(), state)
                out[at] = y.transpose(1, 2).reshape(-1, values).to(out.dtype)
            write_pages(states, plan.write_pages[group.rows, j], state)
            done = end
    return out


def _by_head(x: Tensor, rows: int, heads: int, dim: int) -> Tensor:
    """Return x [tokens, numbers] as [rows, heads, length, dim] in fp32; a head of x serves adjacent heads."""
    parts = x.float().view(rows, -1, x.shape[1] // dim, dim).transpose(1, 2)
    return parts.repeat_interleave(heads // parts.shape[1], dim=1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


def _run_chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs, final states) of the rows' next tokens [rows, heads, length, *] after states [rows, heads,
    key_dim, value_dim]; `decay` and `rate` [rows, heads, length].

    The state after token i is that before the chunk, decayed, plus the sum of k_j u_j^T, each decayed since token j, up
    to i. u_i = rate_i (v_i - S^T k_i) with the state S before the token's own update, so the u are the solution of a
    triangular system."""
    total = decay.cumsum(2)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    since, rate = total.exp()[..., None], rate[..., None]
    u = rate * (v - since * (k @ state))
    if q.shape[2] > 1:
        u = torch.linalg.solve_triangular(rate * (k @ k.mT) * between, u, upper=False, unitriangular=True)
    out = since * (q @ state) + ((q @ k.mT) * between) @ u
    last = total[..., -1:]
    return out, last.exp()[..., None] * state + (k * (last - total).exp()[..., None]).mT @ u


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head of x [T, heads dim], times weight [dim] and silu(gate) [T, heads dim], in fp32,
    rounded once."""
    heads = x.float().unflatten(1, (-1, len(weight)))
    normed = F.rms_norm(heads, weight.shape, weight.float(), eps).flatten(1)
    return (normed * F.silu(gate.float())).to(x.dtype)
