"""Reference implementation of PagedAttention as in the paper (§4.1, Equation 4), page by page. Slow and obvious.

Every kernel test compares with it, and it is a backend of its own (`--attention reference`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.protocol.kv_cache_config import KVCacheLayout


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: int, *, scale: float,
    window: int | None = None, softcap: float | None = None, chunk: int | None = None, last: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of one query over pages: q [heads, dim], keys and values [pages, kv_heads, page_tokens,
    dim], table [logical pages] -> [heads, dim]. The query at `position` sees positions 0 .. position, the last `window`
    of them, or those of its `chunk`; with `last` it also sees those after it, up to this one.

    For each page j: A_j = exp(q K_j^T * scale), o = sum_j A_j V_j / sum_j A_j; the running maximum avoids overflow.
    With `sinks` [heads] the divisor has one more term for each head, exp(sink).
    """
    heads, dim = q.shape
    kv_heads, size = keys.shape[1], keys.shape[2]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    query = q.to(work).view(kv_heads, heads // kv_heads, dim) * scale
    first = 0 if window is None else max(0, position - window + 1)
    if chunk is not None:
        first = position // chunk * chunk
    best = torch.full((kv_heads, heads // kv_heads, 1), -torch.inf, dtype=work, device=q.device)
    total = torch.zeros_like(best)
    if sinks is not None:
        best, total = sinks.to(work).view_as(best), torch.ones_like(best)
    out = torch.zeros_like(query)
    last = position if last is None else last
    for j in range(first // size, last // size + 1):
        at = torch.arange(j * size, (j + 1) * size, device=q.device)
        seen = (at >= first) & (at <= last)
        page = table[j]
        # Select, never multiply: the unwritten end of a reused page may hold NaN, and 0 * NaN is NaN.
        key = torch.where(seen[:, None], keys[page].to(work), 0.0)
        value = torch.where(seen[:, None], values[page].to(work), 0.0)
        scores = query @ key.transpose(1, 2)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        new = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new)
        shrink = torch.exp(best - new)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ value
        best = new
    return (out / total).view(heads, dim).to(q.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [..., keys] with one more score for each row, which has no result: sinks, of the
    shape of scores but with a last dimension of 1 (None: without)."""
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), -1), -1)[..., :-1]


def write_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Write k and v [T, kv_heads, dim] of T tokens to their pages."""
    keys[pages, :, offsets] = k
    values[pages, :, offsets] = v


class ReferenceBackend:
    """Computes one query and one page at a time. Takes any strides."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = False
    fuses_rope = False

    def check_cache(self, cache: LayerCache) -> None:
        """Raise StartupError for a cache that this backend cannot read: there is none."""

    def plan(
        self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None
    ) -> tuple[ForwardBatch, ForwardBatch]:
        return batch.for_cache(cache), (query_batch or batch).for_cache(cache)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: tuple[ForwardBatch, ForwardBatch]
    ) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim], with the
        queries of the plan's second batch."""
        batch, query_batch = plan
        if cache.writes_kv:
            write_pages(cache.keys, cache.values, k, v, *batch.slot_mapping(cache))
        tables = batch.tables[cache.group]
        bidirectional = np.repeat(query_batch.bidirectional_mask, query_batch.lengths)
        row_ends = np.repeat(query_batch.starts + query_batch.lengths - 1, query_batch.lengths)
        positions = query_batch.positions.tolist()
        last = np.where(bidirectional, row_ends, positions).tolist()
        unbound = bidirectional & (not query_batch.bidirectional_in_window)
        bounds = [(None, None) if both_ways else (cache.window, cache.chunk) for both_ways in unbound]
        return torch.stack(
            [
                paged_attention(
                    query, cache.keys, cache.values, tables[slot], position,
                    scale=cache.scale, window=window, softcap=cache.softcap, chunk=chunk, last=end,
                    sinks=cache.sinks,
                )
                for query, slot, position, end, (window, chunk) in zip(
                    q, query_batch.token_slots, positions, last, bounds
                )
            ]
        )  # fmt: skip
