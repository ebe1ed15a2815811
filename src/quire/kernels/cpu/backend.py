"""The attention backend on a CPU, by native kernels that read pages in place. Rows of one query are computed by
`attention_parts`, except prefixes that several rows share, by `attention_common`; other rows in tiles by
`attention_prompt`. Results do not depend on threads, nor on the other rows of a step if these share no pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.cpu.library import SCRATCH, Argument, Library
from quire.kernels.cpu.library_loader import library, missing_reason
from quire.kernels.forward_batch import ForwardBatch, HeadNorms, LayerCache, RotaryTable
from quire.kernels.limits import MAX_CPU_SPLITS
from quire.protocol.kv_cache_config import KVCacheLayout

QUERY_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""Suffixes of kernel names by the dtype of queries; "_int8" follows where pages are in int8."""
SPLIT_TOKENS = 256  # PART of attention_decode.cpp; its MOST is MAX_CPU_SPLITS
SHARED_PREFIX_SPLITS = 8  # COMMON_PARTS of attention.h
MIN_SHARED_PREFIX_ROWS = 4  # with fewer rows, computing a shared prefix once does not pay
TILE_ROWS = 192  # the most queries of a tile, times its heads
BLOCK = 128  # keys at once, as in attention_prompt.cpp


@dataclass(slots=True)
class CpuAttentionPlan:
    """A step's plan for layers with the same `plan_key`.

    Keys and values are those of the tokens with these `token_slots` and `positions` [T]; they are written to
    `cache_positions` in their sequences' pages (None: to their positions). Rows of one query: `slots`, the cache
    positions of their tokens `last_positions`, and their query indices `query_rows` (None: in order). All other queries
    are in `tiles` (attention_prompt.cpp). `merges_splits`: the context of some row may be split. `query_indices` are
    the tokens that have queries (None: all). `prompts` [slots] are prompt lengths, from which kernels compute cache
    positions if layers have a `budget`. `shared_prefixes`: page prefixes that rows of one query share, see attention.h
    (None: not computed)."""

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
    """A step of one token a row, `slots` and `positions` [R], in buffers that are reused by every step; `prompts`
    [slots] only where layers have budgets."""

    slots: Tensor
    positions: Tensor
    prompts: Tensor | None = None


