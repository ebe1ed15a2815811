"""Attention in plain torch: gather the pages, then dense products, batched over sequences and heads.

A step's queries are cut into tiles of up to QUERY_TILE tokens of one sequence. Tiles of similar size form a bucket, and
each bucket is one batched call a layer: a decode step of 32 sequences is one bucket. Where a head's tokens are
contiguous in a page, one gather of [head, page] rows gives the operand of a batched product; with other layouts (tokens
outside of heads) pages are gathered and transposed, which is slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.forward_batch import ForwardBatch, LayerCache, to_device
from quire.kernels.limits import MAX_INDEX_ROWS, MAX_SCORES, QUERY_TILE
from quire.kernels.onednn import round_up_bits
from quire.kernels.reference import softmax_with_sinks, write_pages
from quire.protocol.kv_cache_config import KVCacheLayout


@dataclass(slots=True)
class Bucket:
    """B tiles of up to Q queries over up to N pages.

    `queries` [B, Q] are token indices of the step; a short tile is padded with its last query, and a short bucket with
    its last tile. `pages` [B, N] are page ids, `rows` [B, kv_heads, N] the indices of their heads in
    LayerCache.head_page_rows (None: the cache has none). `masked_out` [B, 1, Q, N * page_tokens] is true where a query
    does not see a key (None: nowhere). `unwritten_rows` are the rows of the gathered values, as [B * kv_heads * N *
    page_tokens, dim], that hold no token of the sequence. `valid_queries` are the flat indices in [B, Q] that are no
    padding (None: all), and `output_rows` the rows of the result that they compute.
    """

    queries: Tensor
    pages: Tensor
    rows: Tensor | None
    masked_out: Tensor | None
    unwritten_rows: Tensor | None
    output_rows: Tensor | None  # None: the queries are all the step's tokens, in order
    valid_queries: Tensor | None


@dataclass(slots=True)
class SdpaPlan:
    """A step's buckets, and where its keys and values are written: `pages` and `offsets` [T], or, as indices of tokens
    in LayerCache.head_page_rows, `slots` [T * kv_heads]."""

    buckets: list[Bucket]
    pages: Tensor
    offsets: Tensor
    slots: Tensor | None


class SdpaBackend:
    """The backend that the module's docstring describes. Layers and steps reuse its buffers for gathered keys and
    values."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = False
    fuses_rope = False

    def __init__(self) -> None:
        self.scratch: dict[str, Tensor] = {}

    def check_cache(self, cache: LayerCache) -> None:
        """Raise StartupError if the cache has more rows than torch can index."""
        rows = cache.head_page_rows
        if rows is not None and len(rows[0]) > MAX_INDEX_ROWS:
            raise StartupError(
                f"{len(cache.keys):,} pages have {len(rows[0]):,} rows of {cache.page_tokens} tokens of a head, and "
                f"--attention sdpa takes {MAX_INDEX_ROWS:,}",
                "Use a larger --page-size or a smaller --kv-gib",
            )

    def plan(self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None) -> SdpaPlan:
        """Return the plan for all layers with this `plan_key`, computed on the host once a step: keys and values of
        `batch`, queries of `query_batch` if given."""
        query_batch, batch = (query_batch or batch).for_cache(cache), batch.for_cache(cache)
        tiles = _make_tiles(query_batch, cache)
        pages, offsets = batch.slot_mapping(cache)
        slots = None
        if cache.head_page_rows is not None:
            slots = _head_rows(pages[:, None], cache) * cache.page_tokens + offsets[:, None]
        return SdpaPlan(
            [_make_bucket(query_batch, cache, tiles[part]) for part in _group_tiles(tiles, cache)],
            pages,
            offsets,
            None if slots is None else slots.reshape(-1),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: SdpaPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            self._write(k, v, cache, plan)
        if len(plan.buckets) == 1 and plan.buckets[0].output_rows is None:
            return self._attend(q, plan.buckets[0], cache)
        out = torch.empty_like(q)
        for bucket in plan.buckets:
            assert bucket.output_rows is not None, "a bucket without output_rows is the only one"
            part = self._attend(q, bucket, cache)
            out.index_copy_(0, bucket.output_rows, part)
        return out

    def _write(self, k: Tensor, v: Tensor, cache: LayerCache, plan: SdpaPlan) -> None:
        if plan.slots is None or cache.head_page_rows is None:
            write_pages(cache.keys, cache.values, k, v, plan.pages, plan.offsets)
            return
        dim = cache.head_dim
        keys, values = cache.head_page_rows
        keys.view(-1, dim).index_copy_(0, plan.slots, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, plan.slots, v.reshape(-1, dim))

    def _attend(self, q: Tensor, bucket: Bucket, cache: LayerCache) -> Tensor:
        heads, dim = q.shape[1:]
        count, width = bucket.queries.shape
        kv, shared = cache.kv_heads, heads // cache.kv_heads
        keys, values = self._gather_kv(bucket, cache)
        if bucket.unwritten_rows is not None:
            values.view(-1, dim).index_fill_(0, bucket.unwritten_rows, 0)
            if q.device.type != "cpu":  # torch's fused kernels add the mask to the scores, and NaN - inf is NaN
                keys.view(-1, dim).index_fill_(0, bucket.unwritten_rows, 0)
        if bucket.output_rows is not None or width > 1:
            q = q.index_select(0, bucket.queries.reshape(-1))
        # [B, Q, kv, shared, dim] -> [B, kv, shared, Q, dim]: a key head serves its group of query heads as one operand.
        query = q.view(count, width, kv, shared, dim).permute(0, 2, 3, 1, 4)
        plain = cache.softcap is None and cache.sinks is None
        attend = _attend_sdpa if plain and q.device.type != "cpu" else _attend_bmm
        out = attend(query, keys, values, bucket.masked_out, cache)
        out = out.permute(0, 3, 1, 2, 4).reshape(count * width, heads, dim)
        return out if bucket.valid_queries is None else out.index_select(0, bucket.valid_queries)

    def _gather_kv(self, bucket: Bucket, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the bucket's pages, [B * kv_heads, N * page_tokens, dim] each."""
        if bucket.rows is None or cache.head_page_rows is None:
            count, dim = len(bucket.pages), cache.head_dim
            turned = (x[bucket.pages].transpose(1, 2).contiguous() for x in (cache.keys, cache.values))
            keys, values = (x.view(count * cache.kv_heads, -1, dim) for x in turned)
            return keys, values
        keys, values = cache.head_page_rows
        return self._gather("keys", keys, bucket.rows, cache), self._gather("values", values, bucket.rows, cache)

    def _gather(self, name: str, source: Tensor, rows: Tensor, cache: LayerCache) -> Tensor:
        """Return source[rows], in the scratch buffer `name`."""
        flat = rows.reshape(-1)
        numbers = flat.numel() * source.shape[1]
        scratch = self.scratch.get(name)
        if scratch is None or scratch.numel() < numbers or scratch.dtype != source.dtype:
            scratch = self.scratch[name] = torch.empty(numbers + numbers // 4, dtype=source.dtype, device=source.device)
        out = scratch[:numbers].view(flat.numel(), -1)
        torch.index_select(source, 0, flat, out=out)
        return out.view(rows.shape[0] * rows.shape[1], -1, cache.head_dim)


def _head_rows(pages: Tensor, cache: LayerCache) -> Tensor:
    """Return the indices of the pages' heads in LayerCache.head_page_rows: pages [..., 1] -> [..., kv_heads]."""
    size = cache.page_tokens * cache.head_dim
    heads = torch.arange(cache.kv_heads, device=pages.device) * (cache.head_stride // size)
    return pages * (cache.keys.stride(0) // size) + heads


def _attend_bmm(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, cache: LayerCache) -> Tensor:
    """Return softmax(query keys^T * scale) values by two batched products, with the layer's softcap and sinks, if any.
    torch's fused kernel has neither, and is slow on CPUs for bf16 prompts and for one query: 1.8 to 9.7 ms a layer for
    32 rows of 192 tokens, where this takes 0.4 with the gather."""
    count, kv, shared, width, dim = query.shape
    scores = torch.bmm((query * cache.scale).reshape(count * kv, shared * width, dim), keys.transpose(1, 2))
    if cache.softcap is not None:
        scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if hidden is not None:
        scores.view(count, kv, shared, width, -1).masked_fill_(hidden[:, None], -torch.inf)
    sinks = cache.sinks
    if sinks is not None:
        sinks = sinks.view(1, kv, shared, 1, 1).expand(count, kv, shared, width, 1).reshape(*scores.shape[:2], 1)
    weights = softmax_with_sinks(scores, sinks)
    return torch.bmm(weights, values).view(count, kv, shared, width, dim)


def _attend_sdpa(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, cache: LayerCache) -> Tensor:
    """Return the same by torch's fused kernels. Query heads that share a key head are folded into the queries, because
    torch has no fused kernel for grouped heads and a mask."""
    count, kv, shared, width, dim = query.shape
    mask = None if hidden is None else ~hidden
    if mask is not None and width > 1:
        mask = mask.repeat(1, 1, shared, 1)
    out = F.scaled_dot_product_attention(
        query.reshape(count, kv, shared * width, dim), keys.view(count, kv, -1, dim), values.view(count, kv, -1, dim),
        attn_mask=mask, scale=cache.scale,
    )  # fmt: skip
    return out.view(count, kv, shared, width, dim)


def _make_tiles(batch: ForwardBatch, cache: LayerCache) -> np.ndarray:
    """Return the tiles, int64 [n, 7]: slot, first token of the step, queries, first position, first page, end
    position, and 1 if the tile is bidirectional: every query sees all up to the end, or 2 if from its window on.
    Tiles of long contexts have fewer queries, so that a tile's scores stay within MAX_SCORES."""
    ends = batch.context_lens(cache.group)
    rows = zip(batch.lengths.tolist(), ends.tolist())
    most = np.array([_max_queries(end, cache) if length > 1 else 1 for length, end in rows], dtype=np.int64)
    counts = -(-batch.lengths // most)
    row = np.repeat(np.arange(len(counts)), counts)
    cut = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[row]
    queries = np.minimum(batch.lengths[row] - cut, most[row])
    position = batch.starts[row] + cut
    page = np.zeros_like(position)
    bidirectional = batch.bidirectional_mask[row]
    if cache.is_local:
        unbound = bidirectional & (not batch.bidirectional_in_window)
        page = np.where(unbound, 0, np.maximum(cache.first_visible(position), 0) // cache.page_tokens)
    end = np.where(bidirectional, ends[row], position + queries)
    both_ways = bidirectional * (1 + batch.bidirectional_in_window)
    return np.stack([batch.slots[row], batch.offsets[row] + cut, queries, position, page, end, both_ways], 1)


def _max_queries(end: int, cache: LayerCache) -> int:
    """Return the queries of a tile whose context ends at `end`: a power of two."""
    pages = round_up_bits(-(-end // cache.page_tokens), 5)
    fit = MAX_SCORES // (cache.heads * pages * cache.page_tokens)
    return 1 << min(max(fit, 1), QUERY_TILE).bit_length() - 1


def _group_tiles(tiles: np.ndarray, cache: LayerCache) -> list[np.ndarray]:
    """Return the tile indices of each bucket: tiles of similar size, so that padding is small, whose padded scores stay
    within MAX_SCORES."""
    span = tiles[:, 5] - tiles[:, 4] * cache.page_tokens
    order = np.lexsort((span, tiles[:, 2]))
    queries, spans = tiles[order, 2].tolist(), span[order].tolist()
    parts, first, widest = [], 0, 0
    for i in range(len(order) + 1):
        if i < len(order):
            widest = max(widest, spans[i])
            alike = queries[i] <= 1.5 * queries[first] and spans[i] <= 1.5 * spans[first] + 128
            if i == first or (alike and _num_scores(i + 1 - first, queries[i], widest, cache) <= MAX_SCORES):
                continue
        parts.append(np.sort(order[first:i]))
        first, widest = i, spans[i] if i < len(order) else 0
    return parts


def _padded_shape(tiles: int, queries: int, pages: int) -> tuple[int, int, int]:
    """Return the padded (tiles, queries, pages) of a bucket, rounded up so that there are few shapes."""
    return round_up_bits(tiles, 4 if queries > 1 else 3), round_up_bits(queries, 1), round_up_bits(pages, 5)


def _num_scores(tiles: int, queries: int, span: int, cache: LayerCache) -> int:
    """Return the size of a bucket's score matrix; `span` is its longest context in tokens."""
    tiles, queries, pages = _padded_shape(tiles, queries, -(-span // cache.page_tokens))
    return tiles * queries * pages * cache.page_tokens * cache.heads


def _make_bucket(batch: ForwardBatch, cache: LayerCache, tiles: np.ndarray) -> Bucket:
    """Return the bucket of these tiles. The host computes the arrays sized by tiles, the device those sized by
    contexts."""
    size, device = cache.page_tokens, batch.device
    num_tiles = len(tiles)
    longest = int((-(-tiles[:, 5] // size) - tiles[:, 4]).max())
    many, width, count = _padded_shape(num_tiles, int(tiles[:, 2].max()), longest)
    tiles = tiles[np.minimum(np.arange(many), num_tiles - 1)]
    _, tokens, queries, _, pages, ends, _ = tiles.T
    slots, _, num_queries, positions, first, end, both_ways = to_device(np.ascontiguousarray(tiles.T), device)
    logical = first[:, None] + torch.arange(count, device=device)
    table = batch.tables[cache.group]
    page_ids = table[slots[:, None], logical.clamp(max=table.shape[1] - 1)]
    # Pages after the end of a short tile become the scratch page, whose content is finite.
    page_ids = page_ids.masked_fill_(logical * size >= end[:, None], 0)
    hidden = None
    if width > 1 or cache.is_local or ((ends - pages * size) != count * size).any():
        key_at = (first * size)[:, None, None] + torch.arange(count * size, device=device)  # [B, 1, keys]
        across = torch.arange(width, device=device)
        query_at = (positions[:, None] + torch.minimum(across, (num_queries - 1)[:, None]))[:, :, None]
        bidirectional = (both_ways > 0)[:, None, None]
        hidden = key_at > torch.where(bidirectional, (end - 1)[:, None, None], query_at)
        if cache.is_local:
            hidden |= (key_at < cache.first_visible(query_at)) & (both_ways != 1)[:, None, None]
        hidden = hidden[:, None]
    indices = tokens[:, None] + np.minimum(np.arange(width), queries[:, None] - 1)
    real = np.arange(width) < queries[:, None]
    real[num_tiles:] = False
    in_order = width == 1 and num_tiles == many == batch.tokens.numel()
    return Bucket(
        queries=to_device(indices, device),
        pages=page_ids,
        rows=None if cache.head_page_rows is None else _head_rows(page_ids[:, :, None], cache).transpose(1, 2),
        masked_out=hidden,
        unwritten_rows=_unwritten_rows(ends, pages, count, cache, device),
        output_rows=None if in_order else to_device(indices[real], device),
        valid_queries=None if real.all() else to_device(np.nonzero(real.reshape(-1))[0], device),
    )


def _unwritten_rows(
    ends: np.ndarray, pages: np.ndarray, count: int, cache: LayerCache, device: torch.device
) -> Tensor | None:
    """Return the rows of the gathered values after each tile's end, in its last page: they are not written for this
    sequence."""
    size, kv = cache.page_tokens, cache.kv_heads
    unwritten = -ends % size
    if not unwritten.any():
        return None
    tile = np.repeat(np.arange(len(ends)), unwritten)
    at = (ends - pages * size)[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(unwritten) - unwritten, unwritten)
    rows = (tile[:, None] * kv + np.arange(kv)) * (count * size) + at[:, None]
    return to_device(rows.reshape(-1), device)
