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

from quire.vocabulary.specs import Selection

At = TypeVar("At", int, np.ndarray, Tensor)
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
    writes: bool = True
    contiguous: bool = False
    chunk: int | None = None
    budget: int | None = None
    selection: Selection = field(default_factory=Selection)

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape, "as many values as keys"
        assert self.keys.stride() == self.values.stride(), "values lie as keys do"
        assert self.keys.stride(3) == 1, "a head's numbers follow one another"
        assert self.window is None or self.chunk is None, "a window or a chunk, not both"

    @property
    def bounded(self) -> bool:
        """Whether there are positions that a later token doesn't see."""
        return self.window is not None or self.chunk is not None

    def oldest(self, position: At) -> At:
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
    def unit(self) -> int:
        """Numbers that every page begins at a multiple of: what kernels are compiled for, so that they know how pages
        are aligned, whatever `page_units` is."""
        return gcd(self.keys.stride(0), self.head_stride)

    @cached_property
    def page_units(self) -> int:
        """From a page to the next one, in units."""
        return self.keys.stride(0) // self.unit

    @cached_property
    def values_after(self) -> int | None:
        """Numbers from a key to its value where both are in one buffer; None in two."""
        if self.keys.untyped_storage().data_ptr() != self.values.untyped_storage().data_ptr():
            return None
        return self.values.storage_offset() - self.keys.storage_offset()

    @cached_property
    def head_rows(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values as rows [*, page_tokens * head_dim] of one head's tokens in one page, from the first head of
        page 0 on; None where a page's tokens of one head don't follow one another, or rows would overlap."""
        size = self.page_tokens * self.head_dim
        if self.token_stride != self.head_dim or self.unit % size:
            return None
        pages, heads = self.keys.shape[:2]
        count = ((pages - 1) * self.keys.stride(0) + (heads - 1) * self.head_stride) // size + 1
        keys, values = (x.as_strided((count, size), (size, 1)) for x in (self.keys, self.values))
        return keys, values

    @cached_property
    def kind(self) -> tuple[int | float | None, ...]:
        """Layers of one kind have one plan a step: what a plan is made from is alike."""
        shape = self.heads, self.kv_heads, self.head_dim
        return self.group, *shape, self.softcap, self.window, self.chunk, self.budget

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @cached_property
    def rounded(self) -> bool:
        """Keys and values are in 8 bits."""
        return self.dtype == torch.int8

    @cached_property
    def device(self) -> torch.device:
        return self.keys.device


@dataclass
class Batch:
    """T tokens of R rows. Device tensors: `tokens`, `positions` and `token_slots` are int64 [T]; `ends` [S] are the
    last tokens of the rows that sample. Host arrays, int64 [R]: `slots`, `starts`, `lengths`, and `offsets`, each row's
    first token; `asked`, the rows that sample. `tables` are the groups' page tables [slots, logical pages] on the
    device. `prompts`, where layers have budgets: the lengths of their prompts, of the rows [R] on the host, and of the
    tokens [T]. `whole` [R], on the host, is true for prompts whose tokens see one another both ways: each of such a row
    sees all positions up to the row's last one, whatever the layer's window (None: no row is).
    """

    tokens: Tensor
    positions: Tensor
    token_slots: Tensor
    ends: Tensor
    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    asked: np.ndarray
    tables: Sequence[Tensor]
    prompts: tuple[np.ndarray, Tensor] | None = None
    whole: np.ndarray | None = None
    _inside: dict[int, Batch] = field(default_factory=dict)
    _places: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def contexts(self, group: int) -> np.ndarray:
        """[R]: how many of the group's tokens a row's last one may see. Its sequence's, so far, in every group."""
        return self.starts + self.lengths

    @property
    def both_ways(self) -> np.ndarray:
        """[R]: `whole`, of any batch."""
        return np.zeros(len(self.slots), dtype=np.bool_) if self.whole is None else self.whole

    def inside(self, cache: LayerCache) -> Batch:
        """The same batch, as its tokens lie in a cache: `positions` and `starts` count the tokens that are kept. Before
        the end of a prompt that is all of them."""
        if self.prompts is None or cache.budget is None:
            return self
        found = self._inside.get(cache.budget)
        if found is None:
            rows, tokens = self.prompts
            starts = self.starts - np.where(self.starts < rows, 0, np.maximum(rows - cache.budget, 0))
            positions = self.positions - gone(self.positions, tokens, cache.budget)
            found = replace(self, positions=positions, starts=starts, prompts=None, _inside={}, _places={})
            self._inside[cache.budget] = found
        return found

    def narrowed(self) -> Batch:
        """The last tokens of the rows that sample alone, each a row of its own: what a model's last layer is asked for,
        once all keys and values are written. The first row's, if none samples."""
        rows = self.asked if len(self.asked) else np.zeros(1, dtype=np.int64)
        at = self.ends if len(self.asked) else self.ends.new_full((1,), int(self.lengths[0]) - 1)
        count = len(rows)
        return Batch(
            self.tokens.index_select(0, at), self.positions.index_select(0, at), self.token_slots.index_select(0, at),
            at, self.slots[rows], (self.starts + self.lengths)[rows] - 1, np.ones(count, dtype=np.int64),
            np.arange(count), np.arange(count), self.tables,
            None if self.prompts is None else (self.prompts[0][rows], self.prompts[1].index_select(0, at)),
            None if self.whole is None else self.whole[rows],
        )  # fmt: skip

    def places(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """[T] each: the page that a token's keys and values go to in this cache, and where in the page."""
        size = cache.page_tokens
        found = self._places.get((cache.group, size))
        if found is None:
            logical = torch.div(self.positions, size, rounding_mode="floor")
            found = self.tables[cache.group][self.token_slots, logical], self.positions % size
            self._places[cache.group, size] = found
        return found


def gone(positions: Tensor, prompts: Tensor, budget: int) -> Tensor:
    """How many tokens before these positions a layer with a budget has let go of; `prompts` are the lengths of their
    sequences' prompts."""
    return (prompts - budget).clamp_(min=0).masked_fill_(positions < prompts, 0)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A fresh host array as a tensor on `device`; the copy to a GPU is only enqueued, from memory pinned for it. What
    decode graphs and page tables are sent goes through quire.data.runner.staging instead, which doesn't pin anew."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
