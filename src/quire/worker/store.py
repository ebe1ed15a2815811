"""The pages and the page tables, to which page operations are applied.

One flat buffer holds all pages of all groups (Jenga §4.2's page-layer partition: all layers of a page are neighbours),
so copying a page is one contiguous copy whatever the number of layers. Operations have the effect of in-order
replay before the step's writes: copies are batched, and tables are written last.
"""

from __future__ import annotations

from copy import copy
from itertools import chain
from zlib import crc32

import numpy as np
import torch

from quire.kernels.forward_batch import LayerCache
from quire.kernels.mamba_states import StateCache
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import ModelSpec
from quire.protocol.shared_host import SharedHostMemory
from quire.protocol.step_plan import PageCopy, PageOps, Poison, SwapIn, SwapOut, TableWrite
from quire.worker.cache_views import check_kv_cache_config, cross_caches, layer_caches, pages_by_size, state_caches
from quire.worker.hazards import PageMoves, PageOpBatch, batch_page_ops
from quire.worker.host_pool import HostPool
from quire.worker.prompt_lengths import PromptLengths
from quire.worker.staging_buffer import StagingBuffer

PAGE_CHANGES = (PageCopy, SwapOut, SwapIn, Poison)
TABLE_ALIGNMENT = 16  # page ids: a group's table begins at a multiple


