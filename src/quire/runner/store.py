"""The store: the pages themselves and the page tables, as the journal left them.

One flat buffer holds all pages (Jenga §4.2's page-layer partition: all layers of a page are neighbours), so copying a
page is one contiguous copy whatever the number of layers. Entries are replayed in order before the step's writes.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.batch import LayerCache, to_device
from quire.plan import Copy, Journal, Poison, Table
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
        self.caches = self._caches(spec)

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
                    self.buffer.view(-1, size), stride, row, row + layer.kv_heads, layer.kv_heads, layer.head_dim,
                    group.page_tokens, g, layer.window,
                )  # fmt: skip
                row += 2 * layer.kv_heads
        return [caches[i] for i in range(len(spec.layers))]

    def replay(self, journal: Journal) -> None:
        """Apply a journal's entries, in order."""
        tables: list[Table] = []
        copies: dict[int, int] = {}  # destination -> source, no source among the destinations before it
        for entry in journal:
            if isinstance(entry, Table):
                tables.append(entry)
            elif isinstance(entry, Copy):
                if entry.dst in copies or entry.src in copies:
                    self._copy(copies)
                    copies = {}
                copies[entry.dst] = entry.src
            elif isinstance(entry, Poison):
                self._copy(copies)
                copies = {}
                self.pages[entry.page].fill_(float("nan"))
            else:
                raise AssertionError(f"this store has no host pages for {entry}")
        self._copy(copies)
        self._write_tables(tables)

    def _copy(self, copies: dict[int, int]) -> None:
        """Copy pages; all sources are read before any destination is written."""
        if copies:
            both = to_device(np.array([list(copies), list(copies.values())]), self.device)
            self.pages.index_copy_(0, both[0], self.pages.index_select(0, both[1]))

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
