"""The store: the pages themselves and the page tables, as the journal left them.

One flat buffer holds all pages of all groups (Jenga §4.2's page-layer partition: all layers of a page are neighbours),
so copying a page is one contiguous copy whatever the number of layers. Entries are replayed in order before the step's
writes.
"""

from __future__ import annotations

from itertools import chain
from zlib import crc32

import numpy as np
import torch

from quire.data.kernels.batch import LayerCache
from quire.data.kernels.states import StateCache
from quire.data.runner.hazards import Launch, Moves, launches
from quire.data.runner.host_pool import HostPool
from quire.data.runner.prompts import Prompts
from quire.data.runner.staging import Staging
from quire.data.runner.views import check_geometry, cross_caches, layer_caches, pages_by_size, state_caches
from quire.vocabulary.plan import Copy, In, Journal, Out, Poison, Table
from quire.vocabulary.specs import Geometry, ModelSpec

CHANGES = (Copy, Out, In, Poison)
ALIGNED = 16  # page ids: where a group's table begins


class Store:
    """Pages and tables of a Geometry on `device`. `staging` is for small uploads on the stream of the rows. With
    `debug` the content of every swapped page is compared. `views` [pages, numbers] are the pages of each group, page 0
    included, `tables` [slots, logical pages] its page table; `caches` are the attending layers', `cross` those of
    layers that attend to pictures, `states` those of layers with a state, whose `ssm` is of `state_dtype`; `prompts`
    what layers with budgets must know, if there are any. `common` are the bytes that hold the pages, if other models'
    stores have them too."""

    def __init__(
        self, geometry: Geometry, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool = False,
        common: torch.Tensor | None = None, state_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        check_geometry(geometry, spec)
        self.geometry, self.device, self.common = geometry, device, common
        self.applied: int | None = None  # of a rank: a checksum over all that journals changed, and graphs, in order
        self.staging = Staging(device)
        self.buffer = self._pages(dtype)
        self.sizes = tuple(group.page_bytes for group in geometry.groups)
        self.sized = pages_by_size(self.buffer, geometry)
        self.views = tuple(self.sized[size] for size in self.sizes)
        self.pool = HostPool(self.sized, geometry.host_bytes, debug)
        self._make_tables()
        self.prompts = Prompts(geometry.slots, spec.least_budget, self.staging) if spec.least_budget else None
        self.caches = self._caches(spec)
        self.cross = cross_caches(self.buffer, geometry, spec)
        self.states: dict[int, StateCache] = {}
        if any(layer.state for layer in spec.layers):
            self.states = state_caches(self.buffer, geometry, spec, state_dtype)
        if device.type != "cpu":  # so that kernels are compiled now, not in the midst of serving
            for size in self.sized:
                self._copy({0: 0}, size)
                self.pool.out({0: 0}, size)
                self.pool.back({0: 0}, size)

    def _pages(self, dtype: torch.dtype) -> torch.Tensor:
        """All pages, one after another. Zeros: page 0 is scratch and must stay finite."""
        if self.common is not None:
            return self.common[: self.geometry.bytes].view(dtype)
        numbers = self.geometry.bytes // self.geometry.itemsize
        if self.device.type == "cpu":  # NumPy's untouched zeros cost a CPU no memory, torch's do
            return torch.from_numpy(np.zeros(numbers * dtype.itemsize, dtype=np.uint8)).view(dtype)
        return torch.zeros(numbers, dtype=dtype, device=self.device)

    def _caches(self, spec: ModelSpec) -> dict[int, LayerCache]:
        return layer_caches(self.buffer, self.geometry, spec)

    def close(self) -> None:
        """Nothing is used any more."""

    def _make_tables(self) -> None:
        """One allocation, whose addresses are fixed and in which every entry of every table has a number."""
        slots = self.geometry.slots
        self.widths = np.array([group.table_width for group in self.geometry.groups])
        sizes = -(-slots * self.widths // ALIGNED) * ALIGNED
        self.bases = np.cumsum(sizes) - sizes  # the number of each table's first entry
        self.host_entries = np.zeros(int(sizes.sum()), dtype=np.int64)
        self.entries = torch.from_numpy(self.host_entries)
        if self.device.type != "cpu":
            self.entries = self.entries.to(self.device)
        ends = list(zip(self.bases.tolist(), self.widths.tolist()))
        self.host_tables = [self.host_entries[at : at + slots * width].reshape(slots, width) for at, width in ends]
        self.tables = [self.entries[at : at + slots * width].view(slots, width) for at, width in ends]

    def clear_scratch(self) -> None:
        """Page 0 of every group as it was at first."""
        for pages in self.sized.values():
            pages[0].zero_()

    def replay(self, journal: Journal) -> None:
        """Apply a journal's entries, with the effect of one after another. Only rows read tables, so their entries are
        put together: otherwise they would stand between copies that are made at once."""
        named = [entry for entry in journal if type(entry) is Table]
        contents = [entry for entry in journal if type(entry) is not Table] if len(named) < len(journal) else []
        for launch in launches(contents, self.sizes):
            self._launch(launch)
        if named:
            self._write_tables(named)

    def replay_ahead(self, journal: Journal) -> None:
        """Replay what is sent ahead of need, behind a step's rows."""
        self.replay(journal)

    def _launch(self, launch: Launch) -> None:
        kind, size, moves = launch
        if self.common is not None:
            self.pool.settle()  # swaps wait for what other models' stores have enqueued
        if kind is Copy:
            self._copy(moves, size)
        elif kind is Out:
            self.pool.out(moves, size)
            if self.common is not None:
                self.pool.claim(moves.values(), size)  # another store may give these pages out, and can't know
        elif kind is In:
            self.pool.back(moves, size)
        else:
            self._poison(moves, size)
        if self.applied is not None:
            said = np.array([(CHANGES.index(kind), size), *moves.items()])
            self.applied = crc32(said.tobytes(), self.applied)

    def replayed(self, *sizes: int) -> None:
        """A graph of these sizes is replayed for a step, which adds up with others' the rows of a graph alike."""
        if self.applied is not None:
            self.applied = crc32(np.array(sizes).tobytes(), self.applied)

    def _copy(self, moves: Moves, size: int) -> None:
        pages = self.sized[size]
        dst, src = self.staging.upload_all([np.array(list(moves)), np.array(list(moves.values()))])
        if self.device.type == "cpu":
            pages.index_copy_(0, dst, pages.index_select(0, src))
            return
        from quire.data.kernels.triton.copy import copy_pages

        self.pool.claim(moves, size)
        copy_pages(pages, src, dst)
        self.pool.settle()

    def _poison(self, moves: Moves, size: int) -> None:
        """All bits are ones: that is no number in any dtype, and a page may have parts of several."""
        self.pool.claim(moves, size)
        bits = self.sized[size].view(torch.uint8)
        bits.index_fill_(0, self.staging.upload(np.array(list(moves))), 255)
        self.pool.settle()

    def _write_tables(self, entries: list[Table]) -> None:
        """All deltas in one assignment on the host, and in one upload and one scatter on the device."""
        slots, groups, ats, named = zip(*entries)
        counts = np.fromiter(map(len, named), np.int64, len(named))
        pages = np.fromiter(chain.from_iterable(named), np.int64, int(counts.sum()))
        of = np.array(groups)
        starts = self.bases[of] + np.array(slots) * self.widths[of] + np.array(ats)
        if (counts != 1).any():
            flat = np.arange(len(pages)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        else:
            flat = np.repeat(starts, counts)
        tables = self.host_entries
        tables[flat] = pages
        # A place that occurs twice holds what NumPy happened to write last, which it doesn't promise to be the last.
        order = np.sort(flat)
        if (order[1:] == order[:-1]).any():
            for start, ids in zip(starts.tolist(), named):
                tables[start : start + len(ids)] = ids
            pages = tables[flat]  # the same value wherever a place occurs, so the scatter's order doesn't matter
        if self.device.type != "cpu":
            self._claim(entries)
            to, ids = self.staging.upload_all([flat, pages])
            self.entries.index_copy_(0, to, ids)
        if self.applied is not None:
            self.applied = crc32(tables[flat].tobytes(), crc32(flat.tobytes(), self.applied))

    def _claim(self, entries: list[Table]) -> None:
        """Rows may write the pages that these tables name."""
        for size in self.sized if self.pool.busy else ():
            named = (entry.pages for entry in entries if self.sizes[entry.group] == size)
            self.pool.claim(chain.from_iterable(named), size)
