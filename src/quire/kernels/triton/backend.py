"""The attention backend on a GPU: rows of one token are computed by `decode`, others by `prefill`, or by
`prefill_hopper` where that is faster. Eager steps are planned on the host, steps that graphs capture on the device; the
launches are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, HeadNorms, LayerCache, RotaryTable, num_evicted, to_device
from quire.kernels.reference import write_pages
from quire.kernels.triton.decode import (
    SplitScratch,
    choose_splits,
    decode,
    decode_scratch,
    multiprocessors,
    num_shared_rows,
)
from quire.kernels.triton.launch import cdiv, supports_hopper_kernel, supports_pdl
from quire.kernels.triton.prefill import make_prefill_tiles, prefill, tile_queries
from quire.kernels.triton.rope_write import rope_write
from quire.protocol.kv_cache_config import KVCacheLayout


@dataclass(slots=True)
class TritonAttentionPlan:
    """A step's plan for layers with the same `plan_key`.

    Keys and values are those of the tokens with these `token_slots` and `positions` [T]. Their queries, or only those
    at `query_indices`, are in rows of one query (`slots`, `lengths`, and their query indices `rows`; None: in order),
    in `tiles` for `prefill_kernel`, in `small_tiles` for the backend's `default_prefill`, or in `bidirectional_tiles`
    for the same kernel, whose queries see all of their row.
    `scratch` holds the partial results of split contexts; `pdl`: kernels start early. `external_rows` are computed by
    another kernel: slot, first query, queries, position of the first. `cache_positions` [T] are the tokens' positions
    in their sequences' pages (None: `positions`)."""

    tables: Tensor
    token_slots: Tensor
    positions: Tensor
    slots: Tensor | None
    lengths: Tensor | None
    rows: Tensor | None
    tiles: Tensor | None
    prefill_kernel: Callable[..., Tensor]
    splits: int
    query_indices: Tensor | None = None
    scratch: SplitScratch | None = None
    pdl: bool = False
    external_rows: Sequence[tuple[int, int, int, int]] = ()
    cache_positions: Tensor | None = None
    small_tiles: Tensor | None = None
    bidirectional_tiles: Tensor | None = None
    bidirectional_in_window: bool = False


class CapturedBatch(NamedTuple):
    """A step that a graph captures, on the device, with padding of slot 0. Tokens: `token_slots` and `positions` [T].
    Rows of one token: `slots`, `lengths` and their query indices `rows` [D], -1 for padding (None: of all tokens).
    `tiles`: a dict has those of the other rows, by the queries of a tile; a tensor has one for each row of one token,
    with `deterministic`. `prompts` [slots] only where layers have budgets."""

    token_slots: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    rows: Tensor | None
    tiles: dict[int, Tensor] | Tensor | None
    prompts: Tensor | None = None


