"""Running states of layers: their storage, the plan of which states a step reads and writes, and the two operations
that advance those of Mamba layers (arXiv:2312.00752), in plain torch: for any device, but slow.

A page holds the state for a run of `page_tokens` tokens. The state after a sequence's latest token is in the page of
that token's run. A row reads the page of the token before its first one, and writes the pages of all runs that its
tokens belong to. The page of a complete run is a checkpoint: the state at the run's end.

A slice with draft tokens is one row, whose states are not written: only after the step is it known how many of its
tokens are accepted. The inputs of these tokens are saved, and the states are then advanced over the accepted ones
(quire.worker.state_replay).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, StateRows, to_device
from quire.protocol.model_spec import SavedInput

CONV_TILE = 64
"""Tokens of a row that one program of the convolution computes."""

SCAN_CHUNK = 64
"""Tokens whose states are in memory together in this module's `selective_scan`."""


class SavedInputs(NamedTuple):
    """A layer's inputs of M tokens, from which its states can be advanced later: a tensor [M, width] for each of
    `LayerSpec.saved_inputs`."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls, tokens: int, inputs: Iterable[SavedInput], dtype: torch.dtype, device: torch.device
    ) -> SavedInputs:
        """Return zeros for the inputs of `tokens` tokens, in `dtype` or fp32."""
        return cls(
            tuple(
                torch.zeros((tokens, one.width), dtype=torch.float32 if one.is_fp32 else dtype, device=device)
                for one in inputs
            )
        )

    def save(self, tokens: Tensor, *values: Tensor) -> None:
        """Save the rows with these indices [N] of each of `values` [T, *] as the first N ones. Narrower values fill the
        first columns."""
        for saved, value in zip(self.tensors, values, strict=True):
            rows = saved[: len(tokens), : value.shape[1]]
            if rows.is_contiguous() and rows.dtype == value.dtype:
                torch.index_select(value, 0, tokens, out=rows)
            else:
                rows.copy_(value.index_select(0, tokens))

    def first(self, count: int) -> tuple[Tensor, ...]:
        """Return the inputs of the first `count` tokens."""
        return tuple(tensor[:count] for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class StateCache:
    """One layer's states: views of the pages of a group, one page for each run of `page_tokens` tokens.

    `conv` [pages, channels, taps - 1] holds the last inputs of a convolution, oldest first, in the model's dtype; `ssm`
    [pages, *], if the layer has one (Mamba: [pages, d_inner, d_state]), is in fp32, or in a shorter dtype, to which a
    state is rounded when it is written. In both, a page's numbers are contiguous; the stride between pages is
    the page size. `saved` is set where steps may have draft tokens.
    """

    conv: Tensor
    ssm: Tensor | None
    group: int = 0
    page_tokens: int = 512
    saved: SavedInputs | None = None

    def __post_init__(self) -> None:
        for view in (self.conv, self.ssm):
            assert view is None or view[:1].is_contiguous(), "a page's numbers must be contiguous"

    @property
    def plan_key(self) -> tuple[int, int]:
        """Return the key by which layers share the plan of a step."""
        return self.group, self.page_tokens


@dataclass(frozen=True, eq=False)
class StatePlan:
    """One step's rows, for all layers with the same `plan_key`; all tensors on the device, int64.

    Row r has `lengths[r]` tokens from `offsets[r]` on in the batch, after `starts[r]` earlier tokens of its sequence.
    It reads page `read_pages[r]`; below 0 nothing is read, and the state is zero. It writes page `write_pages[r, j]` at
    the end of the j-th run of `page_tokens` that its tokens belong to, or at the end of the row; with `tiles`, below 0
    nothing is written. No row writes what another one reads or writes, except padding, whose rows have no tokens or
    share scratch page 0.

    `tiles`, int32 [*, 2], are (row, first token in the row) of all parts of rows, of at most `CONV_TILE` tokens. None:
    each row is one token, and row r's is token r. A tile of a row without tokens does nothing.

    `saved_tokens` [N], if set, are the tokens whose inputs a layer saves (see StateCache.saved).

    (For the state after each token, not only at the end of runs: `page_tokens` 1, and a page for each token.)
    """

    offsets: Tensor
    lengths: Tensor
    starts: Tensor
    read_pages: Tensor
    write_pages: Tensor
    page_tokens: int
    tiles: Tensor | None = None
    saved_tokens: Tensor | None = None

    @classmethod
    def from_batch(cls, batch: ForwardBatch, cache: StateCache) -> StatePlan:
        """Return the plan of an eager step."""
        table, run, rows = batch.tables[cache.group], cache.page_tokens, batch.state_rows
        if rows is None:
            if (batch.lengths == 1).all():
                return cls.for_decode(table, to_device(batch.slots, batch.device), batch.positions, run)
            rows = StateRows.without_drafts(batch.slots, batch.starts, batch.lengths, batch.offsets)
        _, starts, lengths, _, _ = rows.columns
        width = int(((starts + lengths - 1) // run - starts // run).max()) + 1
        tiles = to_device(make_state_tiles(lengths), batch.device)
        saved = to_device(rows.saved_tokens, batch.device) if len(rows.saved_tokens) else None
        return cls.for_rows(table, to_device(rows.columns, batch.device), run, width, tiles, saved)

    @classmethod
    def for_rows(
        cls, table: Tensor, columns: Tensor, page_tokens: int, width: int, tiles: Tensor, saved_tokens: Tensor | None
    ) -> StatePlan:
        """Return the plan of rows, `columns` [5, R] of which are those of StateRows, each in at most `width` runs. It
        reads only device memory."""
        slots, starts, lengths, offsets, has_drafts = columns
        reads, writes = state_pages(table, slots, starts, lengths, page_tokens, width)
        writes = writes.masked_fill(has_drafts[:, None] > 0, -1)
        return cls(offsets, lengths, starts, reads, writes, page_tokens, tiles, saved_tokens)

    @classmethod
    def for_decode(cls, table: Tensor, slots: Tensor, positions: Tensor, page_tokens: int) -> StatePlan:
        """Return the plan of rows of one token each, at `positions` [R], in `slots` [R]. It reads only device memory,
        so a graph may capture it. Padding has slot 0 and position 0."""
        offsets = torch.arange(len(slots), device=slots.device)
        lengths = torch.ones_like(positions)
        pages = state_pages(table, slots, positions, lengths, page_tokens, 1)
        return cls(offsets, lengths, positions, *pages, page_tokens)


def make_state_tiles(lengths: np.ndarray) -> np.ndarray:
    """Return `StatePlan.tiles` of rows of these lengths, on the host."""
    counts = -(-lengths // CONV_TILE)
    rows = np.repeat(np.arange(len(lengths)), counts)
    first = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((rows, first * CONV_TILE), axis=1).astype(np.int32)


def state_pages(
    table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, page_tokens: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return (read_pages [R], write_pages [R, width]); after a row's last page that page repeats."""
    before, last = (starts - 1).clamp_(min=0) // page_tokens, (starts + lengths - 1).clamp_(min=0) // page_tokens
    reads = table[slots, before].masked_fill_(starts == 0, -1)
    runs = starts[:, None] // page_tokens + torch.arange(width, device=starts.device)
    return reads, table[slots[:, None], torch.minimum(runs, last[:, None])]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: StatePlan, *, silu: bool = True
) -> Tensor:
    """Return the causal convolution of x [T, d_inner], each channel with its weight [d_inner, d_conv] over the token
    and those before it, plus bias, through SiLU if `silu`; computed in fp32 and rounded once. Reads and writes the
    plan's states."""
    out, earlier = torch.empty_like(x, memory_format=torch.contiguous_format), weight.shape[1] - 1
    taps, shift = weight.float().t().contiguous(), None if bias is None else bias.float()
    for group in row_groups(plan):
        tokens = x[group.tokens].unflatten(0, (len(group.rows), -1))  # [rows, length, d_inner]
        states = read_pages(cache.conv, plan.read_pages[group.rows]).to(x.dtype)
        inputs, parts = torch.cat((states.transpose(1, 2), tokens), dim=1), []
        for first in range(0, tokens.shape[1], CONV_TILE):  # a tile fits into a CPU's cache
            part = inputs[:, first : first + CONV_TILE + earlier].float()
            length = part.shape[1] - earlier
            wide = part[:, earlier:] * taps[earlier]
            for k in range(earlier):
                wide.addcmul_(part[:, k : k + length], taps[k])
            wide = wide if shift is None else wide.add_(shift)
            parts.append((F.silu(wide, inplace=True) if silu else wide).to(x.dtype))
        out[group.tokens] = torch.cat(parts, dim=1).flatten(0, 1)
        for j, end in enumerate(group.ends):
            write_pages(cache.conv, plan.write_pages[group.rows, j], inputs[:, end : end + earlier].transpose(1, 2))
    return out


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None,
    cache: StateCache, plan: StatePlan,
) -> Tensor:  # fmt: skip
    """Return y of the selective scan: for each token of a row, with delta = softplus(dt + bias),

        h = exp(delta A) h + delta x B,   y = (C h + D x) silu(z).

    x, dt, z, y [T, d_inner]; B, C [T, d_state]; A [d_inner, d_state], D, bias [d_inner], these three in fp32. Computed
    in fp32 and rounded once. Reads and writes the plan's states."""
    assert cache.ssm is not None, "a scan has states"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for group in row_groups(plan):
        rows, at = len(group.rows), group.tokens
        wide = [tensor[at].float().view(rows, -1, tensor.shape[1]) for tensor in (x, dt, B, C, z)]
        h, done, parts = read_pages(cache.ssm, plan.read_pages[group.rows]).float(), 0, []
        for j, end in enumerate(group.ends):
            for first in range(done, end, SCAN_CHUNK):
                chunk = slice(first, min(first + SCAN_CHUNK, end))
                x_chunk, dt_chunk, b_chunk, c_chunk, z_chunk = (tensor[:, chunk] for tensor in wide)
                y, h = _scan_chunk(x_chunk, dt_chunk, b_chunk, c_chunk, z_chunk, A, D, bias, h)
                parts.append(y)
            write_pages(cache.ssm, plan.write_pages[group.rows, j], h)
            done = end
        out[at] = torch.cat(parts, dim=1).view(-1, x.shape[1]).to(x.dtype)
    return out


