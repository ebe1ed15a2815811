"""Attention in plain torch over keys and values that are contiguous in virtual memory (vAttention §5.2): those of a
sequence are a view, and nothing is gathered. It reads nothing after a sequence's end, where no memory may be mapped.
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
from quire.kernels.reference import softmax_with_sinks, write_pages
from quire.protocol.kv_cache_config import KVCacheLayout


@dataclass(slots=True)
class QueryTile:
    """Queries of one sequence, or single queries of several sequences, that see keys [first_key, end_key).

    With num_rows 1: queries [first_query, first_query + num_queries) of the step, of the sequence in `slot`. Else one
    query of each of `num_rows` sequences of one length in adjacent slots from `slot` on; `first_query` is the index of
    the first one in the decode order. `mask` [group * num_queries, end_key - first_key] is true where a query sees a
    key, repeated for the query heads that share a key head (None: all are seen)."""

    slot: int
    first_query: int
    num_queries: int
    first_key: int
    end_key: int
    mask: Tensor | None
    num_rows: int = 1


@dataclass(slots=True)
class ContiguousPlan:
    """A step's tiles, and the slots and positions [T] to which its keys and values are written. `decode_tiles` are the
    tiles of rows of one query, sorted by slot; `decode_order` [R] are their query indices in that order (None: the step
    has no other rows, and is in that order)."""

    tiles: list[QueryTile]
    decode_tiles: list[QueryTile]
    decode_order: Tensor | None
    slots: Tensor
    positions: Tensor


class ContiguousBackend:
    """The backend that the module's docstring describes."""

    layout = KVCacheLayout.CONTIGUOUS
    reads_contiguous = True
    fuses_rope = False

    def check_cache(self, cache: LayerCache) -> None:
        """Raise StartupError for a cache that this backend cannot read: there is none."""

    def plan(self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None) -> ContiguousPlan:
        """Return the plan for all layers with this `plan_key`, computed on the host once a step: keys and values of
        `batch`, queries of `query_batch` if given."""
        of, batch = (query_batch or batch).for_cache(cache), batch.for_cache(cache)
        rows = list(zip(of.slots.tolist(), of.offsets.tolist(), of.starts.tolist(), of.lengths.tolist()))
        both_ways = [row for row, bidirectional in zip(rows, of.bidirectional_mask) if bidirectional]
        rows = [row for row, bidirectional in zip(rows, of.bidirectional_mask) if not bidirectional]
        singles = sorted(row for row in rows if row[3] == 1)
        tiles = [tile for row in rows if row[3] > 1 for tile in _prompt_tiles(*row, cache)]
        tiles += [tile for row in both_ways for tile in _bidirectional_tiles(*row, cache)]
        queries = [offset for _, offset, _, _ in singles]
        order = None
        if tiles or queries != list(range(len(queries))):
            order = to_device(np.array(queries, dtype=np.int64), batch.device)
        return ContiguousPlan(tiles, _decode_tiles(singles, cache), order, batch.token_slots, batch.positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: ContiguousPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to the cache, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            write_pages(cache.keys, cache.values, k, v, plan.slots, plan.positions)
        count, heads, dim = q.shape
        kv, shared = cache.kv_heads, heads // cache.kv_heads
        # A key head serves its group of query heads as one operand.
        queries, out = q.view(count, kv, shared, dim), torch.empty_like(q)
        grouped_out = out.view(count, kv, shared, dim)
        for tile in plan.tiles:
            part = slice(tile.first_query, tile.first_query + tile.num_queries)
            query = queries[part].permute(1, 2, 0, 3).reshape(1, kv, shared * tile.num_queries, dim)
            result = _attend(query, tile, cache)
            grouped_out[part] = result.view(kv, shared, tile.num_queries, dim).permute(2, 0, 1, 3)
        if plan.decode_tiles:
            ordered = queries if plan.decode_order is None else queries.index_select(0, plan.decode_order)
            results = grouped_out if plan.decode_order is None else torch.empty_like(ordered)
            for tile in plan.decode_tiles:
                part = slice(tile.first_query, tile.first_query + tile.num_rows)
                results[part] = _attend(ordered[part], tile, cache)
            if plan.decode_order is not None:
                grouped_out.index_copy_(0, plan.decode_order, results)
        return out


def _tile_view(x: Tensor, span: QueryTile) -> Tensor:
    """Return a tile's view [rows, kv_heads, K, dim] of the keys or values x [slots, kv_heads, tokens, dim]."""
    slot, head, token, one = x.stride()
    shape = span.num_rows, x.shape[1], span.end_key - span.first_key, x.shape[3]
    return x.as_strided(shape, (slot, head, token, one), x.storage_offset() + span.slot * slot + span.first_key * token)


def _max_queries(end: int, cache: LayerCache) -> int:
    """Return the most queries of a tile whose last key is at `end`, such that its scores stay within MAX_SCORES: a
    power of two."""
    return 1 << min(max(MAX_SCORES // (cache.heads * end), 1), QUERY_TILE).bit_length() - 1


def _prompt_tiles(slot: int, offset: int, start: int, length: int, cache: LayerCache) -> Iterator[QueryTile]:
    """Yield the tiles of a row of several queries."""
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
    """Yield the tiles of a bidirectional row: its queries see all of the row, and all before it."""
    end = start + length
    most = _max_queries(end, cache)
    for cut in range(0, length, most):
        yield QueryTile(slot, offset + cut, min(most, length - cut), 0, end, None)


def _decode_tiles(singles: list[tuple[int, int, int, int]], cache: LayerCache) -> list[QueryTile]:
    """Return the tiles of rows of one query, sorted by slot. Rows of one length in adjacent slots share a tile."""
    tiles: list[QueryTile] = []
    for i, (slot, _, position, _) in enumerate(singles):
        last = tiles[-1] if tiles else None
        if last is not None and slot == last.slot + last.num_rows and position + 1 == last.end_key:
            last.num_rows += 1
        else:
            tiles.append(QueryTile(slot, i, 1, _first_key(position, cache), position + 1, None))
    return tiles


def _first_key(position: int, cache: LayerCache) -> int:
    """Return the first key that a query at `position` sees."""
    return max(cache.first_visible(position), 0) if cache.is_local else 0


def _attend(query: Tensor, span: QueryTile, cache: LayerCache) -> Tensor:
    """Return the attention of query [rows, kv_heads, Q, dim] to a tile's keys, of the same shape. torch's fused kernel
    takes any strides, but no softcap and no sinks, which are computed by matrix products instead."""
    keys, values = _tile_view(cache.keys, span), _tile_view(cache.values, span)
    if cache.softcap is None and cache.sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=span.mask, scale=cache.scale)
    scores = (query * cache.scale) @ keys.transpose(2, 3)
    if cache.softcap is not None:
        scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if span.mask is not None:
        scores.masked_fill_(~span.mask, -torch.inf)
    sinks = cache.sinks
    if sinks is not None:  # rows are queries of one head, then those of the next head of the group
        sinks = sinks.view(cache.kv_heads, -1, 1).repeat_interleave(span.num_queries, 1).expand(*scores.shape[:3], 1)
    return softmax_with_sinks(scores, sinks) @ values
