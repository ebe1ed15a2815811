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
    keys [first, end) of `slot`. `seen` [group * count, end - first] is true where one may look, for each of the query
    heads that share a key head (None: everywhere)."""

    slot: int
    queries: int
    count: int
    first: int
    end: int
    seen: Tensor | None


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
        count, heads, dim = q.shape
        kv, shared = cache.kv_heads, heads // cache.kv_heads
        # A key head serves its group of query heads as one operand.
        queries, out = q.view(count, kv, shared, dim), torch.empty_like(q)
        found = out.view(count, kv, shared, dim)
        for span in plan.spans:
            keys, values = (_seen(x, span) for x in (cache.keys, cache.values))
            if span.count == 1:
                found[span.queries] = _attend(queries[span.queries, None], keys, values, None, cache)[0]
                continue
            part = slice(span.queries, span.queries + span.count)
            query = queries[part].permute(1, 2, 0, 3).reshape(1, kv, shared * span.count, dim)
            answers = _attend(query, keys, values, span.seen, cache)
            found[part] = answers.view(kv, shared, span.count, dim).permute(2, 0, 1, 3)
        return out


def _seen(x: Tensor, span: Span) -> Tensor:
    """The span's keys or values [1, kv_heads, K, dim], of all slots' [slots, kv_heads, tokens, dim]."""
    first, head, token, one = x.stride()
    shape = 1, x.shape[1], span.end - span.first, x.shape[3]
    return x.as_strided(shape, (first, head, token, one), x.storage_offset() + span.slot * first + span.first * token)


def _most(end: int, cache: LayerCache) -> int:
    """Queries at once of a context that ends here, so that their scores stay within MAX_SCORES: a power of two."""
    return 1 << min(max(MAX_SCORES // (cache.heads * end), 1), TILE).bit_length() - 1


def _span(slot: int, queries: int, position: int, count: int, cache: LayerCache) -> Span:
    end = position + count
    first = 0 if cache.window is None else max(position - cache.window + 1, 0)
    seen = None
    if count > 1:
        keys = torch.arange(first, end, device=cache.device)
        at = torch.arange(position, end, device=cache.device)[:, None]
        seen = keys <= at
        if cache.window is not None:
            seen &= keys > at - cache.window
        seen = seen.repeat(cache.heads // cache.kv_heads, 1)
    return Span(slot, queries, count, first, end, seen)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, cache: LayerCache) -> Tensor:
    """query [1, kv_heads, Q, dim], keys and values [1, kv_heads, K, dim], seen [Q, K] -> [1, kv_heads, Q, dim]: by
    torch's fused kernel, which takes strides as they are and knows no caps."""
    if cache.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=cache.scale)
    scores = (query * cache.scale) @ keys.transpose(2, 3)
    scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ values
