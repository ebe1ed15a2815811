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

from quire.kernels.forward_batch import LayerCache
from quire.kernels.mamba_states import StateCache
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import PageCopy, PageOps, Poison, SwapIn, SwapOut, TableWrite
from quire.worker.cache_views import check_kv_cache_config, cross_caches, layer_caches, pages_by_size, state_caches
from quire.worker.hazards import PageMoves, PageOpBatch, batch_page_ops
from quire.worker.host_pool import HostPool
from quire.worker.prompt_lengths import PromptLengths
from quire.worker.staging_buffer import StagingBuffer

PAGE_CHANGES = (PageCopy, SwapOut, SwapIn, Poison)
TABLE_ALIGNMENT = 16  # page ids: where a group's table begins


class Store:
    """Pages and tables of a Geometry on `device`. `staging` is for small uploads on the stream of the rows. With
    `debug` the content of every swapped page is compared. `group_pages` [pages, numbers] are the pages of each group,
    page 0 included, `tables` [slots, logical pages] its page table; `caches` are the attending layers', `cross_caches`
    those of layers that attend to pictures, `state_caches` those of layers with a state, whose `ssm` is of
    `state_dtype`; `prompt_lengths` what layers with budgets must know, if there are any. `shared_buffer` are the bytes
    that hold the pages, if other models' stores have them too."""

    def __init__(
        self, kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool = False,
        shared_buffer: torch.Tensor | None = None, state_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        check_kv_cache_config(kv_config, spec)
        self.kv_config, self.device, self.shared_buffer = kv_config, device, shared_buffer
        # of a rank: a checksum over all that journals changed, and graphs, in order
        self.op_checksum: int | None = None
        self.staging = StagingBuffer(device)
        self.buffer = self._allocate_pages(dtype)
        self.page_sizes = tuple(group.page_bytes for group in kv_config.groups)
        self.pages_by_size = pages_by_size(self.buffer, kv_config)
        self.group_pages = tuple(self.pages_by_size[size] for size in self.page_sizes)
        self.host_pool = HostPool(self.pages_by_size, kv_config.host_bytes, debug)
        self._make_tables()
        self.prompt_lengths = PromptLengths(kv_config.slots, spec.min_budget, self.staging) if spec.min_budget else None
        self.caches = self._make_caches(spec)
        self.cross_caches = cross_caches(self.buffer, kv_config, spec)
        self.state_caches: dict[int, StateCache] = {}
        if any(layer.state_tensors for layer in spec.layers):
            self.state_caches = state_caches(self.buffer, kv_config, spec, state_dtype)
        if device.type != "cpu":  # so that kernels are compiled now, not in the midst of serving
            for size in self.pages_by_size:
                self._copy({0: 0}, size)
                self.host_pool.swap_out({0: 0}, size)
                self.host_pool.swap_in({0: 0}, size)

    def _allocate_pages(self, dtype: torch.dtype) -> torch.Tensor:
        """All pages, one after another. Zeros: page 0 is scratch and must stay finite."""
        if self.shared_buffer is not None:
            return self.shared_buffer[: self.kv_config.bytes].view(dtype)
        numbers = self.kv_config.bytes // self.kv_config.itemsize
        if self.device.type == "cpu":  # NumPy's untouched zeros cost a CPU no memory, torch's do
            return torch.from_numpy(np.zeros(numbers * dtype.itemsize, dtype=np.uint8)).view(dtype)
        return torch.zeros(numbers, dtype=dtype, device=self.device)

    def _make_caches(self, spec: ModelSpec) -> dict[int, LayerCache]:
        return layer_caches(self.buffer, self.kv_config, spec)

    def close(self) -> None:
        """Nothing is used any more."""

    def _make_tables(self) -> None:
        """One allocation, whose addresses are fixed and in which every entry of every table has a number."""
        slots = self.kv_config.slots
        self.table_widths = np.array([group.table_width for group in self.kv_config.groups])
        sizes = -(-slots * self.table_widths // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
        self.table_offsets = np.cumsum(sizes) - sizes  # the number of each table's first entry
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
        """Page 0 of every group as it was at first."""
        for pages in self.pages_by_size.values():
            pages[0].zero_()

    def apply_page_ops(self, page_ops: PageOps) -> None:
        """Apply a journal's entries, with the effect of one after another. Only rows read tables, so their entries are
        put together: otherwise they would stand between copies that are made at once."""
        named = [entry for entry in page_ops if type(entry) is TableWrite]
        contents = [entry for entry in page_ops if type(entry) is not TableWrite] if len(named) < len(page_ops) else []
        for launch in batch_page_ops(contents, self.page_sizes):
            self._apply_batch(launch)
        if named:
            self._write_tables(named)

    def apply_overlapped_page_ops(self, page_ops: PageOps) -> None:
        """Replay what is sent ahead of need, behind a step's rows."""
        self.apply_page_ops(page_ops)

    def _apply_batch(self, batch: PageOpBatch) -> None:
        kind, size, moves = batch
        if self.shared_buffer is not None:
            self.host_pool.record_writes()  # swaps wait for what other models' stores have enqueued
        if kind is PageCopy:
            self._copy(moves, size)
        elif kind is SwapOut:
            self.host_pool.swap_out(moves, size)
            if self.shared_buffer is not None:
                self.host_pool.wait_swapped_out(
                    moves.values(), size
                )  # another store may give these pages out, and can't know
        elif kind is SwapIn:
            self.host_pool.swap_in(moves, size)
        else:
            self._poison(moves, size)
        if self.op_checksum is not None:
            said = np.array([(PAGE_CHANGES.index(kind), size), *moves.items()])
            self.op_checksum = crc32(said.tobytes(), self.op_checksum)

    def record_graph_replay(self, *sizes: int) -> None:
        """A graph of these sizes is replayed for a step, which adds up with others' the rows of a graph alike."""
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
        """All bits are ones: that is no number in any dtype, and a page may have parts of several."""
        self.host_pool.wait_swapped_out(moves, size)
        bits = self.pages_by_size[size].view(torch.uint8)
        bits.index_fill_(0, self.staging.upload(np.array(list(moves))), 255)
        self.host_pool.record_writes()

    def _write_tables(self, table_writes: list[TableWrite]) -> None:
        """All deltas in one assignment on the host, and in one upload and one scatter on the device."""
        slots, groups, ats, named = zip(*table_writes)
        counts = np.fromiter(map(len, named), np.int64, len(named))
        pages = np.fromiter(chain.from_iterable(named), np.int64, int(counts.sum()))
        of = np.array(groups)
        starts = self.table_offsets[of] + np.array(slots) * self.table_widths[of] + np.array(ats)
        if (counts != 1).any():
            flat = np.arange(len(pages)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        else:
            flat = np.repeat(starts, counts)
        tables = self.host_table_entries
        tables[flat] = pages
        # A place that occurs twice holds what NumPy happened to write last, which it doesn't promise to be the last.
        order = np.sort(flat)
        if (order[1:] == order[:-1]).any():
            for start, ids in zip(starts.tolist(), named):
                tables[start : start + len(ids)] = ids
            pages = tables[flat]  # the same value wherever a place occurs, so the scatter's order doesn't matter
        if self.device.type != "cpu":
            self._wait_swapped_out(table_writes)
            to, ids = self.staging.upload_all([flat, pages])
            self.table_entries.index_copy_(0, to, ids)
        if self.op_checksum is not None:
            self.op_checksum = crc32(tables[flat].tobytes(), crc32(flat.tobytes(), self.op_checksum))

    def _wait_swapped_out(self, table_writes: list[TableWrite]) -> None:
        """Rows may write the pages that these tables name."""
        for size in self.pages_by_size if self.host_pool.has_pending_swap_outs else ():
            named = (entry.pages for entry in table_writes if self.page_sizes[entry.group] == size)
            self.host_pool.wait_swapped_out(chain.from_iterable(named), size)
