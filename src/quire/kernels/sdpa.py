"""Attention through plain torch: gather the pages, then dense products. Batched over sequences and heads.

A step's queries are cut into tiles of up to TILE tokens of one sequence; tiles of like size form buckets, and each
bucket is one batched call a layer: a decode step of 32 sequences is one bucket. Pages keep a head's tokens together,
so one gather of [head, page] rows gives exactly the operand of a batched product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.batch import Batch, LayerCache, to_device
from quire.specs import Layout

TILE = 256
MAX_SCORES = 1 << 23  # numbers in one bucket's score matrix, all heads together


@dataclass(slots=True)
class Bucket:
    """B tiles of up to Q queries over up to N pages. `queries` [B, Q] are rows of the step's tokens (a short tile
    repeats its last one), `pages` [B, 1, N] page ids, `hidden` [B, 1, Q, N * page_tokens] is true where a query may not
    look (None: nowhere), `unwritten` are rows of the gathered values, as [B * kv_heads * N * page_tokens, dim], that
    hold no token of the sequence. `places` are the real ones of [B, Q] (None: all), `tokens` the rows they answer.
    """

    queries: Tensor
    pages: Tensor
    hidden: Tensor | None
    unwritten: Tensor | None
    tokens: Tensor | None  # None: the queries are all the step's tokens, in order
    places: Tensor | None


@dataclass(slots=True)
class Plan:
    """One group's buckets, and where the step's keys and values go: rows of [*, dim] before the layer's own offset."""

    buckets: list[Bucket]
    writes: Tensor  # [T, kv_heads]: page * stride + head, times page_tokens, plus the offset in the page


