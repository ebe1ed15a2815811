"""Attention through plain torch: gather the pages, then dense products. Batched over sequences and heads.

A step's queries are cut into tiles of up to TILE tokens of one sequence; tiles of like size form buckets, and each
bucket is one batched call a layer: a decode step of 32 sequences is one bucket. Where pages keep a head's tokens
together, one gather of [head, page] rows gives exactly the operand of a batched product; other layouts (tokens outside
of heads) are gathered page by page and turned, which is slower.
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
from quire.kernels.reference import write_pages
from quire.protocol.kv_cache_config import KVCacheLayout


@dataclass(slots=True)
class Bucket:
    """B tiles of up to Q queries over up to N pages. `queries` [B, Q] are rows of the step's tokens (a short tile
    repeats its last one, and a short bucket its last tile), `pages` [B, N] page ids, `rows` [B, kv_heads, N] the rows
    of their heads (None: there are no LayerCache.head_rows), `masked_out` [B, 1, Q, N * page_tokens] is true where a
    query may not look (None: nowhere), `unwritten_rows` are rows of the gathered values, as [B * kv_heads * N *
    page_tokens, dim], that hold no token of the sequence. `valid_queries` are the real ones of [B, Q] (None: all),
    `output_rows` the rows they answer.
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
    """One kind's buckets, and where the step's keys and values go: `pages` and `offsets` [T], or `slots` [T * kv_heads]
    of the rows' tokens."""

    buckets: list[Bucket]
    pages: Tensor
    offsets: Tensor
    slots: Tensor | None


