"""The attention backend on a GPU: rows of one token go through `decode`, others through `prompt`, or through
`prompt_hopper` where that is faster. Eager steps are planned on the host, those that graphs capture on the device; the
launches are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, LayerCache, num_evicted, to_device
from quire.kernels.reference import write_pages
from quire.kernels.triton.decode import SplitScratch, choose_splits, decode, decode_scratch, multiprocessors
from quire.kernels.triton.launch import supports_hopper_kernel, supports_pdl
from quire.kernels.triton.prefill import make_prefill_tiles, prefill, tile_queries
from quire.kernels.triton.rope_write import rope_write
from quire.protocol.kv_cache_config import KVCacheLayout


class RotaryTable(Protocol):
    """A rotary embedding: its fp32 table [length, 2, dim / 2] of cos and sin."""

    table: Tensor | None


class HeadNorm(Protocol):
    """An RMS norm of one head."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class TritonAttentionPlan:
    """A step of one kind of layers. Keys and values are those of tokens with these `token_slots` and `positions` [T];
    their queries, or only those at `query_indices`, are rows of one query (`slots`, `lengths`, and `rows`, their places
    among the queries; None: in order), or are in `tiles` for `prefill_kernel`, or in `bidirectional_tiles`, tiles for
    `prompt` whose queries see all of their row. `scratch` is where split contexts meet; `pdl`: kernels start early.
    `external_rows` are rows that another kernel computes: slot, first query, queries, position of the first."""

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
    cache_positions: Tensor | None = None  # [T]: where tokens are in their sequences' pages, if not at their positions
    bidirectional_tiles: Tensor | None = None


class TritonDecodeBatch(NamedTuple):
    """A step of one token a row on the device, each [R]; `tiles` only where `prompt` computes these rows too, `prompts`
    [slots] only where layers have budgets."""

    slots: Tensor
    positions: Tensor
    lengths: Tensor
    tiles: Tensor | None
    prompts: Tensor | None = None


class PaddedMixedBatch(NamedTuple):
    """A step of prompts and single tokens on the device, padded to sizes that a graph is captured for. Of each token
    `token_slots` and `positions` [T]. Rows of one token: `slots`, `lengths` and `rows`, their places [D]; padding has
    slot 0 and place -1. All others are in `tiles`, by the queries of a tile; padding has slot 0 there too."""

    token_slots: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    rows: Tensor
    tiles: dict[int, Tensor]
    prompts: Tensor | None = None


