"""The store of virtual memory: each sequence's tokens are at contiguous addresses.

All physical pages are created at start and mapped once, one after another: in that view pages are copied, swapped and
poisoned as in any store. In addition each buffer of a group has addresses for all slots (vAttention §5.1.1), where a
TableWrite maps the parts of its pages instead of writing a table. A page may be mapped at several addresses. Page 0 is
mapped at all addresses of slot 0, which is scratch.

An address is remapped at once, while earlier steps may still run: the memory guarantees that none of them uses its
slot, or that it is after the end of the slot's tokens, where kernels do not read.
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
    """A Store over `driver`. With `is_contiguous`, `caches` are contiguous and `tables` contain the slots themselves;
    otherwise they are pages of whole tokens and their tables, over the same memory, for kernels that need pages. With
    `map_in_background`, a thread applies page operations of later steps (§6.2.1)."""

    def __init__(
        self, kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, driver: Driver,
        debug: bool = False, *, is_contiguous: bool = True, map_in_background: bool = False,
        has_checksum: bool = False,
    ) -> None:  # fmt: skip
        self.driver, self.is_contiguous = driver, is_contiguous
        self.map_thread = ThreadPoolExecutor(1, "quire-maps") if map_in_background and is_contiguous else None
        self.map_job: Future[None] | None = None  # the thread's current job
        self.dtype = dtype
        for group in kv_config.groups:
            assert group.page_bytes == group.parts * driver.page, "a page has one driver page in every buffer"
            if group.run_pages != 1 and not is_contiguous:
                raise StartupError(
                    f"{group.run_tokens} tokens fill {group.run_pages} pages of --memory virtual, and this attention "
                    "reads pages of whole tokens",
                    "Use --attention auto, or another --virtual-page-kib or --virtual-layout",
                )
        super().__init__(kv_config, spec, dtype, device, debug, has_checksum=has_checksum)

    def _allocate_pages(self, dtype: torch.dtype) -> Tensor:
        driver, kv_config = self.driver, self.kv_config
        count = kv_config.bytes // driver.page
        driver.create(count)
        all_pages = driver.reserve(count * driver.page)
        driver.map(all_pages, 0, count)
        numbers = count * driver.page // dtype.itemsize
        self.buffer_addresses = [
            [driver.reserve(self._buffer_bytes(group)) for _ in range(group.parts)] for group in kv_config.groups
        ]
        self.mapped_pages = [
            np.zeros((kv_config.slots, group.table_width), dtype=np.int64) for group in kv_config.groups
        ]
        for g, group in enumerate(kv_config.groups):
            for at in range(group.table_width):
                for run in self._page_runs(g, 0, at, 0):
                    driver.map(*run)
        self.num_maps = self.num_unmaps = self.overlapped_maps = 0
        self.stall_seconds = self.overlap_seconds = 0.0
        return driver.tensor(all_pages, (numbers,), (1,), dtype)

    def _buffer_bytes(self, group: KVCacheGroup) -> int:
        return self.kv_config.slots * group.table_width * self.driver.page

    def _page_runs(self, group_index: int, slot: int, at: int, page: int) -> Iterator[PageRun]:
        """Yield the maps of a page's parts at entry `at` of a slot."""
        group = self.kv_config.groups[group_index]
        offset = (slot * group.table_width + at) * self.driver.page
        for part, buffer in enumerate(self.buffer_addresses[group_index]):
            yield PageRun(buffer + offset, page * group.parts + part)

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
        """Return the cache of the `at`-th layer of a group."""
        layer_spec, page, item = spec.layers[layer], self.driver.page, self.kv_config.itemsize
        key_bytes = layer_spec.token_bytes(item) // 2  # of one token
        stride = page * group.run_pages // group.run_tokens  # bytes from one token's keys to the next one's
        layers_per_part = stride // key_bytes
        part, offset = 2 * (at // layers_per_part), at % layers_per_part * key_bytes
        heads, dim = layer_spec.kv_heads, layer_spec.head_dim
        if self.is_contiguous:
            slots, slot_bytes = self.kv_config.slots, group.table_width * page
            shape = slots, heads, slot_bytes // stride, dim
            strides = slot_bytes // item, dim, stride // item, 1
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
        """Map pages that are not mapped yet. Of several writes to one entry the last one remains."""
        if not self.is_contiguous:
            super()._write_tables(table_writes)
        self._wait_swapped_out(table_writes)
        began = time.perf_counter()
        new_pages: dict[tuple[int, int, int], int] = {}
        for slot, g, at, pages in table_writes:
            mapped = self.mapped_pages[g][slot]
            for i, page in enumerate(pages, at):
                if page and (page != mapped[i] or (g, slot, i) in new_pages):
                    new_pages[g, slot, i] = page
        for (g, slot, at), page in new_pages.items():
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
        """Unmap all pages of a slot, which must not be in use."""
        for g, mapped in enumerate(self.mapped_pages):
            for at in np.flatnonzero(mapped[slot]).tolist():
                for run in self._page_runs(g, slot, at, 0):
                    self.driver.unmap(run.address)
                    self.num_unmaps += 1
            mapped[slot] = 0

    def apply_page_ops(self, page_ops: PageOps) -> None:
        self._wait_map_job()
        super().apply_page_ops(page_ops)

    def apply_overlapped_page_ops(self, page_ops: PageOps) -> None:
        """Apply operations for later steps, in the thread if there is one: these maps delay no step."""
        self._wait_map_job()
        if self.map_thread is None:
            self._apply_overlapped(page_ops)
        else:
            self.map_job = self.map_thread.submit(self._apply_overlapped, page_ops)

    def _apply_overlapped(self, page_ops: PageOps) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.table_entries.device)  # CUDA's device is per thread
        maps, seconds = self.num_maps, self.stall_seconds
        super().apply_page_ops(page_ops)
        self.overlapped_maps += self.num_maps - maps
        if self.map_thread is None:
            self.overlap_seconds += self.stall_seconds - seconds
        self.stall_seconds = seconds

    def _wait_map_job(self) -> None:
        """Wait for the thread and raise its error, if any. The seconds count as a stall."""
        if self.map_job is not None:
            began, job, self.map_job = time.perf_counter(), self.map_job, None
            job.result()
            self.stall_seconds += time.perf_counter() - began

    @property
    def mapping_stats(self) -> MappingStats:
        """The maps since the start, without those of the scratch slot."""
        mapped_bytes = (self.num_maps - self.num_unmaps) * self.driver.page
        return MappingStats(
            mapped_bytes, self.num_maps, self.num_unmaps, self.overlapped_maps, self.stall_seconds, self.overlap_seconds
        )

    def close(self) -> None:
        """Release the pages. Raise DriverError with the names of tensors that still use them."""
        if self.map_thread is not None:
            self.map_thread.shutdown()
        for name in ("caches", "group_pages", "pages_by_size", "host_pool", "buffer"):
            if hasattr(self, name):
                delattr(self, name)
        self.driver.close()


def open_store(
    kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool, *,
    is_contiguous: bool, map_in_background: bool = False, has_checksum: bool = False,
) -> VirtualStore:  # fmt: skip
    """Open a device's driver and a store over it. Raise StartupError if it has no virtual memory, or not enough."""
    page = kv_config.groups[0].page_bytes // kv_config.groups[0].parts
    driver = open_driver(str(device), page)
    try:
        if device.type == "cpu":
            from quire.worker.virtual.memfd import check_map_count

            check_map_count(sum(kv_config.slots * group.parts * (group.table_width + 1) for group in kv_config.groups))
        return VirtualStore(
            kv_config, spec, dtype, device, driver, debug, is_contiguous=is_contiguous,
            map_in_background=map_in_background, has_checksum=has_checksum,
        )  # fmt: skip
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their locals hold tensors over the driver's memory
        with suppress(DriverError):
            driver.close()
        raise