class SdpaBackend:
    """See the head of the file. Buffers for gathered keys and values are kept between layers and steps."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = False
    fuses_rope = False

    def __init__(self) -> None:
        self.scratch: dict[str, Tensor] = {}

    def check_cache(self, cache: LayerCache) -> None:
        """StartupError for a cache that it can't read: one whose rows torch wouldn't count."""
        rows = cache.head_page_rows
        if rows is not None and len(rows[0]) > MAX_INDEX_ROWS:
            raise StartupError(
                f"{len(cache.keys):,} pages have {len(rows[0]):,} rows of {cache.page_tokens} tokens of a head, and "
                f"--attention sdpa takes {MAX_INDEX_ROWS:,}",
                "Use a larger --page-size or a smaller --kv-gib",
            )

    def plan(self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None) -> SdpaPlan:
        """Once a step and kind of layers, on the host: keys and values of `batch`, queries of `query_batch` if "
        "given."""
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
        attend = _attend_bmm if q.device.type == "cpu" or cache.softcap is not None else _attend_sdpa
        out = attend(query, keys, values, bucket.masked_out, cache)
        out = out.permute(0, 3, 1, 2, 4).reshape(count * width, heads, dim)
        return out if bucket.valid_queries is None else out.index_select(0, bucket.valid_queries)

    def _gather_kv(self, bucket: Bucket, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """The keys and the values of the bucket's pages, [B * kv_heads, N * page_tokens, dim] each."""
        if bucket.rows is None or cache.head_page_rows is None:
            count, dim = len(bucket.pages), cache.head_dim
            turned = (x[bucket.pages].transpose(1, 2).contiguous() for x in (cache.keys, cache.values))
            keys, values = (x.view(count * cache.kv_heads, -1, dim) for x in turned)
            return keys, values
        keys, values = cache.head_page_rows
        return self._gather("keys", keys, bucket.rows, cache), self._gather("values", values, bucket.rows, cache)

    def _gather(self, name: str, source: Tensor, rows: Tensor, cache: LayerCache) -> Tensor:
        """source[rows], in a buffer that is reused."""
        flat = rows.reshape(-1)
        numbers = flat.numel() * source.shape[1]
        scratch = self.scratch.get(name)
        if scratch is None or scratch.numel() < numbers or scratch.dtype != source.dtype:
            scratch = self.scratch[name] = torch.empty(numbers + numbers // 4, dtype=source.dtype, device=source.device)
        out = scratch[:numbers].view(flat.numel(), -1)
        torch.index_select(source, 0, flat, out=out)
        return out.view(rows.shape[0] * rows.shape[1], -1, cache.head_dim)


def _head_rows(pages: Tensor, cache: LayerCache) -> Tensor:
    """[..., 1] pages -> [..., kv_heads]: the rows of their heads, see LayerCache.head_rows."""
    size = cache.page_tokens * cache.head_dim
    heads = torch.arange(cache.kv_heads, device=pages.device) * (cache.head_stride // size)
    return pages * (cache.keys.stride(0) // size) + heads


def _attend_bmm(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, cache: LayerCache) -> Tensor:
    """softmax(query keys^T * scale) values as two batched products, with a cap if there is one; torch's fused kernel
    knows no caps, and is slow on CPUs for one query and for bf16 prompts (docs/performance.md)."""
    count, kv, shared, width, dim = query.shape
    scores = torch.bmm((query * cache.scale).reshape(count * kv, shared * width, dim), keys.transpose(1, 2))
    if cache.softcap is not None:
        scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if hidden is not None:
        scores.view(count, kv, shared, width, -1).masked_fill_(hidden[:, None], -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.bmm(weights, values).view(count, kv, shared, width, dim)


def _attend_sdpa(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, cache: LayerCache) -> Tensor:
    """The same through torch's fused kernels. The group is folded into the queries: with grouped heads and a mask torch
    has no fused kernel."""
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
    """Tiles as int64 [n, 7]: slot, first token of the step, queries, first position, first page, end position, and
    whether every query sees all up to there. Long contexts are cut into fewer queries, so that a tile's scores stay
    within MAX_SCORES."""
    ends = batch.context_lens(cache.group)
    asked = zip(batch.lengths.tolist(), ends.tolist())
    most = np.array([_max_queries(end, cache) if length > 1 else 1 for length, end in asked], dtype=np.int64)
    counts = -(-batch.lengths // most)
    row = np.repeat(np.arange(len(counts)), counts)
    cut = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[row]
    queries = np.minimum(batch.lengths[row] - cut, most[row])
    position = batch.starts[row] + cut
    page = np.zeros_like(position)
    whole = batch.bidirectional_mask[row]
    if cache.is_local:
        page = np.where(whole, 0, np.maximum(cache.first_visible(position), 0) // cache.page_tokens)
    end = np.where(whole, ends[row], position + queries)
    return np.stack([batch.slots[row], batch.offsets[row] + cut, queries, position, page, end, whole], 1)


def _max_queries(end: int, cache: LayerCache) -> int:
    """Queries of a tile whose context ends here: a power of two."""
    pages = round_up_bits(-(-end // cache.page_tokens), 5)
    fit = MAX_SCORES // (cache.heads * pages * cache.page_tokens)
    return 1 << min(max(fit, 1), QUERY_TILE).bit_length() - 1


def _group_tiles(tiles: np.ndarray, cache: LayerCache) -> list[np.ndarray]:
    """Indices of tiles that go together: of like size, so that little is padded, and within MAX_SCORES, padded."""
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
    """What a bucket of so many is padded to, so that there are few shapes."""
    return round_up_bits(tiles, 4 if queries > 1 else 3), round_up_bits(queries, 1), round_up_bits(pages, 5)


def _num_scores(tiles: int, queries: int, span: int, cache: LayerCache) -> int:
    """Numbers in the score matrix of a bucket of so many."""
    tiles, queries, pages = _padded_shape(tiles, queries, -(-span // cache.page_tokens))
    return tiles * queries * pages * cache.page_tokens * cache.heads


def _make_bucket(batch: ForwardBatch, cache: LayerCache, tiles: np.ndarray) -> Bucket:
    """The host computes what depends on the number of tiles, the device what depends on the lengths of contexts."""
    size, device = cache.page_tokens, batch.device
    known = len(tiles)
    longest = int((-(-tiles[:, 5] // size) - tiles[:, 4]).max())
    many, width, count = _padded_shape(known, int(tiles[:, 2].max()), longest)
    tiles = tiles[np.minimum(np.arange(many), known - 1)]
    _, tokens, queries, _, pages, ends, _ = tiles.T
    slots, _, asked, positions, first, end, whole = to_device(np.ascontiguousarray(tiles.T), device)
    logical = first[:, None] + torch.arange(count, device=device)
    table = batch.tables[cache.group]
    named = table[slots[:, None], logical.clamp(max=table.shape[1] - 1)]
    # Pages past the end of a short tile resolve to the scratch page, whose content is finite.
    named = named.masked_fill_(logical * size >= end[:, None], 0)
    hidden = None
    if width > 1 or cache.is_local or ((ends - pages * size) != count * size).any():
        key_at = (first * size)[:, None, None] + torch.arange(count * size, device=device)  # [B, 1, keys]
        across = torch.arange(width, device=device)
        query_at = (positions[:, None] + torch.minimum(across, (asked - 1)[:, None]))[:, :, None]
        all_of_it = (whole > 0)[:, None, None]
        hidden = key_at > torch.where(all_of_it, (end - 1)[:, None, None], query_at)
        if cache.is_local:
            hidden |= (key_at < cache.first_visible(query_at)) & ~all_of_it
        hidden = hidden[:, None]
    picked = tokens[:, None] + np.minimum(np.arange(width), queries[:, None] - 1)
    real = np.arange(width) < queries[:, None]
    real[known:] = False
    whole = width == 1 and known == many == batch.tokens.numel()
    return Bucket(
        queries=to_device(picked, device),
        pages=named,
        rows=None if cache.head_page_rows is None else _head_rows(named[:, :, None], cache).transpose(1, 2),
        masked_out=hidden,
        unwritten_rows=_unwritten_rows(ends, pages, count, cache, device),
        output_rows=None if whole else to_device(picked[real], device),
        valid_queries=None if real.all() else to_device(np.nonzero(real.reshape(-1))[0], device),
    )


def _unwritten_rows(
    ends: np.ndarray, pages: np.ndarray, count: int, cache: LayerCache, device: torch.device
) -> Tensor | None:
    """Rows of the gathered values behind each tile's end, in its last page: nobody wrote them for this sequence."""
    size, kv = cache.page_tokens, cache.kv_heads
    behind = -ends % size
    if not behind.any():
        return None
    tile = np.repeat(np.arange(len(ends)), behind)
    at = (ends - pages * size)[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(behind) - behind, behind)
    rows = (tile[:, None] * kv + np.arange(kv)) * (count * size) + at[:, None]
    return to_device(rows.reshape(-1), device)