class TritonBackend:
    """The Triton backend. `deterministic`: no result depends on the other rows of the step, nor on how many of a row's
    tokens are in it. `prefill` then computes all queries, those of one token too, in small or large tiles, which give
    the same bits. `max_drafts`: the most draft tokens of a slot in a step; their rows of one token, which are adjacent,
    share a read of the slot's keys and values. Takes any strides."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = True
    fuses_rope = True

    def __init__(self, *, deterministic: bool = False, max_drafts: int = 0) -> None:
        self.deterministic, self.max_drafts = deterministic, max_drafts
        self.default_prefill = partial(prefill, small=deterministic)

    def check_cache(self, cache: LayerCache) -> None:
        """Raise StartupError for a cache that this backend cannot read: there is none."""

    def plan(
        self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None,
        excluded_rows: np.ndarray | None = None,
    ) -> TritonAttentionPlan:  # fmt: skip
        """Return the plan for all layers with this `plan_key`, computed on the host once a step, with one upload: keys
        and values of `batch`, queries of `query_batch` if given, without rows of several tokens for which
        `excluded_rows` [R] is true (never with `deterministic`)."""
        of, cached, group = (query_batch or batch).for_cache(cache), batch.for_cache(cache), cache.group
        assert excluded_rows is None or not self.deterministic, "other kernels give other bits"
        both_ways = of.bidirectional_mask
        # The decode kernel has other bits than `prefill`: with `deterministic` short rows have small tiles instead.
        is_short = of.lengths <= (self.tile_queries(cache) if self.deterministic else 1)
        is_long = ~(is_short | both_ways if excluded_rows is None else is_short | both_ways | excluded_rows)
        short, long = np.flatnonzero(is_short & ~both_ways), np.flatnonzero(is_long)
        none = short[:0]
        single, small = (none, short) if self.deterministic else (short, none)
        contexts = of.context_lens(group)
        kernel, queries = self._choose_kernel(cache, of.lengths[long], contexts[long])
        parts = [_tiles(of, long, queries), _tiles(of, small, self.tile_queries(cache))]
        parts += [of.slots[single], contexts[single], of.offsets[single]]
        ints = to_device(np.concatenate(parts), batch.device).split([len(part) for part in parts])
        tiles, small_tiles = (part.view(torch.int32).view(-1, 4) if len(part) else None for part in ints[:2])
        n, splits = len(single), self.num_splits(len(single), cache)
        return TritonAttentionPlan(
            tables=batch.tables[group],
            token_slots=batch.token_slots,
            positions=batch.positions,
            slots=ints[2] if n else None,
            lengths=ints[3] if n else None,
            rows=ints[4] if n else None,
            tiles=tiles,
            prefill_kernel=kernel,
            splits=splits,
            query_indices=None if query_batch is None else query_batch.logits_indices,
            scratch=decode_scratch(n, cache.heads, cache.kv_heads, cache.head_dim, splits, batch.device),
            cache_positions=None if cached is batch else cached.positions,
            small_tiles=small_tiles,
            bidirectional_tiles=self._bidirectional_tiles(of, cache) if both_ways.any() else None,
            bidirectional_in_window=of.bidirectional_in_window,
        )

    def _bidirectional_tiles(self, of: ForwardBatch, cache: LayerCache) -> Tensor:
        """Return the tiles of bidirectional rows, on the device; their position is that of the row's last token."""
        rows = np.flatnonzero(of.bidirectional_mask)
        slots, starts, lengths, offsets = (x[rows] for x in (of.slots, of.starts, of.lengths, of.offsets))
        tiles = make_prefill_tiles(slots, starts, lengths, offsets, self.tile_queries(cache))
        ends = offsets + lengths
        last = (starts + lengths - 1)[np.searchsorted(ends, tiles[:, 1], side="right")]
        return to_device(np.column_stack((tiles[:, :3], last.astype(np.int32), tiles[:, 3])), of.device)

    def decode_batch(self, slots: Tensor, positions: Tensor, prompts: Tensor | None = None) -> CapturedBatch:
        """Return a step of one token a row, at `positions` [R], in `slots` [R], both on the device. A graph may capture
        this and its plans: a replay reads what these buffers hold then."""
        tiles = None
        if self.deterministic:
            queries = torch.arange(len(slots), device=slots.device)
            tiles = torch.stack((slots, queries, torch.ones_like(slots), positions), 1).to(torch.int32)
        return CapturedBatch(slots, positions, slots, positions + 1, None, tiles, prompts)

    def plan_captured(
        self, step: CapturedBatch, tables: Tensor, cache: LayerCache, scratch: SplitScratch | None = None,
        splits: int | None = None,
    ) -> TritonAttentionPlan:  # fmt: skip
        """Return the plan of such a step; `tables` are the page tables of the cache's group."""
        device, positions, prompts = step.positions.device, step.positions, step.prompts
        cache_positions, lengths, tiles = None, step.lengths, step.tiles
        tiles = tiles[self.tile_queries(cache)] if isinstance(tiles, dict) else tiles
        if prompts is not None and cache.budget is not None:
            evicted = num_evicted(positions, prompts.index_select(0, step.token_slots), cache.budget)
            cache_positions = positions - evicted
            if step.rows is not None:
                evicted = num_evicted(lengths - 1, prompts.index_select(0, step.slots), cache.budget)
            lengths = lengths - evicted
            tiles = None if tiles is None else _shift_tiles(tiles, prompts, cache.budget)
        pdl = device.type == "cuda" and supports_pdl(device)
        return TritonAttentionPlan(
            tables=tables,
            token_slots=step.token_slots,
            positions=positions,
            slots=step.slots if len(step.slots) and not self.deterministic else None,
            lengths=lengths,
            rows=step.rows,
            tiles=tiles,
            prefill_kernel=partial(self.default_prefill, single=isinstance(step.tiles, Tensor), pdl=pdl),
            splits=splits or self.num_splits(len(step.slots), cache),
            scratch=scratch,
            pdl=pdl,
            cache_positions=cache_positions,
        )

    def shared_rows(self, cache: LayerCache) -> int:
        """Return how many rows of one slot share a read of its keys and values."""
        return num_shared_rows(1 + self.max_drafts, cache)

    def num_splits(self, rows: int, cache: LayerCache) -> int:
        """Return the splits of a context for `rows` rows of one token. With draft tokens, few of the programs work: as
        many as if all sequences had the most draft tokens, because with more of them too few splits cost more than too
        many."""
        return choose_splits(cdiv(rows, self.shared_rows(cache)), cache.kv_heads, multiprocessors(cache.device))

    def tile_queries(self, cache: LayerCache) -> int:
        """Return the queries of a tile of `default_prefill`, which graphs capture."""
        return tile_queries(cache.heads, cache.kv_heads, cache.head_dim, cache.dtype.itemsize, self.deterministic)

    def use_long_kernel(self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray) -> bool:
        """Return True if the kernel for long contexts should compute prompts of `lengths` tokens, which see up to
        `contexts`: most of the work must be in long contexts, because short ones take longer there."""
        if cache.window is not None:
            contexts = np.minimum(contexts, cache.window)
        long, work = self._long_threshold(cache), lengths * contexts
        return long is not None and bool((work * contexts).sum() >= long * max(int(work.sum()), 1))

    def _long_threshold(self, cache: LayerCache) -> int | None:
        """Return the context in tokens from which on that kernel is faster; None if there is no such kernel."""
        hopper = self._hopper_module(cache)
        return None if hopper is None else int(hopper.MIN_CONTEXT)

    def _choose_kernel(
        self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray
    ) -> tuple[Callable[..., Tensor], int]:
        """Return the kernel for a step's prompts, and the queries of its tiles."""
        hopper = self._hopper_module(cache)
        if hopper is not None and self.use_long_kernel(cache, lengths, contexts):
            return hopper.prefill, hopper.tile_queries(cache.heads // cache.kv_heads)
        return prefill, tile_queries(cache.heads, cache.kv_heads, cache.head_dim, cache.dtype.itemsize)

    def _hopper_module(self, cache: LayerCache) -> ModuleType | None:
        """Return the module `prefill_hopper` if it can compute this layer's prompts, or None."""
        if self.deterministic or not supports_hopper_kernel(cache.device):
            return None
        from quire.kernels.triton import prefill_hopper

        return prefill_hopper if prefill_hopper.supports(cache) else None

    def warmup(self, rows: int, cache: LayerCache, tables: Tensor) -> None:
        """Compute attention of `rows` rows of padding, so that the decode kernels are compiled and loaded."""
        q = torch.zeros((rows, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        zeros = torch.zeros(rows, dtype=torch.int64, device=q.device)
        decode(
            q, cache, tables, zeros, zeros,
            splits=self.num_splits(rows, cache), rows=zeros, shared_rows=self.shared_rows(cache),
        )  # fmt: skip

    def warmup_bidirectional(self, cache: LayerCache, tables: Tensor) -> None:
        """Do the same for bidirectional rows."""
        q = torch.zeros((1, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        tile = torch.tensor([[0, 0, 1, 0, 0]], dtype=torch.int32, device=q.device)
        for in_window in {False, cache.is_local}:
            self.default_prefill(q, cache, tables, tile, bidirectional=True, in_window=in_window)

    def warmup_small(self, cache: LayerCache, tables: Tensor) -> None:
        """Do the same for rows of few tokens, if `deterministic` puts them into small tiles."""
        if self.deterministic:
            q = torch.zeros((1, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
            self.default_prefill(q, cache, tables, torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=q.device))

    def warmup_long(self, cache: LayerCache, tables: Tensor) -> None:
        """Do the same for a long prompt, if the page tables have room for one."""
        hopper = self._hopper_module(cache)
        if hopper is not None and tables.shape[1] * cache.page_tokens >= hopper.MIN_CONTEXT:
            q = torch.zeros((1, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
            tile = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=q.device)
            hopper.prefill(q, cache, tables, tile)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: TritonAttentionPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            size, table = cache.page_tokens, plan.tables
            positions = plan.positions if plan.cache_positions is None else plan.cache_positions
            pages = table[plan.token_slots, torch.div(positions, size, rounding_mode="floor")]
            write_pages(cache.keys, cache.values, k, v, pages, positions % size)
        return self.attend_cached(q, cache, plan)

    def rotate_and_attend(
        self, qkv: Tensor, rotary: RotaryTable | None, norms: HeadNorms | None, cache: LayerCache,
        plan: TritonAttentionPlan,
    ) -> Tensor:  # fmt: skip
        """Attend from qkv [T, heads + 2 kv_heads, dim], which is first normalised, if `norms`, and whose queries and
        keys are rotated, if `rotary`; the same launch writes keys and values. Queries are rotated in place."""
        q = qkv[:, : cache.heads]
        self.write_kv(qkv, q, rotary, norms, cache, plan)
        return self.attend_cached(
            q if plan.query_indices is None else q.index_select(0, plan.query_indices), cache, plan
        )

    def write_kv(
        self, qkv: Tensor, q: Tensor, rotary: RotaryTable | None, norms: HeadNorms | None,
        cache: LayerCache, plan: TritonAttentionPlan,
    ) -> None:  # fmt: skip
        """Normalise, rotate and write: keys and values to their pages, queries to q [T, heads, dim]."""
        rope_write(
            qkv, q, cache, plan.tables, plan.token_slots, plan.positions,
            rotary=None if rotary is None else rotary.table,
            norms=norms, pdl=plan.pdl,
            cache_positions=plan.cache_positions,
        )  # fmt: skip

    def attend_cached(self, q: Tensor, cache: LayerCache, plan: TritonAttentionPlan) -> Tensor:
        """Return the attention of q [Q, heads, dim] to the keys and values in the pages."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.tiles is not None:
            plan.prefill_kernel(q, cache, plan.tables, plan.tiles, out)
        if plan.small_tiles is not None:
            self.default_prefill(q, cache, plan.tables, plan.small_tiles, out)
        if plan.bidirectional_tiles is not None:
            self.default_prefill(
                q, cache, plan.tables, plan.bidirectional_tiles, out,
                bidirectional=True, in_window=plan.bidirectional_in_window,
            )  # fmt: skip
        if plan.slots is not None:
            assert plan.lengths is not None, "rows of one query have lengths"
            decode(
                q, cache, plan.tables, plan.slots, plan.lengths, out,
                splits=plan.splits, rows=plan.rows, scratch=plan.scratch, pdl=plan.pdl,
                shared_rows=self.shared_rows(cache),
            )  # fmt: skip
        return out


def _tiles(of: ForwardBatch, rows: np.ndarray, queries: int) -> np.ndarray:
    """Return the n tiles of these rows, as int64 [2 n], each with two of a tile's four int32."""
    slots, starts, lengths, offsets = (x[rows] for x in (of.slots, of.starts, of.lengths, of.offsets))
    return make_prefill_tiles(slots, starts, lengths, offsets, queries).reshape(-1).view(np.int64)


def _shift_tiles(tiles: Tensor, prompts: Tensor, budget: int) -> Tensor:
    """Return tiles whose first positions count only the tokens that a budget keeps; `prompts` [slots] are prompt
    lengths."""
    evicted = num_evicted(tiles[:, 3], prompts.index_select(0, tiles[:, 0]), budget)
    return torch.cat((tiles[:, :3], (tiles[:, 3] - evicted)[:, None]), 1).to(torch.int32)
