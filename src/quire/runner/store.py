"""The store: the pages themselves and the page tables, as the journal left them.

One flat buffer holds all pages (Jenga §4.2's page-layer partition: all layers of a page are neighbours), so copying a
page is one contiguous copy whatever the number of layers. Entries are replayed in order before the step's writes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import LayerCache, to_device
from quire.plan import Copy, In, Journal, Out, Poison, Table
from quire.specs import Geometry, ModelSpec


class Store:
    """Pages and tables of a Geometry on `device`."""

    def __init__(self, geometry: Geometry, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        numbers = geometry.pages * geometry.page_bytes // geometry.itemsize
        # Zeros: page 0 is scratch and must stay finite. NumPy's untouched zeros cost a CPU no memory, torch's do.
        if device.type == "cpu":
            self.buffer = torch.from_numpy(np.zeros(numbers * dtype.itemsize, dtype=np.uint8)).view(dtype)
        else:
            self.buffer = torch.zeros(numbers, dtype=dtype, device=device)
        self.pages = self.buffer.view(geometry.pages, -1)
        shape = (len(geometry.groups), geometry.slots, geometry.table_width)
        self.host_tables = np.zeros(shape, dtype=np.int64)
        self.tables = torch.from_numpy(self.host_tables)
        if device.type != "cpu":
            self.tables = self.tables.to(device)
        self.host = self._host(geometry.host_pages + 1, dtype)
        self.caches = self._caches(spec)
        self._apply: dict[type, Callable[[list[Any]], None]] = {
            Table: self._write_tables, Copy: self._copy, Out: self._out, In: self._in, Poison: self._poison,
        }  # fmt: skip

    def _host(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host pages, pinned where a GPU copies to them. Untouched ones of a CPU cost no memory."""
        numbers = self.pages.shape[1]
        if self.device.type != "cpu":
            return torch.empty((count, numbers), dtype=dtype, pin_memory=True)
        return torch.from_numpy(np.zeros(count * numbers * dtype.itemsize, dtype=np.uint8)).view(dtype).view(count, -1)

    def _caches(self, spec: ModelSpec) -> list[LayerCache]:
        caches: dict[int, LayerCache] = {}
        for g, group in enumerate(self.geometry.groups):
            row = 0
            for i in group.layers:
                layer = spec.layers[i]
                size = group.page_tokens * layer.head_dim
                stride, odd = divmod(self.pages.shape[1], size)
                assert odd == 0, "a page is not a whole number of head rows"
                caches[i] = LayerCache(
                    self.buffer.view(-1, size), stride, row, row + layer.kv_heads, spec.heads, layer.kv_heads,
                    layer.head_dim, group.page_tokens, g, layer.window,
                )  # fmt: skip
                row += 2 * layer.kv_heads
        return [caches[i] for i in range(len(spec.layers))]

    def replay(self, journal: Journal) -> None:
        """Apply a journal's entries, in order."""
        for kind, entries in groupby(journal, key=type):
            self._apply[kind](list(entries))

    def _copy(self, entries: list[Copy]) -> None:
        """Copies of which none reads what another wrote are made at once: sources are read before any is written."""
        at_once: dict[int, int] = {}  # destination -> source
        for _, src, dst in entries:
            if src in at_once:
                self._copy_at_once(at_once)
                at_once = {}
            at_once[dst] = src
        self._copy_at_once(at_once)

    def _copy_at_once(self, copies: dict[int, int]) -> None:
        both = to_device(np.array([list(copies), list(copies.values())]), self.device)
        self.pages.index_copy_(0, both[0], self.pages.index_select(0, both[1]))

    def _out(self, entries: list[Out]) -> None:
        for _, page, host in entries:
            self.host[host].copy_(self.pages[page], non_blocking=True)

    def _in(self, entries: list[In]) -> None:
        for _, host, page in entries:
            self.pages[page].copy_(self.host[host], non_blocking=True)

    def _poison(self, entries: list[Poison]) -> None:
        for _, page in entries:
            self.pages[page].fill_(torch.nan)

    def _write_tables(self, entries: list[Table]) -> None:
        for slot, group, at, pages in entries:
            self.host_tables[group, slot, at : at + len(pages)] = pages
        if entries and self.device.type != "cpu":
            # The device's copy gets the same deltas in one scatter. Values come from the host's tables, which already
            # hold the outcome of all entries, so an index that occurs twice is written the same value twice.
            width, slots = self.geometry.table_width, self.geometry.slots
            flat = np.concatenate(
                [np.arange(len(e.pages), dtype=np.int64) + ((e.group * slots + e.slot) * width + e.at) for e in entries]
            )
            both = to_device(np.stack([flat, self.host_tables.reshape(-1)[flat]]), self.device)
            self.tables.view(-1).index_copy_(0, both[0], both[1])
