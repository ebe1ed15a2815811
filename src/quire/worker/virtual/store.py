"""The store of virtual memory: pages as the store has them, and each sequence's tokens contiguous in addresses.

All physical pages are made at start and mapped once, one after another: over that view pages are copied, swapped and
poisoned as anywhere else. Beside it each buffer of a group has room for all slots (vAttention §5.1.1), and a
`TableWrite` entry maps the pages' parts there in place of being written to a table. The same page may lie in several
places. Slot 0 is scratch all along: page 0 lies at each of its places.

A place is mapped anew at once, while earlier steps may still run: the memory sees to it that none of them names its
slot, or that it is behind the end of the slot's tokens, where kernels read nothing.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.forward_batch import LayerCache
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import MappingStats, PageOps, TableWrite
from quire.worker.cache_views import add_shared_layers, attention_settings
from quire.worker.store import Store
from quire.worker.virtual import DriverError, open_driver
from quire.worker.virtual.driver import Driver, PageRun, map_all


class VirtualStore(Store):
    """See Store; over `driver`. With `is_contiguous` `caches` are contiguous and `tables` say that a slot's only page
    is the slot; else they are pages of whole tokens and their tables, over the same memory, for kernels that read
    these. With `map_in_background` a thread maps what is sent ahead of need (§6.1.1)."""

    def __init__(
        self, kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, driver: Driver,
        debug: bool = False, *, is_contiguous: bool = True, map_in_background: bool = False,
    ) -> None:  # fmt: skip
        self.driver, self.is_contiguous = driver, is_contiguous
        self.map_thread = ThreadPoolExecutor(1, "quire-maps") if map_in_background and is_contiguous else None
        self.map_job: Future[None] | None = None  # what the thread maps
        self.dtype = dtype
        for group in kv_config.groups:
            assert group.page_bytes == group.parts * driver.page, "a page is one of the device's in every buffer"
            if group.run_pages != 1 and not is_contiguous:
                raise StartupError(
                    f"{group.run_tokens} tokens fill {group.run_pages} pages of --memory virtual, and this attention "
                    "reads pages of whole tokens",
                    "Use --attention auto, or another --virtual-page-kib or --virtual-layout",
                )
        super().__init__(kv_config, spec, dtype, device, debug)

    def _allocate_pages(self, dtype: torch.dtype) -> Tensor:
        driver, geometry = self.driver, self.kv_config
        count = geometry.bytes // driver.page
        driver.create(count)
        everything = driver.reserve(count * driver.page)
        driver.map(everything, 0, count)
        numbers = count * driver.page // dtype.itemsize
        # A buffer's room is that of all slots; a place of it that of one page.
        self.buffer_addresses = [
            [driver.reserve(self._buffer_bytes(group)) for _ in range(group.parts)] for group in geometry.groups
        ]
        self.mapped_pages = [np.zeros((geometry.slots, group.table_width), dtype=np.int64) for group in geometry.groups]
        for g, group in enumerate(geometry.groups):
            for at in range(group.table_width):
                for run in self._page_runs(g, 0, at, 0):
                    driver.map(*run)
        self.num_maps = self.num_unmaps = self.overlapped_maps = 0
        self.stall_seconds = self.overlap_seconds = 0.0
        return driver.tensor(everything, (numbers,), (1,), dtype)

    def _buffer_bytes(self, group: KVCacheGroup) -> int:
        return self.kv_config.slots * group.table_width * self.driver.page

    def _page_runs(self, group_index: int, slot: int, at: int, page: int) -> Iterator[PageRun]:
        """Where the parts of a page lie at a place."""
        group = self.kv_config.groups[group_index]
        place = (slot * group.table_width + at) * self.driver.page
        for part, room in enumerate(self.buffer_addresses[group_index]):
            yield PageRun(room + place, page * group.parts + part)

    def _make_caches(self, spec: ModelSpec) -> dict[int, LayerCache]:
        caches: dict[int, LayerCache] = {}
        for g, group in enumerate(self.kv_config.groups):
            for at, layer in enumerate(group.layers):
                caches[layer] = self._layer_cache(g, group, at, layer, spec)
        if self.is_contiguous:
            ids = torch.arange(self.kv_config.slots, device=self.device)[:, None]
            self.tables = [ids for _ in self.kv_config.groups]
        return add_shared_layers(caches, spec)

    def _layer_cache(self, group_index: int, group: KVCacheGroup, at: int, layer: int, spec: ModelSpec) -> LayerCache:
        """That of the `at`-th layer of a group: a token's keys are `stride` bytes behind the one before."""
        kept, page, item = spec.layers[layer], self.driver.page, self.kv_config.itemsize
        one = kept.token_bytes(item) // 2
        stride = page * group.run_pages // group.run_tokens
        part, offset = 2 * (at // (stride // one)), at % (stride // one) * one
        heads, dim = kept.kv_heads, kept.head_dim
        if self.is_contiguous:
            slots, room = self.kv_config.slots, group.table_width * page
            shape = slots, heads, room // stride, dim
            strides = room // item, dim, stride // item, 1
            keys, values = (
                self.driver.tensor(self.buffer_addresses[group_index][part + i] + offset, shape, strides, self.dtype)
                for i in range(2)
            )
        else:
            count = self.kv_config.bytes // group.page_bytes
            shape = count, heads, group.page_tokens, dim
            strides = group.page_bytes // item, dim, stride // item, 1
            keys, values = (
                self.buffer.as_strided(shape, strides, ((part + i) * page + offset) // item) for i in range(2)
            )
        return LayerCache(
            keys, values, group=group_index, contiguous=self.is_contiguous, **attention_settings(spec, layer)
        )

    def _write_tables(self, table_writes: list[TableWrite]) -> None:
        """Map what isn't there yet. Of several entries for one place the last one counts."""
        if not self.is_contiguous:
            super()._write_tables(table_writes)
        self._wait_swapped_out(table_writes)
        began = time.perf_counter()
        wanted: dict[tuple[int, int, int], int] = {}
        for slot, g, at, pages in table_writes:
            lying = self.mapped_pages[g][slot]
            for i, page in enumerate(pages, at):
                if page and (page != lying[i] or (g, slot, i) in wanted):
                    wanted[g, slot, i] = page
        for (g, slot, at), page in wanted.items():
            self._map_page(g, slot, at, page)
        self.stall_seconds += time.perf_counter() - began

    def _map_page(self, group_index: int, slot: int, at: int, page: int) -> None:
        before = int(self.mapped_pages[group_index][slot, at])
        if before == page:
            return
        parts = self.kv_config.groups[group_index].parts
        if before:
            for run in self._page_runs(group_index, slot, at, before):
                self.driver.unmap(run.address)
            self.num_unmaps += parts
            self.mapped_pages[group_index][slot, at] = 0
        map_all(self.driver, self._page_runs(group_index, slot, at, page))
        self.num_maps += parts
        self.mapped_pages[group_index][slot, at] = page

    def unmap_slot(self, slot: int) -> None:
        """Nothing lies in a slot's places any more. Nobody may use it, nor count on what lay there."""
        for g, lying in enumerate(self.mapped_pages):
            for at in np.flatnonzero(lying[slot]).tolist():
                for run in self._page_runs(g, slot, at, 0):
                    self.driver.unmap(run.address)
                    self.num_unmaps += 1
            lying[slot] = 0

    def apply_page_ops(self, page_ops: PageOps) -> None:
        self._wait_map_job()
        super().apply_page_ops(page_ops)

    def apply_overlapped_page_ops(self, page_ops: PageOps) -> None:
        """Replay what was sent ahead of need: its maps delay nobody."""
        self._wait_map_job()
        if self.map_thread is None:
            self._apply_overlapped(page_ops)
        else:
            self.map_job = self.map_thread.submit(self._apply_overlapped, page_ops)

    def _apply_overlapped(self, page_ops: PageOps) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.table_entries.device)  # what CUDA knows of a thread; that one has a number
        maps, seconds = self.num_maps, self.stall_seconds
        super().apply_page_ops(page_ops)
        self.overlapped_maps += self.num_maps - maps
        if self.map_thread is None:
            self.overlap_seconds += self.stall_seconds - seconds
        self.stall_seconds = seconds

    def _wait_map_job(self) -> None:
        """Until the thread is done; the seconds count as those of mapping in a step's way. What it met is raised."""
        if self.map_job is not None:
            began, job, self.map_job = time.perf_counter(), self.map_job, None
            job.result()
            self.stall_seconds += time.perf_counter() - began

    @property
    def mapping_stats(self) -> MappingStats:
        """What was mapped since the start; the scratch slot isn't counted."""
        there = (self.num_maps - self.num_unmaps) * self.driver.page
        return MappingStats(
            there, self.num_maps, self.num_unmaps, self.overlapped_maps, self.stall_seconds, self.overlap_seconds
        )

    def close(self) -> None:
        """Give the pages back. Whoever still has tensors over them is named."""
        if self.map_thread is not None:
            self.map_thread.shutdown()
        for name in ("caches", "group_pages", "pages_by_size", "host_pool", "buffer"):
            if hasattr(self, name):
                delattr(self, name)
        self.driver.close()


def open_store(
    kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool, *,
    is_contiguous: bool,
    map_in_background: bool = False,
) -> VirtualStore:  # fmt: skip
    """StartupError where the device has no virtual memory to be managed, or not enough of it."""
    page = kv_config.groups[0].page_bytes // kv_config.groups[0].parts
    driver = open_driver(str(device), page)
    try:
        if device.type == "cpu":
            from quire.worker.virtual.memfd import check_map_count

            check_map_count(sum(kv_config.slots * group.parts * (group.table_width + 1) for group in kv_config.groups))
        return VirtualStore(
            kv_config,
            spec,
            dtype,
            device,
            driver,
            debug,
            is_contiguous=is_contiguous,
            map_in_background=map_in_background,
        )
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors over what is given back
        with suppress(DriverError):
            driver.close()
        raise