class TritonBackend:
    """`deterministic`: no result depends on which rows share the step, nor on how many of a row's tokens do: all go
    through one kernel. Any strides will do."""

    layout = KVCacheLayout.PAGED
    reads_contiguous = True  # it reads contiguous ones as well
    fuses_rope = True

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.default_prefill = partial(prefill, small=deterministic)

    def check_cache(self, cache: LayerCache) -> None:
        """StartupError for a cache that it can't read: there is none."""

    def plan(
        self,
        batch: ForwardBatch,
        cache: LayerCache,
        query_batch: ForwardBatch | None = None,
        excluded_rows: np.ndarray | None = None,
    ) -> TritonAttentionPlan:
        """Once a step and kind of layers, on the host; one upload. Keys and values are of `batch`, queries of
        `query_batch` if given, but for the rows of several tokens that are true in `excluded_rows` [R]."""
        of, inside, group = (query_batch or batch).for_cache(cache), batch.for_cache(cache), cache.group
        single = np.zeros_like(of.lengths, dtype=np.bool_) if self.deterministic else of.lengths == 1
        whole = of.bidirectional_mask
        one = np.flatnonzero(single & ~whole)
        many = np.flatnonzero(~(single | whole) if excluded_rows is None else ~(single | whole | excluded_rows))
        contexts = of.context_lens(group)
        parts = [of.slots[one], contexts[one], of.offsets[one]]
        kernel, queries = self._choose_kernel(cache, of.lengths[many], contexts[many])
        if len(many):
            tiles = make_prefill_tiles(*(x[many] for x in (of.slots, of.starts, of.lengths, of.offsets)), queries)
            parts.append(tiles.reshape(-1).view(np.int64))
        ints = to_device(np.concatenate(parts), batch.device)
        n, heads = len(one), cache.kv_heads
        splits = choose_splits(n, heads, multiprocessors(batch.device))
        return TritonAttentionPlan(
            tables=batch.tables[group],
            token_slots=batch.token_slots,
            positions=batch.positions,
            slots=ints[:n] if n else None,
            lengths=ints[n : 2 * n] if n else None,
            rows=ints[2 * n : 3 * n] if n else None,
            tiles=ints[3 * n :].view(torch.int32).view(-1, 4) if len(many) else None,
            prefill_kernel=kernel,
            splits=splits,
            query_indices=None if query_batch is None else query_batch.logits_indices,
            scratch=decode_scratch(n, cache.heads, heads, cache.head_dim, splits, batch.device),
            cache_positions=None if inside is batch else inside.positions,
            bidirectional_tiles=self._bidirectional_tiles(of, cache) if whole.any() else None,
        )

    def _bidirectional_tiles(self, of: ForwardBatch, cache: LayerCache) -> Tensor:
        """Tiles of the prompts whose tokens see one another both ways."""
        rows = np.flatnonzero(of.bidirectional_mask)
        slots, starts, lengths, offsets = (x[rows] for x in (of.slots, of.starts, of.lengths, of.offsets))
        tiles = make_prefill_tiles(slots, np.zeros_like(starts), lengths, offsets, self.tile_queries(cache))
        last = dict(zip(slots.tolist(), (starts + lengths - 1).tolist()))
        tiles[:, 3] = [last[slot] for slot in tiles[:, 0].tolist()]
        return to_device(tiles, of.device)

    def decode_batch(self, slots: Tensor, positions: Tensor, prompts: Tensor | None = None) -> TritonDecodeBatch:
        """A step of one token a row, all of it on the device: `slots` and `positions` [R]. A graph may capture it and
        the plans made of it: they serve whatever both hold at a replay."""
        tiles = None
        if self.deterministic:
            places = torch.arange(len(slots), device=slots.device)
            tiles = torch.stack((slots, places, torch.ones_like(slots), positions), 1).to(torch.int32)
        return TritonDecodeBatch(slots, positions, positions + 1, tiles, prompts)

    def plan_decode(
        self, step: TritonDecodeBatch, tables: Tensor, cache: LayerCache, scratch: SplitScratch | None = None,
        splits: int | None = None,
    ) -> TritonAttentionPlan:  # fmt: skip
        """As `plan`, for such a step and the page tables of the cache's group."""
        device = step.slots.device
        cells, lengths, tiles = None, step.lengths, step.tiles
        if step.prompts is not None and cache.budget is not None:
            less = num_evicted(step.positions, step.prompts.index_select(0, step.slots), cache.budget)
            cells, lengths = step.positions - less, step.lengths - less
            tiles = None if tiles is None else _shift_tiles(tiles, step.prompts, cache.budget)
        return TritonAttentionPlan(
            tables=tables,
            token_slots=step.slots,
            positions=step.positions,
            slots=None if self.deterministic else step.slots,
            lengths=lengths,
            rows=None,
            tiles=tiles,
            prefill_kernel=self.default_prefill,
            splits=splits or choose_splits(len(step.slots), cache.kv_heads, multiprocessors(device)),
            scratch=scratch,
            pdl=device.type == "cuda" and supports_pdl(device),
            cache_positions=cells,
        )

    def plan_mixed(
        self, step: PaddedMixedBatch, tables: Tensor, cache: LayerCache, scratch: SplitScratch, splits: int
    ) -> TritonAttentionPlan:
        """As `plan`, for a padded step and the page tables of the cache's group."""
        device = step.token_slots.device
        cells, lengths, tiles = None, step.lengths, step.tiles[self.tile_queries(cache)]
        if step.prompts is not None and cache.budget is not None:
            prompts = step.prompts
            cells = step.positions - num_evicted(
                step.positions, prompts.index_select(0, step.token_slots), cache.budget
            )
            lengths = lengths - num_evicted(lengths - 1, prompts.index_select(0, step.slots), cache.budget)
            tiles = _shift_tiles(tiles, prompts, cache.budget)
        return TritonAttentionPlan(
            tables=tables,
            token_slots=step.token_slots,
            positions=step.positions,
            slots=step.slots if len(step.slots) else None,
            lengths=lengths,
            rows=step.rows,
            tiles=tiles,
            prefill_kernel=self.default_prefill,
            splits=splits,
            scratch=scratch,
            pdl=device.type == "cuda" and supports_pdl(device),
            cache_positions=cells,
        )

    def tile_queries(self, cache: LayerCache) -> int:
        """The queries of a tile for the usual kernel."""
        return tile_queries(cache.heads, cache.kv_heads, cache.head_dim, cache.dtype.itemsize, self.deterministic)

    def use_long_kernel(self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray) -> bool:
        """Whether prompts of `lengths` tokens, which see up to `contexts`, are for another than the usual kernel: most
        of the work must be in long ones, as short ones take longer there."""
        if cache.window is not None:
            contexts = np.minimum(contexts, cache.window)
        long, work = self._long_threshold(cache), lengths * contexts
        return long is not None and bool((work * contexts).sum() >= long * max(int(work.sum()), 1))

    def _long_threshold(self, cache: LayerCache) -> int | None:
        """Tokens of a context from which on that kernel is the better one; None if there is no other."""
        roles = self._hopper_module(cache)
        return None if roles is None else int(roles.MIN_CONTEXT)

    def _choose_kernel(
        self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray
    ) -> tuple[Callable[..., Tensor], int]:
        """The kernel for a step's prompts, and the queries of its tiles."""
        roles = self._hopper_module(cache)
        if roles is not None and self.use_long_kernel(cache, lengths, contexts):
            return roles.prefill, roles.tile_queries(cache.heads // cache.kv_heads)
        return self.default_prefill, self.tile_queries(cache)

    def _hopper_module(self, cache: LayerCache) -> ModuleType | None:
        """`prompt_hopper`, if it may compute this layer's prompts."""
        if self.deterministic or not supports_hopper_kernel(cache.device):
            return None
        from quire.kernels.triton import prefill_hopper

        return prefill_hopper if prefill_hopper.supports(cache) else None

    def warmup(self, rows: int, cache: LayerCache, tables: Tensor) -> None:
        """Attention for `rows` rows of padding, so that its kernels are compiled and loaded."""
        q = torch.zeros((rows, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        nothing = torch.zeros(rows, dtype=torch.int64, device=q.device)
        splits = choose_splits(rows, cache.kv_heads, multiprocessors(q.device))
        decode(q, cache, tables, nothing, nothing, splits=splits, rows=nothing)

    def warmup_bidirectional(self, cache: LayerCache, tables: Tensor) -> None:
        """The same for rows that see all of something."""
        q = torch.zeros((1, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        tile = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=q.device)
        self.default_prefill(q, cache, tables, tile, bidirectional=True)

    def warmup_long(self, cache: LayerCache, tables: Tensor) -> None:
        """The same for a long prompt, where there may be one."""
        roles = self._hopper_module(cache)
        if roles is not None and tables.shape[1] * cache.page_tokens >= roles.MIN_CONTEXT:
            q = torch.zeros((1, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
            tile = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=q.device)
            roles.prefill(q, cache, tables, tile)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: TritonAttentionPlan) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes_kv:
            size, table = cache.page_tokens, plan.tables
            cells = plan.positions if plan.cache_positions is None else plan.cache_positions
            pages = table[plan.token_slots, torch.div(cells, size, rounding_mode="floor")]
            write_pages(cache.keys, cache.values, k, v, pages, cells % size)
        return self.attend_cached(q, cache, plan)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotary: RotaryTable | None,
        norms: tuple[HeadNorm, HeadNorm] | None,
        cache: LayerCache,
        plan: TritonAttentionPlan,
    ) -> Tensor:
        """The same from qkv [T, heads + 2 kv_heads, dim], whose queries and keys are first normalised and rotated where
        asked: one launch does that and the write. Queries are rotated in place."""
        q = qkv[:, : cache.heads]
        self.write_kv(qkv, q, rotary, norms, cache, plan)
        return self.attend_cached(
            q if plan.query_indices is None else q.index_select(0, plan.query_indices), cache, plan
        )

    def write_kv(
        self, qkv: Tensor, q: Tensor, rotary: RotaryTable | None, norms: tuple[HeadNorm, HeadNorm] | None,
        cache: LayerCache,
        plan: TritonAttentionPlan,
    ) -> None:  # fmt: skip
        """The first half of that: keys and values to their pages, queries to q [T, heads, dim]."""
        rope_write(
            qkv, q, cache, plan.tables, plan.token_slots, plan.positions,
            rotary=None if rotary is None else rotary.table,
            norms=None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps), pdl=plan.pdl,
            cache_positions=plan.cache_positions,
        )  # fmt: skip

    def attend_cached(self, q: Tensor, cache: LayerCache, plan: TritonAttentionPlan) -> Tensor:
        """The second half: the attention of q [Q, heads, dim] to what is in the pages."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.tiles is not None:
            plan.prefill_kernel(q, cache, plan.tables, plan.tiles, out)
        if plan.bidirectional_tiles is not None:
            self.default_prefill(q, cache, plan.tables, plan.bidirectional_tiles, out, bidirectional=True)
        if plan.slots is not None:
            decode(
                q, cache, plan.tables, plan.slots, plan.lengths, out,
                splits=plan.splits, rows=plan.rows, scratch=plan.scratch, pdl=plan.pdl,
            )  # fmt: skip
        return out


def _shift_tiles(tiles: Tensor, prompts: Tensor, budget: int) -> Tensor:
    """Tiles whose first positions count the tokens that are kept; `prompts` are those of all slots."""
    less = num_evicted(tiles[:, 3], prompts.index_select(0, tiles[:, 0]), budget)
    return torch.cat((tiles[:, :3], (tiles[:, 3] - less)[:, None]), 1).to(torch.int32)
