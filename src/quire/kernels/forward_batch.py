"""The input of attention backends: the tokens of one step, and the location of their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.protocol.model_spec import SnapKVSelection

PositionT = TypeVar("PositionT", int, np.ndarray, Tensor)
"""One position or an array of them."""


class RotaryTable(Protocol):
    """A rotary embedding: its fp32 table [length, 2, dim / 2] of cos and sin."""

    table: Tensor | None


class HeadNorm(Protocol):
    """An RMS norm of one head."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def __call__(self) -> Callable[..., Tensor]: ...


class HeadNorms(NamedTuple):
    """The norms of each query, key and value of a layer, all with one eps; None: these are not normalised."""

    q: HeadNorm
    k: HeadNorm | None
    v: HeadNorm | None = None


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values, and its attention parameters: all that a kernel needs to know of a layer.

    `keys` and `values` are views [pages, kv_heads, page_tokens, head_dim] of one shape and the same strides, the last
    stride 1; they may be in different buffers. In int8 each head's numbers are followed by their scale in fp32. Page
    ids are entries of the group's page table. If `contiguous`, the tokens of a sequence are adjacent: the sequence has
    one page, the first entry of its table, with room for `page_tokens` tokens. Code for pages works for it too, and a
    kernel may skip the table.

    Products of queries and keys are multiplied by `scale`; `softcap`, if set, bounds them: x becomes
    softcap * tanh(x / softcap). A token sees the last `window` positions up to its own, or with `chunk` those from the
    last multiple of `chunk` on (None: all). A layer without `writes_kv` reads the keys and values that another layer
    wrote to the same views, and computes queries only. A layer with a `budget` keeps that many tokens of a prompt,
    chosen by its `selection`; later tokens are stored after them (ForwardBatch.for_cache).

    With `sinks` [heads], fp32, the softmax of each query head has one more score, its sink (gpt-oss): a key without a
    value, which takes a part of the weights.
    """

    keys: Tensor
    values: Tensor
    heads: int
    scale: float
    group: int = 0
    window: int | None = None
    softcap: float | None = None
    writes_kv: bool = True
    contiguous: bool = False
    chunk: int | None = None
    budget: int | None = None
    selection: SnapKVSelection = field(default_factory=SnapKVSelection)
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape, "keys and values differ in shape"
        assert self.keys.stride() == self.values.stride(), "keys and values differ in strides"
        assert self.keys.stride(3) == 1, "a head's numbers must be contiguous"
        assert self.window is None or self.chunk is None, "a layer has a window or a chunk, not both"
        if self.sinks is not None:
            assert self.sinks.shape == (self.heads,), f"{self.heads} heads have sinks {tuple(self.sinks.shape)}"
            assert self.sinks.dtype == torch.float32, f"sinks in {self.sinks.dtype}"

    @property
    def is_local(self) -> bool:
        """Return True if later tokens do not see some positions."""
        return self.window is not None or self.chunk is not None

    def first_visible(self, position: PositionT) -> PositionT:
        """Return the first position that a token at `position` sees, for a local layer; it may be below 0."""
        if self.chunk is not None:
            chunk_start: PositionT = position - position % self.chunk
            return chunk_start
        assert self.window is not None, "the layer sees all positions"
        return position - (self.window - 1)

    # Cached, because kernel launches read them in every layer of every step.

    @cached_property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @cached_property
    def page_tokens(self) -> int:
        return self.keys.shape[2]

    @cached_property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @cached_property
    def head_stride(self) -> int:
        """Return the stride in numbers from a head to the next one of the same token."""
        return self.keys.stride(1)

    @cached_property
    def token_stride(self) -> int:
        """Return the stride in numbers from a token to the next one of the same head in its page."""
        return self.keys.stride(2)

    @cached_property
    def page_alignment(self) -> int:
        """Return the alignment of pages in numbers. Kernels are compiled for it, so that they know how pages are
        aligned, whatever `page_stride_units` is."""
        return gcd(self.keys.stride(0), self.head_stride)

    @cached_property
    def page_stride_units(self) -> int:
        """Return the stride from a page to the next one, in units of `page_alignment` numbers."""
        return self.keys.stride(0) // self.page_alignment

    @cached_property
    def value_offset(self) -> int | None:
        """Return the offset in numbers from a key to its value; None if they are in different buffers."""
        if self.keys.untyped_storage().data_ptr() != self.values.untyped_storage().data_ptr():
            return None
        return int(self.values.storage_offset()) - int(self.keys.storage_offset())

    @cached_property
    def head_page_rows(self) -> tuple[Tensor, Tensor] | None:
        """Return keys and values as rows [*, page_tokens * head_dim], each one head's tokens in one page, from the
        first head of page 0 on. None if a page's tokens of one head are not contiguous, or rows would overlap."""
        size = self.page_tokens * self.head_dim
        if self.token_stride != self.head_dim or self.page_alignment % size:
            return None
        pages, heads = self.keys.shape[:2]
        count = ((pages - 1) * self.keys.stride(0) + (heads - 1) * self.head_stride) // size + 1
        keys, values = (x.as_strided((count, size), (size, 1)) for x in (self.keys, self.values))
        return keys, values

    @cached_property
    def plan_key(self) -> tuple[int | float | None, ...]:
        """Return the key by which layers share the plan of a step: all fields that a plan depends on."""
        shape = self.heads, self.kv_heads, self.head_dim
        return self.group, *shape, self.softcap, self.window, self.chunk, self.budget, self.sinks is None

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @cached_property
    def is_int8(self) -> bool:
        """Return True if keys and values are stored in int8."""
        return self.dtype == torch.int8

    @cached_property
    def device(self) -> torch.device:
        return self.keys.device


