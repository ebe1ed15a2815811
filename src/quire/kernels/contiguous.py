"""Attention through plain torch over keys and values that are contiguous in addresses (vAttention §5.2): a sequence's
are a view, nothing is gathered. It reads nothing behind a sequence's end, where there may be no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, LayerCache, to_device
from quire.kernels.limits import MAX_SCORES, QUERY_TILE
from quire.kernels.reference import write_pages
from quire.protocol.kv_cache_config import KVCacheLayout


@dataclass(slots=True)
class QueryTile:
    """Queries that see keys [first, end): [queries, queries + count) of the step in `slot`; or one each of `num_rows`
    sequences of one length in as many slots from that one on, and `first_query` is the first one's place in their
    order. `mask` [group * count, end - first] is true where one may look, for each of the query heads that share a key
    head (None: everywhere)."""

    slot: int
    first_query: int
    num_queries: int
    first_key: int
    end_key: int
    mask: Tensor | None
    num_rows: int = 1


@dataclass(slots=True)
class ContiguousPlan:
    """A step's spans, and where its tokens' keys and values go: slots and positions [T]. `decode_tiles` are those of
    rows of one query, in the `decode_order` [R] of their slots (None: the step has no others, and they are in
    order)."""

    tiles: list[QueryTile]
    decode_tiles: list[QueryTile]
    decode_order: Tensor | None
    slots: Tensor
    positions: Tensor


class ContiguousBackend:
    """See the head of the file."""

    layout = KVCacheLayout.CONTIGUOUS
    reads_contiguous = True
    fuses_rope = False

    def check_cache(self, cache: LayerCache) -> None:
        """StartupError for a cache that it can't read: there is none."""

    def plan(self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None) -> ContiguousPlan:
        """Once a step and kind of layers, on the host: keys and values of `batch`, queries of `query_batch` if "
        "given."""
        of, batch = (query_batch or batch).for_cache(cache), batch.for_cache(cache)
        rows = list(zip(of.slots.tolist(), of.offsets.tolist(), of.starts.tolist(), of.lengths.tolist()))
        both_ways = [row for row, whole in zip(rows, of.bidirectional_mask) if whole]
        rows = [row for row, whole in zip(rows, of.bidirectional_mask) if not whole]
        singles = sorted(row for row in rows if row[3] == 1)
        spans = [span for row in rows if row[3] > 1 for span in _prompt_tiles(*row, cache)]
        spans += [span for row in both_ways for span in _bidirectional_tiles(*row, cache)]
        places = [offset for _, offset, _, _ in singles]
        order = None
        if spans or places != list(range(len(places))):
            order = to_device(np.array(places, dtype=np.int64), batch.device)
        return ContiguousPlan(spans, _decode_tiles(singles, cache), order, batch.token_slots, batch.positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: ContiguousPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their places, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            write_pages(cache.keys, cache.values, k, v, plan.slots, plan.positions)
        count, heads, dim = q.shape
        kv, shared = cache.kv_heads, heads // cache.kv_heads
        # A key head serves its group of query heads as one operand.
        queries, out = q.view(count, kv, shared, dim), torch.empty_like(q)
        found = out.view(count, kv, shared, dim)
        for span in plan.tiles:
            part = slice(span.first_query, span.first_query + span.num_queries)
            query = queries[part].permute(1, 2, 0, 3).reshape(1, kv, shared * span.num_queries, dim)
            answers = _attend(query, span, cache)
            found[part] = answers.view(kv, shared, span.num_queries, dim).permute(2, 0, 1, 3)
        if plan.decode_tiles:
            ordered = queries if plan.decode_order is None else queries.index_select(0, plan.decode_order)
            answers = found if plan.decode_order is None else torch.empty_like(ordered)
            for span in plan.decode_tiles:
                part = slice(span.first_query, span.first_query + span.num_rows)
                answers[part] = _attend(ordered[part], span, cache)
            if plan.decode_order is not None:
                found.index_copy_(0, plan.decode_order, answers)
        return out


def _tile_view(x: Tensor, span: QueryTile) -> Tensor:
    """The span's keys or values [rows, kv_heads, K, dim], of all slots' [slots, kv_heads, tokens, dim]."""
    slot, head, token, one = x.stride()
    shape = span.num_rows, x.shape[1], span.end_key - span.first_key, x.shape[3]
    return x.as_strided(shape, (slot, head, token, one), x.storage_offset() + span.slot * slot + span.first_key * token)


def _max_queries(end: int, cache: LayerCache) -> int:
    """Queries at once of a context that ends here, so that their scores stay within MAX_SCORES: a power of two."""
    return 1 << min(max(MAX_SCORES // (cache.heads * end), 1), QUERY_TILE).bit_length() - 1


def _prompt_tiles(slot: int, offset: int, start: int, length: int, cache: LayerCache) -> Iterator[QueryTile]:
    """A row of several queries."""
    most = _max_queries(start + length, cache)
    for cut in range(0, length, most):
        count, position = min(most, length - cut), start + cut
        end, first = position + count, _first_key(position, cache)
        keys = torch.arange(first, end, device=cache.device)
        at = torch.arange(position, end, device=cache.device)[:, None]
        seen = keys <= at
        if cache.is_local:
            seen &= keys >= cache.first_visible(at)
        yield QueryTile(slot, offset + cut, count, first, end, seen.repeat(cache.heads // cache.kv_heads, 1))


def _bidirectional_tiles(slot: int, offset: int, start: int, length: int, cache: LayerCache) -> Iterator[QueryTile]:
    """A row of queries that see all of it, and all before it."""
    end = start + length
    most = _max_queries(end, cache)
    for cut in range(0, length, most):
        yield QueryTile(slot, offset + cut, min(most, length - cut), 0, end, None)


def _decode_tiles(singles: list[tuple[int, int, int, int]], cache: LayerCache) -> list[QueryTile]:
    """Rows of one query, by their slots. Those of one length in slots that follow one another are one view."""
    spans: list[QueryTile] = []
    for i, (slot, _, position, _) in enumerate(singles):
        last = spans[-1] if spans else None
        if last is not None and slot == last.slot + last.num_rows and position + 1 == last.end_key:
            last.num_rows += 1
        else:
            spans.append(QueryTile(slot, i, 1, _first_key(position, cache), position + 1, None))
    return spans


def _first_key(position: int, cache: LayerCache) -> int:
    """The first key that a query at this position sees."""
    return max(cache.first_visible(position), 0) if cache.is_local else 0


def _attend(query: Tensor, span: QueryTile, cache: LayerCache) -> Tensor:
    """query [rows, kv_heads, Q, dim] -> [rows, kv_heads, Q, dim], over what the span sees: by torch's fused kernel,
    which takes strides as they are and knows no caps."""
    keys, values = _tile_view(cache.keys, span), _tile_view(cache.values, span)
    if cache.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=span.mask, scale=cache.scale)
    scores = (query * cache.scale) @ keys.transpose(2, 3)
    scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if span.mask is not None:
        scores.masked_fill_(~span.mask, -torch.inf)
    return torch.softmax(scores, -1) @ values
