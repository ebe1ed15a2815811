"""What an attention backend is given: the tokens of one step, and where their keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.protocol.model_spec import SnapKVSelection

PositionT = TypeVar("PositionT", int, np.ndarray, Tensor)
"""A position, or several."""


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values, and how it attends to them: all that a kernel must know of a layer.

    `keys` and `values` are views [pages, kv_heads, page_tokens, head_dim] of one shape and the same strides, the last
    of them 1; they may lie in different buffers. Behind a head's numbers in int8 is what they are multiplied by, in
    fp32. A page's number is an entry of the group's table. With `contiguous` the tokens of a sequence follow one
    another: it has one page, the first entry of its table, with room for `page_tokens` tokens, so that what is right
    for pages is right for it too, and a kernel may leave the table alone.

    Products of queries and keys are multiplied by `scale`; `softcap`, if any, bounds them: x becomes
    softcap * tanh(x / softcap). A token sees the last `window` positions up to its own, or with `chunk` those from the
    last multiple of it on (None: all). A layer that doesn't write uses the keys and values that another one wrote to
    the same views, and what is asked of it is queries alone. One with a `budget` keeps so many tokens of a prompt, by
    its `selection`, and what comes behind it follows them (Batch.inside).
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

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape, "as many values as keys"
        assert self.keys.stride() == self.values.stride(), "values lie as keys do"
        assert self.keys.stride(3) == 1, "a head's numbers follow one another"
        assert self.window is None or self.chunk is None, "a window or a chunk, not both"

    @property
    def is_local(self) -> bool:
        """Whether there are positions that a later token doesn't see."""
        return self.window is not None or self.chunk is not None

    def first_visible(self, position: PositionT) -> PositionT:
        """The first position that a token at `position` sees, where that is bounded; it may be below 0."""
        if self.chunk is not None:
            return position - position % self.chunk
        assert self.window is not None, "it sees all"
        return position - (self.window - 1)

    # Kept once they are known: launches ask for them in every layer of every step.

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
        """Numbers from a token's head to its next one."""
        return self.keys.stride(1)

    @cached_property
    def token_stride(self) -> int:
        """Numbers from a head's token to the next one in its page."""
        return self.keys.stride(2)

    @cached_property
    def page_alignment(self) -> int:
        """Numbers that every page begins at a multiple of: what kernels are compiled for, so that they know how pages
        are aligned, whatever `page_stride_units` is."""
        return gcd(self.keys.stride(0), self.head_stride)

    @cached_property
    def page_stride_units(self) -> int:
        """From a page to the next one, in units."""
        return self.keys.stride(0) // self.page_alignment

    @cached_property
    def value_offset(self) -> int | None:
        """Numbers from a key to its value where both are in one buffer; None in two."""
        if self.keys.untyped_storage().data_ptr() != self.values.untyped_storage().data_ptr():
            return None
        return self.values.storage_offset() - self.keys.storage_offset()

    @cached_property
    def head_page_rows(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values as rows [*, page_tokens * head_dim] of one head's tokens in one page, from the first head of
        page 0 on; None where a page's tokens of one head don't follow one another, or rows would overlap."""
        size = self.page_tokens * self.head_dim
        if self.token_stride != self.head_dim or self.page_alignment % size:
            return None
        pages, heads = self.keys.shape[:2]
        count = ((pages - 1) * self.keys.stride(0) + (heads - 1) * self.head_stride) // size + 1
        keys, values = (x.as_strided((count, size), (size, 1)) for x in (self.keys, self.values))
        return keys, values

    @cached_property
    def plan_key(self) -> tuple[int | float | None, ...]:
        """Layers of one kind have one plan a step: what a plan is made from is alike."""
        shape = self.heads, self.kv_heads, self.head_dim
        return self.group, *shape, self.softcap, self.window, self.chunk, self.budget

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @cached_property
    def is_int8(self) -> bool:
        """Keys and values are in 8 bits."""
        return self.dtype == torch.int8

    @cached_property
    def device(self) -> torch.device:
        return self.keys.device


@dataclass
class ForwardBatch:
    """T tokens of R rows. Device tensors: `tokens`, `positions` and `token_slots` are int64 [T]; `logits_indices` [S]
    are the last tokens of the rows that sample. Host arrays, int64 [R]: `slots`, `starts`, `lengths`, and `offsets`,
    each row's first token; `sampled_rows`, the rows that sample. `tables` are the groups' page tables [slots, logical
    pages] on the device. `prompt_lens`, where layers have budgets: the lengths of their prompts, of the rows [R] on the
    host, and of the tokens [T]. `bidirectional` [R], on the host, is true for prompts whose tokens see one another both
    ways: each of such a row sees all positions up to the row's last one, whatever the layer's window (None: no row is).
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
    _per_budget: dict[int, ForwardBatch] = field(default_factory=dict)
    _slot_mappings: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def context_lens(self, group: int) -> np.ndarray:
        """[R]: how many of the group's tokens a row's last one may see. Its sequence's, so far, in every group."""
        return self.starts + self.lengths

    @property
    def bidirectional_mask(self) -> np.ndarray:
        """[R]: `bidirectional`, of any batch."""
        return np.zeros(len(self.slots), dtype=np.bool_) if self.bidirectional is None else self.bidirectional

    def for_cache(self, cache: LayerCache) -> ForwardBatch:
        """The same batch, as its tokens lie in a cache: `positions` and `starts` count the tokens that are kept. Before
        the end of a prompt that is all of them."""
        if self.prompt_lens is None or cache.budget is None:
            return self
        found = self._per_budget.get(cache.budget)
        if found is None:
            rows, tokens = self.prompt_lens
            starts = self.starts - np.where(self.starts < rows, 0, np.maximum(rows - cache.budget, 0))
            positions = self.positions - num_evicted(self.positions, tokens, cache.budget)
            found = replace(
                self, positions=positions, starts=starts, prompt_lens=None, _per_budget={}, _slot_mappings={}
            )
            self._per_budget[cache.budget] = found
        return found

    def select_sampled(self) -> ForwardBatch:
        """The last tokens of the rows that sample alone, each a row of its own: what a model's last layer is asked for,
        once all keys and values are written. The first row's, if none samples."""
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
            None if self.bidirectional is None else self.bidirectional[rows],
        )  # fmt: skip

    def slot_mapping(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """[T] each: the page that a token's keys and values go to in this cache, and where in the page."""
        size = cache.page_tokens
        found = self._slot_mappings.get((cache.group, size))
        if found is None:
            logical = torch.div(self.positions, size, rounding_mode="floor")
            found = self.tables[cache.group][self.token_slots, logical], self.positions % size
            self._slot_mappings[cache.group, size] = found
        return found


def num_evicted(positions: Tensor, prompts: Tensor, budget: int) -> Tensor:
    """How many tokens before these positions a layer with a budget has let go of; `prompts` are the lengths of their
    sequences' prompts."""
    return (prompts - budget).clamp_(min=0).masked_fill_(positions < prompts, 0)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A fresh host array as a tensor on `device`; the copy to a GPU is only enqueued, from memory pinned for it. What
    decode graphs and page tables are sent goes through quire.worker.staging_buffer instead, which doesn't pin anew."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