class StateRows(NamedTuple):
    """A step's rows on the host, int64: `columns` [5, R] are slots, starts, lengths, offsets, and 1 for a row that has
    draft tokens, else 0. `saved_tokens` [N] are the indices of the tokens of the latter, in order."""

    columns: np.ndarray
    saved_tokens: np.ndarray

    @classmethod
    def without_drafts(
        cls, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, offsets: np.ndarray
    ) -> StateRows:
        """Return rows without draft tokens."""
        columns = np.stack((slots, starts, lengths, offsets, np.zeros_like(slots))).astype(np.int64)
        return cls(columns, np.empty(0, dtype=np.int64))


@dataclass
class ForwardBatch:
    """T tokens of R rows.

    Device tensors: `tokens`, `positions` and `token_slots`, int64 [T]; `logits_indices` [S], the last tokens of the
    rows that sample. Host arrays, int64 [R]: `slots`, `starts`, `lengths`, and `offsets`, the index of each row's first
    token; `sampled_rows` [S], the rows that sample. `tables` are the groups' page tables [slots, logical pages] on the
    device. `prompt_lens`, only where layers have budgets: the prompt lengths of the rows [R] on the host, and of the
    tokens [T] on the device. `bidirectional` [R], on the host, is true for prompts with bidirectional attention: each
    token sees all positions up to the row's last one, whatever the layer's window, or with `bidirectional_in_window`
    those of them that the window begins with for this token (None: no row is bidirectional). With `causal_full_layers`
    rows are bidirectional only in layers with a window (`for_attention`).
    `state_rows` are the rows of layers with states, if these have others.
    """

    tokens: Tensor
    positions: Tensor
    token_slots: Tensor
    logits_indices: Tensor
    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    sampled_rows: np.ndarray
    tables: Sequence[Tensor]
    prompt_lens: tuple[np.ndarray, Tensor] | None = None
    bidirectional: np.ndarray | None = None
    bidirectional_in_window: bool = False
    causal_full_layers: bool = False
    state_rows: StateRows | None = None
    _per_budget: dict[int, ForwardBatch] = field(default_factory=dict)
    _slot_mappings: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def context_lens(self, group: int) -> np.ndarray:
        """Return [R]: the number of the group's tokens that each row's last token may see: all tokens so far."""
        lengths: np.ndarray = self.starts + self.lengths
        return lengths

    @property
    def bidirectional_mask(self) -> np.ndarray:
        """Return `bidirectional` [R]; all False where it is None."""
        return np.zeros(len(self.slots), dtype=np.bool_) if self.bidirectional is None else self.bidirectional

    def for_cache(self, cache: LayerCache) -> ForwardBatch:
        """Return the batch as its tokens are stored in a cache: `positions` and `starts` count only the tokens that the
        cache keeps. Up to the end of a prompt it keeps all."""
        if self.prompt_lens is None or cache.budget is None:
            return self
        batch = self._per_budget.get(cache.budget)
        if batch is None:
            rows, tokens = self.prompt_lens
            starts = self.starts - np.where(self.starts < rows, 0, np.maximum(rows - cache.budget, 0))
            positions = self.positions - num_evicted(self.positions, tokens, cache.budget)
            batch = replace(
                self, positions=positions, starts=starts, prompt_lens=None, _per_budget={}, _slot_mappings={}
            )
            self._per_budget[cache.budget] = batch
        return batch

    def select_sampled(self) -> ForwardBatch:
        """Return a batch of the last tokens of the rows that sample, each a row of its own: the queries of a model's
        last layer, after all keys and values are written. If no row samples, it holds the first row's last token."""
        rows = self.sampled_rows if len(self.sampled_rows) else np.zeros(1, dtype=np.int64)
        at = (
            self.logits_indices
            if len(self.sampled_rows)
            else self.logits_indices.new_full((1,), int(self.lengths[0]) - 1)
        )
        count = len(rows)
        return ForwardBatch(
            self.tokens.index_select(0, at), self.positions.index_select(0, at), self.token_slots.index_select(0, at),
            at, self.slots[rows], (self.starts + self.lengths)[rows] - 1, np.ones(count, dtype=np.int64),
            np.arange(count), np.arange(count), self.tables,
            None if self.prompt_lens is None else (self.prompt_lens[0][rows], self.prompt_lens[1].index_select(0, at)),
            None if self.bidirectional is None else self.bidirectional[rows], self.bidirectional_in_window,
            self.causal_full_layers,
        )  # fmt: skip

    def for_attention(self, cache: LayerCache) -> ForwardBatch:
        """Return the batch for a layer with this cache: without bidirectional rows if its attention is causal."""
        if self.causal_full_layers and cache.window is None:
            return replace(self, bidirectional=None)
        return self

    def split_at_images(
        self, images: Mapping[int, Sequence[tuple[int, int]]], causal_full_layers: bool = False
    ) -> ForwardBatch:
        """Return the batch with a bidirectional row for each run of an image's tokens, and other rows for the tokens
        between. `images` has the first position of each image and the one after it, in order, by slot. The tokens of an
        image end in one step. `causal_full_layers`: see ForwardBatch."""
        rows, sampled, last = list[tuple[int, int, int, int, bool]](), set(self.sampled_rows.tolist()), list[int]()
        columns = zip(self.slots.tolist(), self.starts.tolist(), self.lengths.tolist(), self.offsets.tolist())
        for row, (slot, start, length, offset) in enumerate(columns):
            at, end = start, start + length
            for first, stop in images.get(slot, ()):
                if stop <= at or first >= end:
                    continue
                assert stop <= end, "a step computes all of an image that is not computed yet"
                if first > at:
                    rows.append((slot, at, first - at, offset + at - start, False))
                    at = first
                rows.append((slot, at, stop - at, offset + at - start, True))
                at = stop
            if at < end:
                rows.append((slot, at, end - at, offset + at - start, False))
            if row in sampled:
                last.append(len(rows) - 1)
        slots, starts, lengths, offsets, both_ways = (np.array(column) for column in zip(*rows))
        return replace(
            self, slots=slots, starts=starts, lengths=lengths, offsets=offsets, bidirectional=both_ways,
            bidirectional_in_window=True, causal_full_layers=causal_full_layers,
            sampled_rows=np.array(last, dtype=np.int64),
        )  # fmt: skip

    def slot_mapping(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Return (pages, offsets), [T] each: where in this cache each token's keys and values are written."""
        size = cache.page_tokens
        mapping = self._slot_mappings.get((cache.group, size))
        if mapping is None:
            logical = torch.div(self.positions, size, rounding_mode="floor")
            mapping = self.tables[cache.group][self.token_slots, logical], self.positions % size
            self._slot_mappings[cache.group, size] = mapping
        return mapping


def num_evicted(positions: Tensor, prompts: Tensor, budget: int) -> Tensor:
    """Return the number of tokens before each position that a layer with a budget has dropped; `prompts` are the prompt
    lengths of their sequences."""
    return (prompts - budget).clamp_(min=0).masked_fill_(positions < prompts, 0)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a new host array as a tensor on `device`. The copy to a GPU is asynchronous, from newly pinned memory;
    decode graphs and page tables use quire.worker.staging_buffer instead, which reuses pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
