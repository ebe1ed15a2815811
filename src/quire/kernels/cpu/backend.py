"""The attention backend on a CPU, by kernels of our own: straight over pages, nothing is gathered. Rows of one query go
through `attention_parts`, but what several have in common through `attention_common`; others in tiles through
`attention_prompt`. Results don't depend on threads, nor on which rows share a step if these have no pages in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.cpu.library import SCRATCH, Argument, Library
from quire.kernels.cpu.library_loader import library, missing_reason
from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.kernels.limits import MAX_CPU_SPLITS
from quire.protocol.kv_cache_config import KVCacheLayout

QUERY_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""Of kernels, by the dtype of queries; "_int8" follows where pages are in 8 bits."""
SPLIT_TOKENS = 256  # attention_decode.cpp, as MOST_PARTS
SHARED_PREFIX_SPLITS = 8  # attention.h
MIN_SHARED_PREFIX_ROWS = 4  # that it pays to put together
TILE_ROWS = 192  # queries of a tile, those of all its heads
BLOCK = 128  # keys at once, attention_prompt.cpp


class RotaryTable(Protocol):
    """A rotary embedding: its fp32 table [length, 2, dim / 2] of cos and sin."""

    table: Tensor | None


class HeadNorm(Protocol):
    """An RMS norm of one head."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class CpuAttentionPlan:
    """A step of one kind of layers. Keys and values are those of tokens with these `token_slots` and `positions` [T],
    which go to `cache_positions` of their pages (None: their positions). Queries are rows of one (`slots`,
    `last_positions`, the cells of their tokens, and `query_rows` among the queries; None: in order), or in `tiles`
    (attention_prompt.cpp). `merges_splits`: some row may have several parts. `query_indices` are the tokens that have
    queries (None: all). `prompts` [slots], where cells are to be computed of positions by `budget`. `shared_prefixes`:
    what rows of one have in common (None: not asked)."""

    tables: Tensor
    token_slots: Tensor
    positions: Tensor
    cache_positions: Tensor | None
    slots: Tensor | None
    last_positions: Tensor | None
    query_rows: Tensor | None
    tiles: Tensor | None
    merges_splits: bool
    query_indices: Tensor | None = None
    prompts: Tensor | None = None
    budget: int = 0
    shared_prefixes: Tensor | None = None


class CpuDecodeBatch(NamedTuple):
    """A step of one token a row, each [R], in memory that stays; `prompts` [slots] where layers have budgets."""

    slots: Tensor
    positions: Tensor
    prompts: Tensor | None = None


def tile_queries(shared: int, dim: int) -> int:
    """Queries of a tile, for so many query heads of a key head; 0 where a thread's scratch has no room for one."""
    width = -(-dim // 32) * 32
    rest = 4 * (2 * BLOCK * width + 2 * 16 * BLOCK)
    rows = (SCRATCH - rest) // (4 * (2 * width + 6)) // 16 * 16
    decoding = 4 * shared * (2 * width + BLOCK)
    return 0 if shared > rows or decoding > SCRATCH else max(min(rows, TILE_ROWS) // shared, 1)


def supports(dtype: torch.dtype, shared: int, dim: int) -> bool:
    """Whether the kernels are for such numbers, and so many query heads of this size for each key head."""
    return dtype in QUERY_SUFFIXES and tile_queries(shared, dim) > 0


class NativeBackend:
    """`deterministic`: no result depends on how many of a row's tokens share a step: all go through one kernel. Any
    strides will do, and tokens that follow one another."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = True
    fuses_rope = True

    def __init__(self, *, deterministic: bool = False, kernels: Library | None = None) -> None:
        """`kernels`: those of the process, unless given. StartupError if it has none."""
        found = kernels or library()
        if found is None:
            raise StartupError(
                f"--attention is native, and there are no kernels for this CPU: {missing_reason()}",
                "Or use --attention sdpa",
            )
        self.library, self.deterministic = found, deterministic
        self.split_scratch = torch.empty(0)

    @property
    def num_chunks(self) -> int:
        """Of an operation whose work a kernel divides by itself."""
        return 8 * self.library.threads if self.library.threads > 1 else 1

    def check_cache(self, cache: LayerCache) -> None:
        """StartupError for a cache that it can't read."""
        shared = cache.heads // cache.kv_heads
        dtype = torch.float32 if cache.is_int8 else cache.dtype
        if not supports(dtype, shared, cache.head_dim) or cache.device.type != "cpu":
            raise StartupError(
                f"--attention is native, and a layer has {shared} query heads of {cache.head_dim} numbers a key head, "
                f"in {cache.dtype} on {cache.device.type}",
                "Use --attention sdpa",
            )
        assert cache.scale > 0, "more alike is more likely"

    def plan(self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None) -> CpuAttentionPlan:
        """Once a step and kind of layers, on the host: keys and values of `batch`, queries of `query_batch` if "
        "given."""
        of, inside = (query_batch or batch).for_cache(cache), batch.for_cache(cache)
        whole, contexts = of.bidirectional_mask, of.context_lens(cache.group)
        single = np.zeros_like(whole) if self.deterministic else (of.lengths == 1) & ~whole
        one, many = np.flatnonzero(single), np.flatnonzero(~single)
        slots, last, places = (torch.from_numpy(x[one]) for x in (of.slots, contexts - 1, of.offsets))
        tables = batch.tables[cache.group]
        common = self._find_shared_prefixes(slots, last, tables, cache)
        return CpuAttentionPlan(
            tables=tables,
            token_slots=batch.token_slots,
            positions=batch.positions,
            cache_positions=None if inside is batch else inside.positions,
            slots=slots if len(one) else None,
            last_positions=last if len(one) else None,
            query_rows=places if len(many) else None,
            tiles=torch.from_numpy(_prompt_tiles(of, many, cache)) if len(many) else None,
            merges_splits=len(one) > 0 and (common is not None or int(contexts[one].max()) > SPLIT_TOKENS),
            query_indices=None if query_batch is None else query_batch.logits_indices,
            shared_prefixes=common,
        )

    def decode_batch(self, slots: Tensor, positions: Tensor, prompts: Tensor | None = None) -> CpuDecodeBatch:
        """A step of one token a row: `slots` and `positions` [R] in memory that stays. A tape may record it and the
        plans made of it: they serve whatever both hold when it runs."""
        return CpuDecodeBatch(slots, positions, prompts)

    def plan_decode(self, step: CpuDecodeBatch, tables: Tensor, cache: LayerCache) -> CpuAttentionPlan:
        """As `plan`, for such a step and the page tables of the cache's group."""
        budget = 0 if step.prompts is None else cache.budget or 0
        tiles = step.slots.new_empty((len(step.slots), 6)) if self.deterministic else None
        if tiles is not None:
            self.library.call(
                "attention_tiles", 1, step.slots, step.positions, len(step.slots), tiles, step.prompts, budget
            )
        common = self._find_shared_prefixes(step.slots, step.positions, tables, cache)
        return CpuAttentionPlan(
            tables, step.slots, step.positions, None,
            slots=step.slots if tiles is None else None, last_positions=step.positions, query_rows=None, tiles=tiles,
            merges_splits=common is not None or tables.shape[1] * cache.page_tokens > SPLIT_TOKENS,
            prompts=step.prompts if budget else None, budget=budget, shared_prefixes=common,
        )  # fmt: skip

    def _find_shared_prefixes(
        self, slots: Tensor, positions: Tensor, tables: Tensor, cache: LayerCache
    ) -> Tensor | None:
        """Which rows of one query have pages in common, where layers see all that is before them; None where that is
        not asked, so that a row's bits don't depend on others."""
        rows = len(slots)
        if (
            self.deterministic
            or rows < MIN_SHARED_PREFIX_ROWS
            or cache.is_local
            or cache.budget is not None
            or cache.contiguous
        ):
            return None
        found = slots.new_empty(1 + 7 * rows)
        self.library.call(
            "attention_share", 1, slots, positions, tables, tables.stride(0), cache.page_tokens, rows,
            tile_queries(cache.heads // cache.kv_heads, cache.head_dim), MIN_SHARED_PREFIX_ROWS, found,
        )  # fmt: skip
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: CpuAttentionPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            self._write_kv(None, k, v, None, None, cache, plan)
        return self.attend_cached(q, cache, plan)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotary: RotaryTable | None,
        norms: tuple[HeadNorm, HeadNorm] | None,
        cache: LayerCache,
        plan: CpuAttentionPlan,
    ) -> Tensor:
        """The same from qkv [T, heads + 2 kv_heads, dim], whose queries and keys are first normalised and rotated where
        asked: one operation does that and the write. Queries are rotated in place. Of a cache that isn't written, qkv
        may hold the queries alone."""
        q, table = qkv[:, : cache.heads], None if rotary is None else rotary.table
        k, v = (qkv[:, i : i + cache.kv_heads] for i in (cache.heads, cache.heads + cache.kv_heads))
        self._write_kv(q if rotary is not None or norms is not None else None, k, v, table, norms, cache, plan)
        return self.attend_cached(
            q if plan.query_indices is None else q.index_select(0, plan.query_indices), cache, plan
        )

    def _write_kv(
        self, q: Tensor | None, k: Tensor, v: Tensor, rotary: Tensor | None, norms: tuple[HeadNorm, HeadNorm] | None,
        cache: LayerCache, plan: CpuAttentionPlan,
    ) -> None:  # fmt: skip
        """Queries (None: they stay as they are) in place, keys and values to their pages."""
        if q is None and not cache.writes_kv:
            return
        tokens = len(plan.positions)
        q_weight, k_weight, eps = (
            (None, None, 0.0) if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
        )
        k, v = _dense_heads(k), _dense_heads(v)
        q_stride = 0 if q is None else q.stride(0)
        chunks = min(tokens, self.num_chunks)
        self.library.call(
            f"attention_write_{_kernel_suffix(k, cache)}", chunks, *self._cache_args(cache, plan.tables),
            q, k, v, q, q_stride, k.stride(0), v.stride(0), q_stride, plan.token_slots, plan.positions,
            plan.cache_positions,
            rotary, q_weight, k_weight, float(eps), tokens, chunks, int(cache.writes_kv), plan.prompts, plan.budget,
            int(q_weight is not None and q_weight.dtype == torch.float32),
        )  # fmt: skip

    def attend_cached(self, q: Tensor, cache: LayerCache, plan: CpuAttentionPlan) -> Tensor:
        """The attention of q [Q, heads, dim] to what is in the pages."""
        q = _dense_heads(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        suffix, common = _kernel_suffix(q, cache), self._cache_args(cache, plan.tables)
        seeing: tuple[Argument, ...] = (
            float(cache.scale), float(cache.softcap or 0), cache.window or 0, cache.chunk or 0,
        )  # fmt: skip
        if plan.tiles is not None:
            chunks = len(plan.tiles) * cache.kv_heads
            self.library.call(f"attention_prompt_{suffix}", chunks, *common, q, q.stride(0), out, plan.tiles, *seeing)
        if plan.slots is not None:
            rows, chunks = len(plan.slots), self.num_chunks
            args = (
                *common, q, q.stride(0), out, plan.slots, plan.last_positions, plan.query_rows, rows, chunks, *seeing,
                self._split_scratch(rows, cache), plan.prompts, plan.budget, plan.shared_prefixes,
            )  # fmt: skip
            if plan.shared_prefixes is not None:
                self.library.call(f"attention_common_{suffix}", chunks, *args)
            self.library.call(f"attention_parts_{suffix}", chunks, *args)
            if plan.merges_splits:
                self.library.call(f"attention_join_{suffix}", chunks, *args)
        return out

    def _split_scratch(self, rows: int, cache: LayerCache) -> Tensor:
        """Where parts of rows meet: the same for all layers, which follow one another. Memory that is never written is
        never taken."""
        numbers = rows * (SHARED_PREFIX_SPLITS + MAX_CPU_SPLITS) * cache.heads * (-(-cache.head_dim // 32) * 32 + 2)
        if len(self.split_scratch) < numbers:
            self.split_scratch = torch.empty(numbers, dtype=torch.float32)
        return self.split_scratch

    def _cache_args(self, cache: LayerCache, tables: Tensor) -> tuple[Argument, ...]:
        """The first arguments of all kernels (attention.h)."""
        return (
            cache.keys, cache.values, cache.keys.stride(0), cache.head_stride, cache.token_stride, cache.page_tokens,
            tables, tables.stride(0), cache.kv_heads, cache.head_dim, cache.heads,
        )  # fmt: skip


def _kernel_suffix(x: Tensor, cache: LayerCache) -> str:
    """Of the kernels for queries like x."""
    assert cache.is_int8 or x.dtype == cache.dtype, f"queries in {x.dtype}, keys in {cache.dtype}"
    return QUERY_SUFFIXES[x.dtype] + "_int8" * cache.is_int8


def _dense_heads(x: Tensor) -> Tensor:
    """x [T, heads, dim] with the heads of a token one after another."""
    return x if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) else x.contiguous()


def _prompt_tiles(batch: ForwardBatch, rows: np.ndarray, cache: LayerCache) -> np.ndarray:
    """Tiles of these rows, int64 [n, 6]: slot, first query, queries, where it is, end of what is seen, and whether all
    of them see all of it. The largest come first, so that threads end together."""
    most = tile_queries(cache.heads // cache.kv_heads, cache.head_dim)
    lengths, ends = batch.lengths[rows], batch.context_lens(cache.group)[rows]
    counts = -(-lengths // most)
    row = np.repeat(np.arange(len(rows)), counts)
    cut = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    queries = np.minimum(lengths[row] - cut, most)
    position, whole = batch.starts[rows][row] + cut, batch.bidirectional_mask[rows][row]
    end = np.where(whole, ends[row], position + queries)
    tiles = np.stack([batch.slots[rows][row], batch.offsets[rows][row] + cut, queries, position, end, whole], 1)
    return np.ascontiguousarray(tiles[np.argsort(-end * queries, kind="stable")].astype(np.int64))
