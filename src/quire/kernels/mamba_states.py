"""Running states (Mamba, arXiv:2312.00752): where they lie, which of them one step reads and writes, and the two
operations that advance them, in plain torch: right, on any device, and not fast.

The state after a sequence's latest token lies in the page of that token's run. What is read is the page of the token
before a row's first one, and what is written are the pages of all runs that its tokens are of: a page whose run is
whole is the state at its end, a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, to_device

CONV_TILE = 64
"""Tokens of a row that a program of the convolution takes."""

SCAN_CHUNK = 64
"""Tokens whose states are held together here."""


@dataclass(frozen=True, eq=False)
class StateCache:
    """One layer's states: views of the pages of a group, a page to a run of `page_tokens` tokens.

    `conv` [pages, d_inner, d_conv - 1] holds the last inputs of the convolution, oldest first, in the model's dtype;
    `ssm` [pages, d_inner, d_state] in fp32, or in a shorter dtype, that a state is rounded to when it is written. A
    page's numbers follow one another in each of them; from page to page it is as far as the pages' size says.
    """

    conv: Tensor
    ssm: Tensor
    group: int = 0
    page_tokens: int = 512

    def __post_init__(self) -> None:
        assert self.conv.shape[:2] == self.ssm.shape[:2], "as many pages and channels in both"
        for view in (self.conv, self.ssm):
            assert view.stride()[1:] == (view.shape[2], 1), "a page's numbers follow one another"

    @property
    def plan_key(self) -> tuple[int, int]:
        """Layers of one kind have one plan a step."""
        return self.group, self.page_tokens


@dataclass(frozen=True, eq=False)
class StatePlan:
    """One step's rows, for all layers of a kind; all on the device, int64.

    Row r has `lengths[r]` tokens from `offsets[r]` on in the batch, in front of which its sequence has `starts[r]`. It
    reads page `read_pages[r]`; below 0 nothing is read, and the state is zero. It writes page `write_pages[r, j]` when
    the j-th of the runs of `page_tokens` that its tokens are of, or the row, ends. No row writes what another one reads
    or writes, but for padding, whose rows have no tokens, or share scratch page 0.

    `tiles`, int32 [*, 2], are (row, first token in the row) of all parts of rows, of `CONV_TILE` tokens at most. None:
    each row is one token, and row r's is token r. A tile of a row without tokens does nothing.

    (States after each of a few tokens, not at the end of runs alone: `page_tokens` 1, and a page to each.)
    """

    offsets: Tensor
    lengths: Tensor
    starts: Tensor
    read_pages: Tensor
    write_pages: Tensor
    page_tokens: int
    tiles: Tensor | None = None

    @classmethod
    def from_batch(cls, batch: ForwardBatch, cache: StateCache) -> StatePlan:
        """The plan of an eager step."""
        table, run = batch.tables[cache.group], cache.page_tokens
        if (batch.lengths == 1).all():
            return cls.for_decode(table, to_device(batch.slots, batch.device), batch.positions, run)
        numbers = np.stack((batch.offsets, batch.lengths, batch.starts, batch.slots)).astype(np.int64)
        offsets, lengths, starts, slots = to_device(numbers, batch.device)
        ends = batch.starts + batch.lengths
        width = int(((ends - 1) // run - batch.starts // run).max()) + 1
        tiles = to_device(make_state_tiles(batch.lengths), batch.device)
        return cls(offsets, lengths, starts, *state_pages(table, slots, starts, lengths, run, width), run, tiles)

    @classmethod
    def for_decode(cls, table: Tensor, slots: Tensor, positions: Tensor, page_tokens: int) -> StatePlan:
        """The plan of rows of one token each, at `positions` [R], in `slots` [R], from what is on the device alone: it
        may be captured. Padding has slot 0 and position 0."""
        offsets = torch.arange(len(slots), device=slots.device)
        lengths = torch.ones_like(positions)
        pages = state_pages(table, slots, positions, lengths, page_tokens, 1)
        return cls(offsets, lengths, positions, *pages, page_tokens)


def make_state_tiles(lengths: np.ndarray) -> np.ndarray:
    """`StatePlan.tiles` of rows of these lengths, on the host."""
    counts = -(-lengths // CONV_TILE)
    rows = np.repeat(np.arange(len(lengths)), counts)
    first = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((rows, first * CONV_TILE), axis=1).astype(np.int32)


def state_pages(
    table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, page_tokens: int, width: int
) -> tuple[Tensor, Tensor]:
    """(`reads`, `writes`), the latter `width` wide: behind a row's last page that one again."""
    before, last = (starts - 1).clamp_(min=0) // page_tokens, (starts + lengths - 1).clamp_(min=0) // page_tokens
    reads = table[slots, before].masked_fill_(starts == 0, -1)
    runs = starts[:, None] // page_tokens + torch.arange(width, device=starts.device)
    return reads, table[slots[:, None], torch.minimum(runs, last[:, None])]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: StatePlan, activation: str | None = "silu"
) -> Tensor:
    """x [T, d_inner] -> each channel's convolution with its weight [d_inner, d_conv] over the token and those before
    it, plus bias, through the activation: computed in fp32 and rounded once. The plan's states are written."""
    assert activation in ACTIVATIONS, f"no convolution ends in {activation!r}"
    out, behind = torch.empty_like(x, memory_format=torch.contiguous_format), weight.shape[1] - 1
    kernel, shift = weight.float()[:, None], None if bias is None else bias.float()
    for some in _row_groups(plan):
        tokens = x[some.tokens].view(len(some.rows), -1, x.shape[1]).transpose(1, 2)  # [rows, d_inner, length]
        inputs = torch.cat((_read_pages(cache.conv, plan.read_pages[some.rows]).to(x.dtype), tokens), dim=2)
        wide = F.conv1d(inputs.float(), kernel, shift, groups=len(weight))
        out[some.tokens] = ACTIVATIONS[activation](wide).to(x.dtype).transpose(1, 2).reshape(-1, x.shape[1])
        for j, end in enumerate(some.ends):
            cache.conv[plan.write_pages[some.rows, j]] = inputs[:, :, end : end + behind].to(cache.conv.dtype)
    return out