def _scan_chunk(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, A: Tensor, D: Tensor, bias: Tensor | None, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (outputs, final states) of the rows' next tokens [rows, length, *] after states h [rows, d_inner,
    d_state]. A parallel scan: each pass doubles the number of tokens combined with those before them."""
    delta = F.softplus(dt if bias is None else dt + bias)
    decay = torch.exp(delta[..., None] * A)
    states = (delta * x)[..., None] * B[:, :, None]
    step = 1
    while step < x.shape[1]:
        states[:, step:] = states[:, step:] + decay[:, step:] * states[:, :-step]
        decay[:, step:] = decay[:, step:] * decay[:, :-step]
        step *= 2
    states += decay * h[:, None]
    y = torch.einsum("rtdn,rtn->rtd", states, C) + D * x
    return y * F.silu(z), states[:, -1]


def read_pages(states: Tensor, pages: Tensor) -> Tensor:
    """Return a copy of these pages [rows, *], zero where the id is below 0. Sets instead of multiplying, because page 0
    may hold any bytes."""
    found = states[pages.clamp(min=0)]
    found[pages < 0] = 0
    return found


def write_pages(states: Tensor, pages: Tensor, values: Tensor) -> None:
    """Write `values` [rows, *] to these pages, except where the id is below 0."""
    written = pages >= 0
    states[pages[written]] = values[written].to(states.dtype)


@dataclass(frozen=True)
class RowGroup:
    """Rows of equal length: `tokens` are their token indices, row after row, and `ends` the offsets in a row at which
    its runs end, and the row."""

    rows: list[int]
    tokens: Tensor
    ends: list[int]


def row_groups(plan: StatePlan) -> Iterator[RowGroup]:
    """Yield all rows of one token as one group, and each other row as a group of its own."""
    # Stacking is an operation that a recorded step refuses: while it is recorded, a plan has no values yet.
    offsets, lengths, starts = torch.stack((plan.offsets, plan.lengths, plan.starts)).tolist()
    single = [row for row, length in enumerate(lengths) if length == 1]
    if single:
        yield RowGroup(single, plan.offsets[single], [1])
    for row, (offset, length, start) in enumerate(zip(offsets, lengths, starts)):
        if length > 1:
            first = plan.page_tokens - start % plan.page_tokens
            ends = [*range(first, length, plan.page_tokens), length]
            yield RowGroup([row], torch.arange(offset, offset + length, device=plan.offsets.device), ends)
