"""Attention through plain torch over keys and values that are contiguous in addresses (vAttention §5.2): a sequence's
are a view, nothing is gathered. It reads nothing behind a sequence's end, where there may be no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache
from quire.data.kernels.limits import MAX_SCORES, TILE
from quire.data.kernels.reference import write_pages
from quire.vocabulary.specs import Layout


@dataclass(slots=True)
class Span:
    """Queries [queries, queries + count) of the step, of a sequence whose first of them is at `position`: they see
    keys [first, end) of `slot`. `hidden` [count, end - first] is true where one may not look (None: nowhere)."""

    slot: int
    queries: int
    count: int
    first: int
    end: int
    hidden: Tensor | None


@dataclass(slots=True)
class Spans:
    """A step's spans, and where its tokens' keys and values go: slots and positions [T]."""

    spans: list[Span]
    slots: Tensor
    positions: Tensor


class ContiguousBackend:
    """See the head of the file."""

    needs = Layout.CONTIGUOUS
    views = True
    rotates = False

    def check(self, cache: LayerCache) -> None:
        """StartupError for a cache that it can't read: there is none."""

    def plan(self, batch: Batch, cache: LayerCache, asked: Batch | None = None) -> Spans:
        """Once a step and kind of layers, on the host: keys and values of `batch`, queries of `asked` if given."""
        of = asked or batch
        spans = []
        rows = zip(of.slots.tolist(), of.offsets.tolist(), of.starts.tolist(), of.lengths.tolist())
        for slot, offset, start, length in rows:
            most = _most(start + length, cache) if length > 1 else 1
            for cut in range(0, length, most):
                count = min(most, length - cut)
                spans.append(_span(slot, offset + cut, start + cut, count, cache))
        return Spans(spans, batch.token_slots, batch.positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Spans) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their places, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes:
            write_pages(cache.keys, cache.values, k, v, plan.slots, plan.positions)
        out = torch.empty_like(q)
        for span in plan.spans:
            keys, values = (x[span.slot, :, span.first : span.end] for x in (cache.keys, cache.values))
            part = q[span.queries : span.queries + span.count]
            out[span.queries : span.queries + span.count] = _attend(part, keys, values, span.hidden, cache)
        return out


def _most(end: int, cache: LayerCache) -> int:
    """Queries at once of a context that ends here, so that their scores stay within MAX_SCORES: a power of two."""
    return 1 << min(max(MAX_SCORES // (cache.heads * end), 1), TILE).bit_length() - 1


def _span(slot: int, queries: int, position: int, count: int, cache: LayerCache) -> Span:
    end = position + count
    first = 0 if cache.window is None else max(position - cache.window + 1, 0)
    hidden = None
    if count > 1:
        keys = torch.arange(first, end, device=cache.device)
        at = torch.arange(position, end, device=cache.device)[:, None]
        hidden = keys > at
        if cache.window is not None:
            hidden |= keys <= at - cache.window
    return Span(slot, queries, count, first, end, hidden)


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, cache: LayerCache) -> Tensor:
    """q [Q, heads, dim], keys and values [kv_heads, K, dim], hidden [Q, K] -> [Q, heads, dim]."""
    count, heads, dim = q.shape
    kv, shared = cache.kv_heads, heads // cache.kv_heads
    query = q.view(count, kv, shared, dim).permute(1, 2, 0, 3).reshape(kv, shared * count, dim)
    if cache.device.type != "cpu" and cache.softcap is None:
        mask = None if hidden is None else ~hidden.repeat(shared, 1)
        out = F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=cache.scale)
        return out.view(kv, shared, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)
    scores = torch.bmm(query * cache.scale, keys.transpose(1, 2))
    if cache.softcap is not None:
        scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if hidden is not None:
        scores.view(kv, shared, count, -1).masked_fill_(hidden, -torch.inf)
    out = torch.bmm(torch.softmax(scores, -1), values)
    return out.view(kv, shared, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)