ACTIVATIONS = {"silu": F.silu, "swish": F.silu, None: lambda x: x}


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor | None,
    cache: StateCache, plan: StatePlan,
) -> Tensor:  # fmt: skip
    """For each token of a row, with delta = softplus(dt + bias),

        h = exp(delta A) h + delta x B,   y = (C h + D x) silu(z),

    of x, dt, z, y [T, d_inner]; B, C [T, d_state]; A [d_inner, d_state], D, bias [d_inner], these three in fp32:
    computed in fp32 and rounded once. The plan's states are read and written."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for some in _row_groups(plan):
        rows, at = len(some.rows), some.tokens
        wide = [tensor[at].float().view(rows, -1, tensor.shape[1]) for tensor in (x, dt, B, C, z)]
        h, done, parts = _read_pages(cache.ssm, plan.read_pages[some.rows]).float(), 0, []
        for j, end in enumerate(some.ends):
            for first in range(done, end, SCAN_CHUNK):
                part = [tensor[:, first : min(first + SCAN_CHUNK, end)] for tensor in wide]
                y, h = _scan_chunk(*part, A, D, bias, h)
                parts.append(y)
            cache.ssm[plan.write_pages[some.rows, j]] = h.to(cache.ssm.dtype)
            done = end
        out[at] = torch.cat(parts, dim=1).view(-1, x.shape[1]).to(x.dtype)
    return out


def _scan_chunk(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, A: Tensor, D: Tensor, bias: Tensor | None, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows' next tokens [rows, length, *] after states h [rows, d_inner, d_state] -> their outputs, the states after
    them. Each token's decay and addition are joined with those before it, twice as many in each pass."""
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


def _read_pages(states: Tensor, pages: Tensor) -> Tensor:
    """A copy of these pages [rows, d_inner, *], zero where there is none: the bytes of a page that isn't read may be
    anything."""
    return torch.where((pages < 0)[:, None, None], 0, states[pages.clamp(min=0)])


@dataclass(frozen=True)
class _RowGroup:
    """Rows of as many tokens each, those `tokens`, one row after another; `ends` of their runs and of them."""

    rows: list[int]
    tokens: Tensor
    ends: list[int]


def _row_groups(plan: StatePlan) -> Iterator[_RowGroup]:
    """All rows of one token together, each other one by itself."""
    offsets, lengths, starts = plan.offsets.tolist(), plan.lengths.tolist(), plan.starts.tolist()
    single = [row for row, length in enumerate(lengths) if length == 1]
    if single:
        yield _RowGroup(single, plan.offsets[single], [1])
    for row, (offset, length, start) in enumerate(zip(offsets, lengths, starts)):
        if length > 1:
            first = plan.page_tokens - start % plan.page_tokens
            ends = [*range(first, length, plan.page_tokens), length]
            yield _RowGroup([row], torch.arange(offset, offset + length, device=plan.offsets.device), ends)
