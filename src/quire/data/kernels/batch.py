"""What an attention backend is given: the tokens of one step, and where their keys and values are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """One layer's keys and values inside the pages: `rows` is the whole buffer as [*, page_tokens * head_dim], in which
    head h of page p starts at row p * stride + key_row + h for keys, and value_row + h for values.
    """

    rows: Tensor
    stride: int
    key_row: int
    value_row: int
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    group: int
    window: int | None

    def views(self) -> tuple[Tensor, Tensor]:
        """Keys and values as [pages, kv_heads, page_tokens, head_dim]; the page stride is the tensors' own."""
        shape = (self.rows.shape[0] // self.stride, self.kv_heads, self.page_tokens, self.head_dim)
        size = self.page_tokens * self.head_dim
        strides = (self.stride * size, size, self.head_dim, 1)
        return (
            self.rows.as_strided(shape, strides, self.key_row * size),
            self.rows.as_strided(shape, strides, self.value_row * size),
        )


@dataclass
class Batch:
    """T tokens of R rows. Device tensors: `tokens`, `positions` and `token_slots` are int64 [T]; `ends` [S] are the
    last tokens of the rows that sample. Host arrays, int64 [R]: `slots`, `starts`, `lengths`, and `offsets`, each row's
    first token; `asked`, the rows that sample. The page tables [groups, slots, logical pages] are there on the device
    and on the host.
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
    tables: Tensor
    host_tables: np.ndarray
    caches: list[LayerCache]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def narrowed(self) -> Batch:
        """The last tokens of the rows that sample alone, each a row of its own: what a model's last layer is asked for,
        once all keys and values are written. The first row's, if none samples."""
        rows = self.asked if len(self.asked) else np.zeros(1, dtype=np.int64)
        at = self.ends if len(self.asked) else self.ends.new_full((1,), int(self.lengths[0]) - 1)
        count = len(rows)
        return Batch(
            self.tokens.index_select(0, at), self.positions.index_select(0, at), self.token_slots.index_select(0, at),
            at, self.slots[rows], (self.starts + self.lengths)[rows] - 1, np.ones(count, dtype=np.int64),
            np.arange(count), np.arange(count), self.tables, self.host_tables, self.caches,
        )  # fmt: skip

    @cached_property
    def write_pages(self) -> Tensor:
        """[groups, T]: the page that each token's keys and values go to."""
        size = self.caches[0].page_tokens
        return self.tables[:, self.token_slots, torch.div(self.positions, size, rounding_mode="floor")]

    @cached_property
    def write_offsets(self) -> Tensor:
        """[T]: and where in the page."""
        return self.positions % self.caches[0].page_tokens


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A fresh host array as a tensor on `device`; the copy to a GPU is only enqueued, from memory pinned for it. What
    decode graphs and page tables are sent goes through quire.data.runner.staging instead, which doesn't pin anew."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
