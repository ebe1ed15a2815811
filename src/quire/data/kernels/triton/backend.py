"""The attention backend for eager steps on a GPU: rows of one token go through `decode`, others through `prompt`, or
through `prompt_hopper` where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache, to_device
from quire.data.kernels.reference import write_pages
from quire.data.kernels.triton.attention import choose_splits, decode, multiprocessors
from quire.data.kernels.triton.launch import hopper
from quire.data.kernels.triton.prompt import make_tiles, prompt, tile_queries
from quire.data.kernels.triton.rope_write import rope_write
from quire.vocabulary.specs import Layout


class Turned(Protocol):
    """A rotary embedding: its fp32 table [length, 2, dim / 2] of cos and sin."""

    table: Tensor | None


class Norm(Protocol):
    """An RMS norm of one head."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class Launches:
    """One group's step: the rows of one query (`slots`, `lengths`, and `rows`, their queries' places) and the tiles of
    the others for `kernel`. Keys and values are those of `batch`; the queries are its tokens, or only those at `asked`.
    """

    tables: Tensor
    slots: Tensor | None
    lengths: Tensor | None
    rows: Tensor | None
    tiles: Tensor | None
    kernel: Callable[..., Tensor]
    splits: int
    batch: Batch
    asked: Tensor | None


class TritonBackend:
    """`softcap` caps the model's scores. `deterministic`: no result depends on which rows share the step, nor on how
    many of a row's tokens do: all go through one kernel."""

    needs = Layout.PAGED
    rotates = True

    def __init__(self, *, softcap: float | None = None, deterministic: bool = False) -> None:
        self.softcap, self.deterministic = softcap, deterministic

    def plan(self, batch: Batch, group: int, asked: Batch | None = None) -> Launches:
        """Once a step and layer group, on the host; one upload. Keys and values are of `batch`, queries of `asked` if
        given."""
        cache = next(c for c in batch.caches if c.group == group)
        of = asked or batch
        single = np.zeros_like(of.lengths, dtype=np.bool_) if self.deterministic else of.lengths == 1
        one, many = np.flatnonzero(single), np.flatnonzero(~single)
        parts = [of.slots[one], of.starts[one] + 1, of.offsets[one]]
        kernel, queries = self._kernel(cache, of.lengths[many], (of.starts + of.lengths)[many])
        if len(many):
            tiles = make_tiles(*(x[many] for x in (of.slots, of.starts, of.lengths, of.offsets)), queries)
            parts.append(tiles.reshape(-1).view(np.int64))
        ints = to_device(np.concatenate(parts), batch.device)
        n = len(one)
        return Launches(
            tables=batch.tables[group],
            slots=ints[:n] if n else None,
            lengths=ints[n : 2 * n] if n else None,
            rows=ints[2 * n : 3 * n] if n else None,
            tiles=ints[3 * n :].view(torch.int32).view(-1, 4) if len(many) else None,
            kernel=kernel,
            splits=choose_splits(n, cache.kv_heads, multiprocessors(batch.device)),
            batch=batch,
            asked=None if asked is None else asked.ends,
        )

    def _kernel(
        self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray
    ) -> tuple[Callable[..., Tensor], int]:
        """The kernel for a step's prompts, and the queries of its tiles: `lengths` tokens, which see up to `contexts`.
        For `prompt_hopper` most of the work must be in long ones, as short ones take longer there."""
        roles, work = self._roles(cache), lengths * contexts
        if roles is not None and (work * contexts).sum() >= roles.LONG * max(int(work.sum()), 1):
            return roles.prompt, roles.tile_queries(cache.heads // cache.kv_heads)
        shape = cache.heads, cache.kv_heads, cache.head_dim, cache.rows.element_size()
        usual = partial(prompt, softcap=self.softcap, small=self.deterministic)
        return usual, tile_queries(*shape, self.deterministic)

    def _roles(self, cache: LayerCache) -> ModuleType | None:
        """`prompt_hopper`, if it may compute this layer's prompts."""
        if self.deterministic or self.softcap is not None or not hopper(cache.rows.device):
            return None
        from quire.data.kernels.triton import prompt_hopper

        return prompt_hopper if prompt_hopper.takes(cache) else None

    def rehearse(self, rows: int, cache: LayerCache, tables: Tensor) -> None:
        """Attention for `rows` rows of padding, so that its kernels are compiled and loaded."""
        q = torch.zeros((rows, cache.heads, cache.head_dim), dtype=cache.rows.dtype, device=cache.rows.device)
        nothing = torch.zeros(rows, dtype=torch.int64, device=q.device)
        splits = choose_splits(rows, cache.kv_heads, multiprocessors(q.device))
        decode(q, cache, tables, nothing, nothing, scale=1.0, splits=splits, softcap=self.softcap, rows=nothing)

    def rehearse_long(self, cache: LayerCache, tables: Tensor) -> None:
        """The same for a long prompt, where there may be one."""
        roles = self._roles(cache)
        if roles is not None and tables.shape[1] * cache.page_tokens >= roles.LONG:
            q = torch.zeros((1, cache.heads, cache.head_dim), dtype=cache.rows.dtype, device=cache.rows.device)
            tile = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=q.device)
            roles.prompt(q, cache, tables, tile, scale=1.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Launches, scale: float) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their pages, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        keys, values = cache.views()
        write_pages(keys, values, k, v, plan.batch.write_pages[cache.group], plan.batch.write_offsets)
        return self._attend(q, cache, plan, scale)

    def rotate_and_attend(
        self, qkv: Tensor, rotary: Turned | None, norms: tuple[Norm, Norm] | None, cache: LayerCache, plan: Launches,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """The same from qkv [T, heads + 2 kv_heads, dim], whose queries and keys are first normalised and rotated where
        asked: one launch does that and the write. Queries are rotated in place."""
        q = qkv[:, : cache.heads]
        rope_write(
            qkv, q, cache, plan.tables, plan.batch.token_slots, plan.batch.positions, cache.heads, cache.kv_heads,
            rotary=None if rotary is None else rotary.table,
            norms=None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps),
        )  # fmt: skip
        return self._attend(q if plan.asked is None else q.index_select(0, plan.asked), cache, plan, scale)

    def _attend(self, q: Tensor, cache: LayerCache, plan: Launches, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.tiles is not None:
            plan.kernel(q, cache, plan.tables, plan.tiles, out, scale=scale)
        if plan.slots is not None:
            decode(
                q, cache, plan.tables, plan.slots, plan.lengths, out,
                scale=scale, splits=plan.splits, softcap=self.softcap, rows=plan.rows,
            )  # fmt: skip
        return out