class SdpaBackend:
    """See the head of the file. Buffers for gathered keys and values are kept between layers and steps."""

    needs = Layout.PAGED

    def __init__(self) -> None:
        self.scratch: dict[str, Tensor] = {}

    def plan(self, batch: Batch, group: int) -> Plan:
        """Once a step and layer group, on the host."""
        cache = next(c for c in batch.caches if c.group == group)
        tiles = _tiles(batch, cache.window, cache.page_tokens)
        heads = torch.arange(cache.kv_heads, device=batch.device)
        rows = batch.write_pages[group][:, None] * cache.stride + heads
        return Plan(
            [_bucket(batch, cache, tiles[part]) for part in _parts(tiles, cache)],
            rows * cache.page_tokens + batch.write_offsets[:, None],
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, scale: float) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [T, heads, dim] -> [T, heads, dim]."""
        dim, size = cache.head_dim, cache.page_tokens
        slots = cache.rows.view(-1, dim)
        writes = plan.writes.reshape(-1)
        slots.index_copy_(0, writes + cache.key_row * size, k.reshape(-1, dim))
        slots.index_copy_(0, writes + cache.value_row * size, v.reshape(-1, dim))
        if len(plan.buckets) == 1 and plan.buckets[0].tokens is None:
            return self._attend(q, plan.buckets[0], cache, scale)
        out = torch.empty_like(q)
        for bucket in plan.buckets:
            part = self._attend(q, bucket, cache, scale)
            out.index_copy_(0, bucket.tokens, part)
        return out

    def _attend(self, q: Tensor, bucket: Bucket, cache: LayerCache, scale: float) -> Tensor:
        heads, dim = q.shape[1:]
        count, width = bucket.queries.shape
        kv, shared = cache.kv_heads, heads // cache.kv_heads
        rows = bucket.pages * cache.stride + torch.arange(kv, device=q.device)[:, None]
        keys = self._gather("keys", cache.rows, rows + cache.key_row, dim)
        values = self._gather("values", cache.rows, rows + cache.value_row, dim)
        if bucket.unwritten is not None:
            values.view(-1, dim).index_fill_(0, bucket.unwritten, 0)
            if q.device.type != "cpu":  # torch's fused kernels add the mask to the scores, and NaN - inf is NaN
                keys.view(-1, dim).index_fill_(0, bucket.unwritten, 0)
        if bucket.tokens is not None or width > 1:
            q = q.index_select(0, bucket.queries.reshape(-1))
        # [B, Q, kv, shared, dim] -> [B, kv, shared, Q, dim]: a key head serves its group of query heads as one operand.
        query = q.view(count, width, kv, shared, dim).permute(0, 2, 3, 1, 4)
        if q.device.type == "cpu":
            out = _products(query, keys, values, bucket.hidden, scale)
        else:
            mask = None if bucket.hidden is None else ~bucket.hidden
            shape = (count, heads, width, dim)
            out = F.scaled_dot_product_attention(
                query.reshape(shape), keys.view(count, kv, -1, dim), values.view(count, kv, -1, dim),
                attn_mask=mask, scale=scale, enable_gqa=shared > 1,
            ).view(count, kv, shared, width, dim)  # fmt: skip
        out = out.permute(0, 3, 1, 2, 4).reshape(count * width, heads, dim)
        return out if bucket.places is None else out.index_select(0, bucket.places)

    def _gather(self, name: str, source: Tensor, rows: Tensor, dim: int) -> Tensor:
        """source[rows] as [B * kv_heads, N * page_tokens, dim], in a buffer that is reused."""
        flat = rows.reshape(-1)
        numbers = flat.numel() * source.shape[1]
        scratch = self.scratch.get(name)
        if scratch is None or scratch.numel() < numbers or scratch.dtype != source.dtype:
            scratch = self.scratch[name] = torch.empty(numbers + numbers // 4, dtype=source.dtype, device=source.device)
        out = scratch[:numbers].view(flat.numel(), -1)
        torch.index_select(source, 0, flat, out=out)
        return out.view(rows.shape[0] * rows.shape[1], -1, dim)


def _products(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """softmax(query keys^T * scale) values as two batched products; torch's fused kernel is slow on CPUs for one query
    and for bf16 prompts (docs/performance.md)."""
    count, kv, shared, width, dim = query.shape
    scores = torch.bmm((query * scale).reshape(count * kv, shared * width, dim), keys.transpose(1, 2))
    if hidden is not None:
        scores.view(count, kv, shared, width, -1).masked_fill_(hidden[:, None], -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.bmm(weights, values).view(count, kv, shared, width, dim)


def _tiles(batch: Batch, window: int | None, size: int) -> np.ndarray:
    """Tiles as int64 [n, 6]: slot, first token of the step, queries, first position, first page, end position."""
    counts = -(-batch.lengths // TILE)
    row = np.repeat(np.arange(len(counts)), counts)
    cut = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE
    queries = np.minimum(batch.lengths[row] - cut, TILE)
    position = batch.starts[row] + cut
    page = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0) // size
    return np.stack([batch.slots[row], batch.offsets[row] + cut, queries, position, page, position + queries], 1)


def _parts(tiles: np.ndarray, cache: LayerCache) -> list[np.ndarray]:
    """Indices of tiles that go together: of like size, so that little is padded, and within MAX_SCORES."""
    span = tiles[:, 5] - tiles[:, 4] * cache.page_tokens
    order = np.lexsort((span, tiles[:, 2]))
    parts, first = [], 0
    for i in range(1, len(order) + 1):
        if i < len(order):
            a, b = order[first], order[i]
            alike = tiles[b, 2] <= 1.5 * tiles[a, 2] and span[b] <= 1.5 * span[a] + 128
            widest = max(span[order[first : i + 1]].max(), 1) if tiles[b, 2] > 1 else span[b]
            small = (i + 1 - first) * tiles[b, 2] * widest * cache.kv_heads * 4 <= MAX_SCORES
            if alike and small:
                continue
        parts.append(np.sort(order[first:i]))
        first = i
    return parts


def _bucket(batch: Batch, cache: LayerCache, tiles: np.ndarray) -> Bucket:
    size, device = cache.page_tokens, batch.device
    slots, tokens, queries, positions, pages, ends = tiles.T
    width = int(queries.max())
    count = int((-(-ends // size) - pages).max())
    across = np.arange(width)
    at = np.minimum(across, queries[:, None] - 1)  # [B, Q]
    logical = pages[:, None] + np.arange(count)
    # Pages past the end of a short tile resolve to the scratch page, whose content is finite.
    held = logical < -(-ends // size)[:, None]
    table = batch.host_tables[cache.group]
    named = np.where(held, table[slots[:, None], np.minimum(logical, table.shape[1] - 1)], 0)
    key_at = pages[:, None] * size + np.arange(count * size)  # [B, N * size]
    query_at = positions[:, None] + at
    hidden = key_at[:, None] > query_at[:, :, None]
    if cache.window is not None:
        hidden |= key_at[:, None] <= query_at[:, :, None] - cache.window
    tail = (key_at >= ends[:, None]) & (key_at < (-(-ends // size) * size)[:, None])
    b, t = np.nonzero(tail)
    unwritten = None
    if len(b):
        heads = np.arange(cache.kv_heads)
        unwritten = to_device(((b[:, None] * cache.kv_heads + heads) * (count * size) + t[:, None]).reshape(-1), device)
    picked = (tokens[:, None] + at).astype(np.int64)
    whole = len(tiles) * width == batch.tokens.numel() and width == 1
    real = across < queries[:, None]
    return Bucket(
        queries=to_device(picked, device),
        pages=to_device(named[:, None, :], device),
        hidden=to_device(hidden[:, None], device) if hidden.any() else None,
        unwritten=unwritten,
        tokens=None if whole else to_device(picked[real], device),
        places=None if real.all() else to_device(np.nonzero(real.reshape(-1))[0], device),
    )
