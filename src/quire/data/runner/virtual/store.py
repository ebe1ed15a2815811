"""The store of virtual memory: pages as the store has them, and each sequence's tokens contiguous in addresses.

All physical pages are made at start and mapped once, one after another: over that view pages are copied, swapped and
poisoned as anywhere else. Beside it each buffer of a group has room for all slots (vAttention §5.1.1), and a `Table`
entry maps the pages' parts there in place of being written to a table. The same page may lie in several places. Slot 0
is scratch all along: page 0 lies at each of its places.

A place is mapped anew at once, while earlier steps may still run: the memory sees to it that none of them names its
slot, or that it is behind the end of the slot's tokens, where kernels read nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import LayerCache
from quire.data.runner.store import Store
from quire.data.runner.views import attention_of, with_shared
from quire.data.runner.virtual.driver import Driver, Run, map_all
from quire.errors import StartupError
from quire.vocabulary.plan import Journal, Mapped, Table
from quire.vocabulary.specs import Geometry, Group, ModelSpec


class VirtualStore(Store):
    """See Store; over `driver`. With `views` `caches` are contiguous and `tables` say that a slot's only page is the
    slot; else they are pages of whole tokens and their tables, over the same memory, for kernels that read these.
    With `background` a thread maps what is sent ahead of need (§6.1.1)."""

    def __init__(
        self, geometry: Geometry, spec: ModelSpec, dtype: torch.dtype, device: torch.device, driver: Driver,
        debug: bool = False, *, views: bool = True, background: bool = False,
    ) -> None:  # fmt: skip
        self.driver, self.contiguous = driver, views
        self.thread = ThreadPoolExecutor(1, "quire-maps") if background and views else None
        self.job: Future[None] | None = None  # what the thread maps
        self.dtype = dtype
        for group in geometry.groups:
            assert group.page_bytes == group.parts * driver.page, "a page is one of the device's in every buffer"
            if group.run_pages != 1 and not views:
                raise StartupError(
                    f"{group.run_tokens} tokens fill {group.run_pages} pages of --memory virtual, and this attention "
                    "reads pages of whole tokens",
                    "Use --attention auto, or another --virtual-page-kib or --virtual-layout",
                )
        super().__init__(geometry, spec, dtype, device, debug)

    def _pages(self, dtype: torch.dtype) -> Tensor:
        driver, geometry = self.driver, self.geometry
        count = geometry.bytes // driver.page
        driver.create(count)
        everything = driver.reserve(count * driver.page)
        driver.map(everything, 0, count)
        numbers = count * driver.page // dtype.itemsize
        # A buffer's room is that of all slots; a place of it that of one page.
        self.rooms = [[driver.reserve(self._room(group)) for _ in range(group.parts)] for group in geometry.groups]
        self.lying = [np.zeros((geometry.slots, group.table_width), dtype=np.int64) for group in geometry.groups]
        for g, group in enumerate(geometry.groups):
            for at in range(group.table_width):
                for run in self._runs(g, 0, at, 0):
                    driver.map(*run)
        self.maps = self.unmaps = self.ahead = 0
        self.seconds = self.meanwhile = 0.0
        return driver.tensor(everything, (numbers,), (1,), dtype)

    def _room(self, group: Group) -> int:
        return self.geometry.slots * group.table_width * self.driver.page

    def _runs(self, g: int, slot: int, at: int, page: int) -> Iterator[Run]:
        """Where the parts of a page lie at a place."""
        group = self.geometry.groups[g]
        place = (slot * group.table_width + at) * self.driver.page
        for part, room in enumerate(self.rooms[g]):
            yield Run(room + place, page * group.parts + part)

    def _caches(self, spec: ModelSpec) -> dict[int, LayerCache]:
        caches: dict[int, LayerCache] = {}
        for g, group in enumerate(self.geometry.groups):
            for at, layer in enumerate(group.layers):
                caches[layer] = self._cache(g, group, at, layer, spec)
        if self.contiguous:
            ids = torch.arange(self.geometry.slots, device=self.device)[:, None]
            self.tables = [ids for _ in self.geometry.groups]
        return with_shared(caches, spec)

    def _cache(self, g: int, group: Group, at: int, layer: int, spec: ModelSpec) -> LayerCache:
        """That of the `at`-th layer of a group: a token's keys are `stride` bytes behind the one before."""
        kept, page, item = spec.layers[layer], self.driver.page, self.geometry.itemsize
        one = kept.token_bytes(item) // 2
        stride = page * group.run_pages // group.run_tokens
        part, offset = 2 * (at // (stride // one)), at % (stride // one) * one
        heads, dim = kept.kv_heads, kept.head_dim
        if self.contiguous:
            slots, room = self.geometry.slots, group.table_width * page
            shape = slots, heads, room // stride, dim
            strides = room // item, dim, stride // item, 1
            keys, values = (
                self.driver.tensor(self.rooms[g][part + i] + offset, shape, strides, self.dtype) for i in range(2)
            )
        else:
            count = self.geometry.bytes // group.page_bytes
            shape = count, heads, group.page_tokens, dim
            strides = group.page_bytes // item, dim, stride // item, 1
            keys, values = (
                self.buffer.as_strided(shape, strides, ((part + i) * page + offset) // item) for i in range(2)
            )
        return LayerCache(keys, values, group=g, contiguous=self.contiguous, **attention_of(spec, layer))

    def _write_tables(self, entries: list[Table]) -> None:
        """Map what isn't there yet. Of several entries for one place the last one counts."""
        if not self.contiguous:
            super()._write_tables(entries)
        self._claim(entries)
        began = time.perf_counter()
        wanted: dict[tuple[int, int, int], int] = {}
        for slot, g, at, pages in entries:
            lying = self.lying[g][slot]
            for i, page in enumerate(pages, at):
                if page and (page != lying[i] or (g, slot, i) in wanted):
                    wanted[g, slot, i] = page
        for (g, slot, at), page in wanted.items():
            self._lay(g, slot, at, page)
        self.seconds += time.perf_counter() - began

    def _lay(self, g: int, slot: int, at: int, page: int) -> None:
        before = int(self.lying[g][slot, at])
        if before == page:
            return
        parts = self.geometry.groups[g].parts
        if before:
            for run in self._runs(g, slot, at, before):
                self.driver.unmap(run.address)
            self.unmaps += parts
            self.lying[g][slot, at] = 0
        map_all(self.driver, self._runs(g, slot, at, page))
        self.maps += parts
        self.lying[g][slot, at] = page

    def clear(self, slot: int) -> None:
        """Nothing lies in a slot's places any more. Nobody may use it, nor count on what lay there."""
        for g, lying in enumerate(self.lying):
            for at in np.flatnonzero(lying[slot]).tolist():
                for run in self._runs(g, slot, at, 0):
                    self.driver.unmap(run.address)
                    self.unmaps += 1
            lying[slot] = 0

    def replay(self, journal: Journal) -> None:
        self._wait()
        super().replay(journal)

    def replay_ahead(self, journal: Journal) -> None:
        """Replay what was sent ahead of need: its maps delay nobody."""
        self._wait()
        if self.thread is None:
            self._ahead(journal)
        else:
            self.job = self.thread.submit(self._ahead, journal)

    def _ahead(self, journal: Journal) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.entries.device)  # what CUDA knows of a thread; that one has a number
        maps, seconds = self.maps, self.seconds
        super().replay(journal)
        self.ahead += self.maps - maps
        if self.thread is None:
            self.meanwhile += self.seconds - seconds
        self.seconds = seconds

    def _wait(self) -> None:
        """Until the thread is done; the seconds count as those of mapping in a step's way. What it met is raised."""
        if self.job is not None:
            began, job, self.job = time.perf_counter(), self.job, None
            job.result()
            self.seconds += time.perf_counter() - began

    @property
    def mapped(self) -> Mapped:
        """What was mapped since the start; the scratch slot isn't counted."""
        there = (self.maps - self.unmaps) * self.driver.page
        return Mapped(there, self.maps, self.unmaps, self.ahead, self.seconds, self.meanwhile)

    def close(self) -> None:
        """Give the pages back. Whoever still has tensors over them is named."""
        if self.thread is not None:
            self.thread.shutdown()
        for name in ("caches", "views", "sized", "pool", "buffer"):
            if hasattr(self, name):
                delattr(self, name)
        self.driver.close()