class Store:
    """The pages and tables of `kv_config` on `device`.

    `group_pages` [pages, numbers] are the pages of each group, page 0 included, `tables` [slots, logical pages] its
    page table. `caches` belong to layers with attention, `draft_caches` to those of a draft model (numbered from 0),
    `cross_caches` to layers that attend to images, `state_caches` to layers with a state, whose `ssm` part has
    `state_dtype`, with room for the inputs of `saved_tokens` tokens. `prompt_lengths` exist if layers have budgets.
    `shared_host` is as in HostPool. `staging` is for small uploads on the main stream. `shared_buffer` are the bytes of
    the pages, if other models' stores use them too. With `debug` the content of every swapped page is compared. With
    `has_checksum`, `op_checksum` is a checksum over everything that page operations and graph replays changed, in
    order; ranks compare it.
    """

    def __init__(
        self, kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool = False,
        shared_buffer: torch.Tensor | None = None, state_dtype: torch.dtype = torch.float32, has_checksum: bool = False,
        saved_tokens: int = 0, shared_host: SharedHostMemory | None = None,
    ) -> None:  # fmt: skip
        check_kv_cache_config(kv_config, spec)
        self.kv_config, self.device, self.shared_buffer, self.saved_tokens = kv_config, device, shared_buffer, 0
        self.op_checksum = 0 if has_checksum else None
        self.staging = StagingBuffer(device)
        self.buffer = self._allocate_pages(dtype)
        self.page_sizes = tuple(group.page_bytes for group in kv_config.groups)
        self.pages_by_size = pages_by_size(self.buffer, kv_config)
        self.group_pages = tuple(self.pages_by_size[size] for size in self.page_sizes)
        self.host_pool = HostPool(self.pages_by_size, kv_config.host_bytes, debug, shared_host)
        self._make_tables()
        self.prompt_lengths = PromptLengths(kv_config.slots, spec.min_budget, self.staging) if spec.min_budget else None
        caches, first_draft = self._make_caches(spec), sum(not layer.is_draft for layer in spec.layers)
        self.caches = {i: cache for i, cache in caches.items() if i < first_draft}
        self.draft_caches = {i - first_draft: cache for i, cache in caches.items() if i >= first_draft}
        self.cross_caches = cross_caches(self.buffer, kv_config, spec)
        self.state_caches: dict[int, StateCache] = {}
        if any(layer.state_tensors for layer in spec.layers):
            self.saved_tokens = saved_tokens
            self.state_caches = state_caches(self.buffer, kv_config, spec, state_dtype, saved_tokens)
        if device.type != "cpu":  # compile the kernels now, not while requests wait
            for size in self.pages_by_size:
                self._copy({0: 0}, size)
                first = self.host_pool.first_pages[size]
                self.host_pool.swap_out({first: 0}, size)
                self.host_pool.swap_in({0: first}, size)

    def _allocate_pages(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all pages in one buffer of zeros: page 0 is scratch and must stay finite."""
        if self.shared_buffer is not None:
            return self.shared_buffer[: self.kv_config.bytes].view(dtype)
        numbers = self.kv_config.bytes // self.kv_config.itemsize
        if self.device.type == "cpu":  # NumPy's untouched zeros take no memory, torch's do
            return torch.from_numpy(np.zeros(numbers * dtype.itemsize, dtype=np.uint8)).view(dtype)
        return torch.zeros(numbers, dtype=dtype, device=self.device)

    def _make_caches(self, spec: ModelSpec) -> dict[int, LayerCache]:
        return layer_caches(self.buffer, self.kv_config, spec)

    def draft_view(self) -> Store:
        """Return the same pages and tables for a draft model's layers. It keeps no checksum."""
        view = copy(self)
        view.caches, view.draft_caches, view.op_checksum = self.draft_caches, {}, None
        view.state_caches, view.saved_tokens = {}, 0
        return view

    def close(self) -> None:
        """Release the pages. Nothing to do here."""

    def _make_tables(self) -> None:
        """Allocate all tables in one array with fixed addresses: one index names an entry of any table."""
        slots = self.kv_config.slots
        self.table_widths = np.array([group.table_width for group in self.kv_config.groups])
        sizes = -(-slots * self.table_widths // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
        self.table_offsets = np.cumsum(sizes) - sizes  # index of each table's first entry
        self.host_table_entries = np.zeros(int(sizes.sum()), dtype=np.int64)
        self.table_entries = torch.from_numpy(self.host_table_entries)
        if self.device.type != "cpu":
            self.table_entries = self.table_entries.to(self.device)
        ends = list(zip(self.table_offsets.tolist(), self.table_widths.tolist()))
        self.host_tables = [
            self.host_table_entries[at : at + slots * width].reshape(slots, width) for at, width in ends
        ]
        self.tables = [self.table_entries[at : at + slots * width].view(slots, width) for at, width in ends]

    def clear_scratch(self) -> None:
        """Zero page 0 of every group."""
        for pages in self.pages_by_size.values():
            pages[0].zero_()

    def apply_page_ops(self, page_ops: PageOps) -> None:
        """Apply operations with the effect of one after another. Table writes come last, since only slices read tables:
        otherwise they would split copies that can be launched together."""
        table_writes = [op for op in page_ops if type(op) is TableWrite]
        others = [op for op in page_ops if type(op) is not TableWrite] if len(table_writes) < len(page_ops) else []
        for batch in batch_page_ops(others, self.page_sizes):
            self._apply_batch(batch)
        if table_writes:
            self._write_tables(table_writes)

    def apply_overlapped_page_ops(self, page_ops: PageOps) -> None:
        """Apply operations for later steps, after a step's slices are enqueued."""
        self.apply_page_ops(page_ops)

    def _apply_batch(self, batch: PageOpBatch) -> None:
        kind, size, moves = batch
        if self.shared_buffer is not None:
            self.host_pool.record_writes()  # swaps wait for the writes of other models' stores
        if kind is PageCopy:
            self._copy(moves, size)
        elif kind is SwapOut:
            self.host_pool.swap_out(moves, size)
            if self.shared_buffer is not None:
                # Another store may allocate these pages and cannot know of the swap.
                self.host_pool.wait_swapped_out(moves.values(), size)
        elif kind is SwapIn:
            self.host_pool.swap_in(moves, size)
        else:
            assert kind is Poison, f"{kind} changes no page"
            self._poison(moves, size)
        if self.op_checksum is not None:
            record = np.array([(PAGE_CHANGES.index(kind), size), *moves.items()])
            self.op_checksum = crc32(record.tobytes(), self.op_checksum)

    def record_graph_replay(self, *sizes: int) -> None:
        """Add the replay of a graph of these sizes to the checksum: ranks must replay the same graph."""
        if self.op_checksum is not None:
            self.op_checksum = crc32(np.array(sizes).tobytes(), self.op_checksum)

    def _copy(self, moves: PageMoves, size: int) -> None:
        pages = self.pages_by_size[size]
        dst, src = self.staging.upload_all([np.array(list(moves)), np.array(list(moves.values()))])
        if self.device.type == "cpu":
            pages.index_copy_(0, dst, pages.index_select(0, src))
            return
        from quire.kernels.triton.copy_pages import copy_pages

        self.host_pool.wait_swapped_out(moves, size)
        copy_pages(pages, src, dst)
        self.host_pool.record_writes()

    def _poison(self, moves: PageMoves, size: int) -> None:
        """Set all bits: that is NaN in every float dtype, and a page may have parts of several dtypes."""
        self.host_pool.wait_swapped_out(moves, size)
        bits = self.pages_by_size[size].view(torch.uint8)
        bits.index_fill_(0, self.staging.upload(np.array(list(moves))), 255)
        self.host_pool.record_writes()

    def _write_tables(self, table_writes: list[TableWrite]) -> None:
        """Apply all writes in one assignment on the host, and in one upload and one scatter on the device."""
        slots, groups, starts_in_row, page_lists = zip(*table_writes)
        counts = np.fromiter(map(len, page_lists), np.int64, len(page_lists))
        pages = np.fromiter(chain.from_iterable(page_lists), np.int64, int(counts.sum()))
        group_index = np.array(groups)
        starts = self.table_offsets[group_index] + np.array(slots) * self.table_widths[group_index]
        starts += np.array(starts_in_row)
        if (counts != 1).any():
            flat = np.arange(len(pages)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        else:
            flat = np.repeat(starts, counts)
        tables = self.host_table_entries
        tables[flat] = pages
        # NumPy doesn't define which value of an index that occurs twice remains.
        order = np.sort(flat)
        if (order[1:] == order[:-1]).any():
            for start, ids in zip(starts.tolist(), page_lists):
                tables[start : start + len(ids)] = ids
            pages = tables[flat]  # equal values at equal indices, so the order of the scatter doesn't matter
        if self.device.type != "cpu":
            self._wait_swapped_out(table_writes)
            index, values = self.staging.upload_all([flat, pages])
            self.table_entries.index_copy_(0, index, values)
        if self.op_checksum is not None:
            self.op_checksum = crc32(tables[flat].tobytes(), crc32(flat.tobytes(), self.op_checksum))

    def _wait_swapped_out(self, table_writes: list[TableWrite]) -> None:
        """Wait for swap-outs of the pages in these tables, which slices may write."""
        for size in self.pages_by_size if self.host_pool.has_pending_swap_outs else ():
            page_lists = (write.pages for write in table_writes if self.page_sizes[write.group] == size)
            self.host_pool.wait_swapped_out(chain.from_iterable(page_lists), size)