def tile_queries(shared: int, dim: int) -> int:
    """Return the queries of a tile, if `shared` query heads share a key head; 0 if a thread's scratch memory is too
    small for one."""
    width = -(-dim // 32) * 32
    rest = 4 * (2 * BLOCK * width + 2 * 16 * BLOCK)
    rows = (SCRATCH - rest) // (4 * (2 * width + 6)) // 16 * 16
    decoding = 4 * shared * (2 * width + BLOCK)
    return 0 if shared > rows or decoding > SCRATCH else max(min(rows, TILE_ROWS) // shared, 1)


def supports(dtype: torch.dtype, shared: int, dim: int) -> bool:
    """Return True if the kernels support this dtype, and `shared` query heads of `dim` numbers for each key head."""
    return dtype in QUERY_SUFFIXES and tile_queries(shared, dim) > 0


class NativeBackend:
    """The native backend. `deterministic`: one kernel computes all queries, so that no result depends on how many of a
    row's tokens are in the step. Takes any strides, and contiguous caches too."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = True
    fuses_rope = True

    def __init__(self, *, deterministic: bool = False, kernels: Library | None = None) -> None:
        """`kernels`: by default the process's library. Raise StartupError if there is none."""
        loaded = kernels or library()
        if loaded is None:
            raise StartupError(
                f"--attention is native, and there are no kernels for this CPU: {missing_reason()}",
                "Or use --attention sdpa",
            )
        self.library, self.deterministic = loaded, deterministic
        self.split_scratch = torch.empty(0)

    @property
    def num_chunks(self) -> int:
        """Return the chunks of an operation whose kernel divides the work itself."""
        return 8 * self.library.threads if self.library.threads > 1 else 1

    def check_cache(self, cache: LayerCache) -> None:
        """Raise StartupError if the kernels do not support this cache."""
        shared = cache.heads // cache.kv_heads
        dtype = torch.float32 if cache.is_int8 else cache.dtype
        if not supports(dtype, shared, cache.head_dim) or cache.device.type != "cpu":
            raise StartupError(
                f"--attention is native, and a layer has {shared} query heads of {cache.head_dim} numbers a key head, "
                f"in {cache.dtype} on {cache.device.type}",
                "Use --attention sdpa",
            )
        assert cache.scale > 0, f"the scale of attention is {cache.scale}, and must be positive"

    def plan(self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None) -> CpuAttentionPlan:
        """Return the plan for all layers with this `plan_key`, computed on the host once a step: keys and values of
        `batch`, queries of `query_batch` if given."""
        of, cached = (query_batch or batch).for_cache(cache), batch.for_cache(cache)
        bidirectional, contexts = of.bidirectional_mask, of.context_lens(cache.group)
        single = np.zeros_like(bidirectional) if self.deterministic else (of.lengths == 1) & ~bidirectional
        one, many = np.flatnonzero(single), np.flatnonzero(~single)
        slots, last, queries = (torch.from_numpy(x[one]) for x in (of.slots, contexts - 1, of.offsets))
        tables = batch.tables[cache.group]
        prefixes = self._find_shared_prefixes(slots, last, tables, cache)
        return CpuAttentionPlan(
            tables=tables,
            token_slots=batch.token_slots,
            positions=batch.positions,
            cache_positions=None if cached is batch else cached.positions,
            slots=slots if len(one) else None,
            last_positions=last if len(one) else None,
            query_rows=queries if len(many) else None,
            tiles=torch.from_numpy(_prompt_tiles(of, many, cache)) if len(many) else None,
            merges_splits=len(one) > 0 and (prefixes is not None or int(contexts[one].max()) > SPLIT_TOKENS),
            query_indices=None if query_batch is None else query_batch.logits_indices,
            shared_prefixes=prefixes,
        )

    def decode_batch(self, slots: Tensor, positions: Tensor, prompts: Tensor | None = None) -> CpuDecodeBatch:
        """Return a step of one token a row, at `positions` [R], in `slots` [R]. It and its plans may be recorded: each
        run reads what these buffers hold then."""
        return CpuDecodeBatch(slots, positions, prompts)

    def plan_captured(self, step: CpuDecodeBatch, tables: Tensor, cache: LayerCache) -> CpuAttentionPlan:
        """Return the plan of such a step; `tables` are the page tables of the cache's group."""
        budget = 0 if step.prompts is None else cache.budget or 0
        tiles = step.slots.new_empty((len(step.slots), 6)) if self.deterministic else None
        if tiles is not None:
            self.library.call(
                "attention_tiles", 1, step.slots, step.positions, len(step.slots), tiles, step.prompts, budget
            )
        prefixes = self._find_shared_prefixes(step.slots, step.positions, tables, cache)
        return CpuAttentionPlan(
            tables, step.slots, step.positions, None,
            slots=step.slots if tiles is None else None, last_positions=step.positions, query_rows=None, tiles=tiles,
            merges_splits=prefixes is not None or tables.shape[1] * cache.page_tokens > SPLIT_TOKENS,
            prompts=step.prompts if budget else None, budget=budget, shared_prefixes=prefixes,
        )  # fmt: skip

    def _find_shared_prefixes(
        self, slots: Tensor, positions: Tensor, tables: Tensor, cache: LayerCache
    ) -> Tensor | None:
        """Return the page prefixes that rows of one query share, or None: for layers that do not see whole contexts,
        for few rows, and if deterministic, because then a row's bits must not depend on other rows."""
        rows = len(slots)
        if (
            self.deterministic
            or rows < MIN_SHARED_PREFIX_ROWS
            or cache.is_local
            or cache.budget is not None
            or cache.contiguous
        ):
            return None
        prefixes = slots.new_empty(1 + 7 * rows)
        self.library.call(
            "attention_share", 1, slots, positions, tables, tables.stride(0), cache.page_tokens, rows,
            tile_queries(cache.heads // cache.kv_heads, cache.head_dim), MIN_SHARED_PREFIX_ROWS, prefixes,
        )  # fmt: skip
        return prefixes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: CpuAttentionPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            self._write_kv(None, k, v, None, None, cache, plan)
        return self.attend_cached(q, cache, plan)

    def rotate_and_attend(
        self, qkv: Tensor, rotary: RotaryTable | None, norms: HeadNorms | None, cache: LayerCache,
        plan: CpuAttentionPlan,
    ) -> Tensor:  # fmt: skip
        """Attend from qkv [T, heads + 2 kv_heads, dim], which is first normalised, if `norms`, and whose queries and
        keys are rotated, if `rotary`; the same operation writes keys and values. Queries are rotated in place. If the
        layer does not write, qkv may hold only the queries; without values, these are the keys as they come."""
        q, table = qkv[:, : cache.heads], None if rotary is None else rotary.table
        k, v = qkv[:, cache.heads : cache.heads + cache.kv_heads], qkv[:, -cache.kv_heads :]
        self._write_kv(q if rotary is not None or norms is not None else None, k, v, table, norms, cache, plan)
        return self.attend_cached(
            q if plan.query_indices is None else q.index_select(0, plan.query_indices), cache, plan
        )

    def _write_kv(
        self, q: Tensor | None, k: Tensor, v: Tensor, rotary: Tensor | None, norms: HeadNorms | None,
        cache: LayerCache, plan: CpuAttentionPlan,
    ) -> None:  # fmt: skip
        """Normalise and rotate the queries in place (None: leave them), and write keys and values to their pages."""
        if q is None and not cache.writes_kv:
            return
        tokens = len(plan.positions)
        q_weight, k_weight, v_weight = (None if norm is None else norm.weight for norm in norms or (None,) * 3)
        k, v = _dense_heads(k), _dense_heads(v)
        q_stride = 0 if q is None else q.stride(0)
        chunks = min(tokens, self.num_chunks)
        self.library.call(
            f"attention_write_{_kernel_suffix(k, cache)}", chunks, *self._cache_args(cache, plan.tables),
            q, k, v, q, q_stride, k.stride(0), v.stride(0), q_stride, plan.token_slots, plan.positions,
            plan.cache_positions,
            rotary, q_weight, k_weight, 0.0 if norms is None else float(norms.q.eps),
            tokens, chunks, int(cache.writes_kv), plan.prompts, plan.budget,
            int(q_weight is not None and q_weight.dtype == torch.float32), v_weight,
        )  # fmt: skip

    def attend_cached(self, q: Tensor, cache: LayerCache, plan: CpuAttentionPlan) -> Tensor:
        """Return the attention of q [Q, heads, dim] to the keys and values in the pages."""
        q = _dense_heads(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        suffix, cache_args = _kernel_suffix(q, cache), self._cache_args(cache, plan.tables)
        score_args: tuple[Argument, ...] = (
            float(cache.scale), float(cache.softcap or 0), cache.window or 0, cache.chunk or 0, cache.sinks,
        )  # fmt: skip
        if plan.tiles is not None:
            chunks = len(plan.tiles) * cache.kv_heads
            tile_args = *cache_args, q, q.stride(0), out, plan.tiles, *score_args
            self.library.call(f"attention_prompt_{suffix}", chunks, *tile_args)
        if plan.slots is not None:
            rows, chunks = len(plan.slots), self.num_chunks
            args = (
                *cache_args, q, q.stride(0), out, plan.slots, plan.last_positions, plan.query_rows, rows, chunks,
                *score_args, self._split_scratch(rows, cache), plan.prompts, plan.budget, plan.shared_prefixes,
            )  # fmt: skip
            if plan.shared_prefixes is not None:
                self.library.call(f"attention_common_{suffix}", chunks, *args)
            self.library.call(f"attention_parts_{suffix}", chunks, *args)
            if plan.merges_splits:
                self.library.call(f"attention_join_{suffix}", chunks, *args)
        return out

    def _split_scratch(self, rows: int, cache: LayerCache) -> Tensor:
        """Return the buffer for partial results of split contexts, which all layers share. Pages of it that are never
        written take no RAM."""
        numbers = rows * (SHARED_PREFIX_SPLITS + MAX_CPU_SPLITS) * cache.heads * (-(-cache.head_dim // 32) * 32 + 2)
        if len(self.split_scratch) < numbers:
            self.split_scratch = torch.empty(numbers, dtype=torch.float32)
        return self.split_scratch

    def _cache_args(self, cache: LayerCache, tables: Tensor) -> tuple[Argument, ...]:
        """Return the first arguments of all attention kernels (attention.h)."""
        return (
            cache.keys, cache.values, cache.keys.stride(0), cache.head_stride, cache.token_stride, cache.page_tokens,
            tables, tables.stride(0), cache.kv_heads, cache.head_dim, cache.heads,
        )  # fmt: skip


def _kernel_suffix(x: Tensor, cache: LayerCache) -> str:
    """Return the suffix of the kernels for queries like x."""
    assert cache.is_int8 or x.dtype == cache.dtype, f"queries in {x.dtype}, keys in {cache.dtype}"
    return QUERY_SUFFIXES[x.dtype] + "_int8" * cache.is_int8


def _dense_heads(x: Tensor) -> Tensor:
    """Return x [T, heads, dim] with the heads of a token contiguous, copied if needed."""
    return x if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) else x.contiguous()


def _prompt_tiles(batch: ForwardBatch, rows: np.ndarray, cache: LayerCache) -> np.ndarray:
    """Return the tiles of these rows, int64 [n, 6]: slot, first query, queries, position of the first, end position,
    and 1 if bidirectional (all see up to the end), or 2 if from their windows on. The largest come first, so that
    threads end together."""
    most = tile_queries(cache.heads // cache.kv_heads, cache.head_dim)
    lengths, ends = batch.lengths[rows], batch.context_lens(cache.group)[rows]
    counts = -(-lengths // most)
    row = np.repeat(np.arange(len(rows)), counts)
    cut = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    queries = np.minimum(lengths[row] - cut, most)
    position, both_ways = batch.starts[rows][row] + cut, batch.bidirectional_mask[rows][row]
    end = np.where(both_ways, ends[row], position + queries)
    kind = both_ways * (1 + batch.bidirectional_in_window)
    tiles = np.stack([batch.slots[rows][row], batch.offsets[rows][row] + cut, queries, position, end, kind], 1)
    return np.ascontiguousarray(tiles[np.argsort(-end * queries, kind="stable")].astype(np.int64))
