"""The store: the pages themselves and the page tables, as the journal left them.

One flat buffer holds all pages (Jenga §4.2's page-layer partition: all layers of a page are neighbours), so copying a
page is one contiguous copy whatever the number of layers. Entries are replayed in order before the step's writes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch

from quire.data.kernels.batch import LayerCache
from quire.data.runner.host_pool import HostPool
from quire.data.runner.staging import Staging
from quire.vocabulary.plan import Copy, In, Journal, Out, Poison, Table
from quire.vocabulary.specs import Geometry, ModelSpec


class Store:
    """Pages and tables of a Geometry on `device`. `staging` is for small uploads on the stream of the rows. With
    `debug` the content of every swapped page is compared."""

    def __init__(
        self, geometry: Geometry, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool = False
    ) -> None:
        self.geometry, self.device = geometry, device
        self.staging = Staging(device)
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
        self.pool = HostPool(self.pages, max(geometry.host_pages, 1), debug)
        # Host page h is row h - 1: a row more could take torch's pinned memory twice the room.
        self.host = self.pool.host
        self.caches = self._caches(spec)
        self._apply: dict[type, Callable[[list[Any]], None]] = {
            Copy: self._copy, Out: self._out, In: self._in, Poison: self._poison,
        }  # fmt: skip
        if device.type != "cpu":  # so that kernels are compiled now, not in the midst of serving
            self._copy_at_once({0: 0})
            self.pool.out({0: 0})
            self.pool.back({0: 0})

    def _caches(self, spec: ModelSpec) -> list[LayerCache]:
        caches: dict[int, LayerCache] = {}
        for g, group in enumerate(self.geometry.groups):
            row = 0
            for i in group.layers:
                layer = spec.layers[i]
                size = group.page_tokens * layer.head_dim
                stride, odd = divmod(self.pages.shape[1], size)
                assert odd == 0, "a page is not a whole number of head rows"
                shape = (self.pages.shape[0], layer.kv_heads, group.page_tokens, layer.head_dim)
                strides = (stride * size, size, layer.head_dim, 1)
                keys, values = (self.buffer.as_strided(shape, strides, at * size) for at in (row, row + layer.kv_heads))
                scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
                caches[i] = LayerCache(keys, values, layer.heads or spec.heads, scale, g, layer.window, layer.softcap)
                row += 2 * layer.kv_heads
        return [caches[i] for i in range(len(spec.layers))]

    def replay(self, journal: Journal) -> None:
        """Apply a journal's entries, with the effect of one after another. Only rows read tables, so their entries are
        put together: otherwise they would stand between copies that are made at once."""
        named = [entry for entry in journal if type(entry) is Table]
        contents = [entry for entry in journal if type(entry) is not Table] if len(named) < len(journal) else []
        for kind, entries in groupby(contents, key=type):
            self._apply[kind](list(entries))
        if named:
            self._write_tables(named)

    def _copy(self, entries: list[Copy]) -> None:
        """Copies of which none reads or writes what another one wrote or read are made at once."""
        at_once: dict[int, int] = {}  # destination -> source
        sources: set[int] = set()
        for _, src, dst in entries:
            if src == dst:
                continue
            if src in at_once or dst in sources:
                self._copy_at_once(at_once)
                at_once, sources = {}, set()
            at_once[dst] = src
            sources.add(src)
        self._copy_at_once(at_once)

    def _copy_at_once(self, copies: dict[int, int]) -> None:
        if not copies:
            return
        dst, src = self.staging.upload_all([np.array(list(copies)), np.array(list(copies.values()))])
        if self.device.type == "cpu":
            self.pages.index_copy_(0, dst, self.pages.index_select(0, src))
            return
        from quire.data.kernels.triton.copy import copy_pages

        self.pool.claim(copies)
        copy_pages(self.pages, src, dst)
        self.pool.settle()

    def _out(self, entries: list[Out]) -> None:
        self.pool.out({host - 1: page for _, page, host in entries})

    def _in(self, entries: list[In]) -> None:
        self.pool.back({page: host - 1 for _, host, page in entries})

    def _poison(self, entries: list[Poison]) -> None:
        pages = [page for _, page in entries]
        self.pool.claim(pages)
        self.pages.index_fill_(0, self.staging.upload(np.array(pages)), torch.nan)
        self.pool.settle()

    def _write_tables(self, entries: list[Table]) -> None:
        """All deltas in one assignment on the host, and in one upload and one scatter on the device."""
        slots, groups, ats, named = zip(*entries)
        counts = np.fromiter(map(len, named), np.int64, len(named))
        pages = np.fromiter(chain.from_iterable(named), np.int64, int(counts.sum()))
        starts = (np.array(groups) * self.geometry.slots + np.array(slots)) * self.geometry.table_width + np.array(ats)
        if (counts != 1).any():
            flat = np.arange(len(pages)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        else:
            flat = np.repeat(starts, counts)
        tables = self.host_tables.reshape(-1)
        tables[flat] = pages
        # A place that occurs twice holds what NumPy happened to write last, which it doesn't promise to be the last.
        order = np.sort(flat)
        if (order[1:] == order[:-1]).any():
            for start, ids in zip(starts.tolist(), named):
                tables[start : start + len(ids)] = ids
            pages = tables[flat]  # the same value wherever a place occurs, so the scatter's order doesn't matter
        if self.device.type != "cpu":
            self.pool.claim(chain.from_iterable(named))
            to, ids = self.staging.upload_all([flat, pages])
            self.tables.view(-1).index_copy_(0, to, ids)
