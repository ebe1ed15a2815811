"""The host pool: pages of swapped sequences in host memory, and the swaps (PagedAttention §4.5).

Page operations have the effect of in-order replay before the step's slices. On a GPU two streams do this with little
waiting: `main`, the current one, runs slices, copies and poison; `swap_stream` swaps, in the order of the operations.
- Earlier slices, then a swap: nothing waits. Only sequences that are not in flight are swapped out, and only pages that
  no step in flight uses are swapped in; the steps that used them have been collected. So swaps overlap with the step
  before (depth 2). That step may read shared pages that are being swapped out, but does not write them: a shared page
  is copied before it is written.
- Earlier copies and poison, then a swap: `swap_stream` waits for the last of them.
- SwapOut, then a write to the page: a table write, copy or poison names the page first and makes `main` wait for its
  SwapOut, so a page is reused while others are still being swapped out. A later SwapIn is on the same stream.
- SwapIn, then anything: `main` waits for it at once, after the slices of the step before, which are enqueued already.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.pinned_memory import pinned_block
from quire.protocol.shared_host import SharedHostMemory
from quire.worker.hazards import pages_overlap
from quire.worker.staging_buffer import StagingBuffer

CPU_GATHER_BYTES = 2**18  # gathered at once on a CPU, to fit its caches; pages over an eighth of it are copied singly
SWAP_OUT_EVENT_BYTES = 2**25  # of pages that share an event: 0.6 ms over PCIe
# Pages of at least this size are copied singly by the copy engines (5 us of the host each, 50 GB/s from 1 MiB on),
# smaller ones by one kernel that accesses host memory (50 GB/s from 16 KiB on, 45 GB/s at 4 KiB, where single copies
# reach 0.6). Few programs suffice and leave the device to the slices. Measured on an H200 with PCIe 5 (55 GB/s).
MIN_COPY_ENGINE_BYTES = 2**20
SWAP_OUT_PROGRAMS, SWAP_IN_PROGRAMS = 8, 16


class HostPool:
    """Host pages and their swaps. `pages` and `host_pages` are views [pages, numbers] of all device and host memory, by
    the bytes of a page. Host memory is pinned if there is a GPU. With `debug` every swap is awaited and compared."""

    def __init__(
        self,
        pages: Mapping[int, Tensor],
        host_bytes: int,
        debug: bool = False,
        shared_host: SharedHostMemory | None = None,
    ) -> None:
        """Allocate `host_bytes` bytes of host memory, at least one page of every size; or map `shared_host`, whose part
        for this engine begins with page `first_pages[size]` of each size."""
        self.pages, self.debug = pages, debug
        first = next(iter(pages.values()))
        self.device, host_bytes = first.device, max(host_bytes, *pages, 0)
        self.first_pages = dict.fromkeys(pages, 0)
        if shared_host is not None:
            assert host_bytes <= shared_host.part_bytes(pages), "the part of this engine is too small"
            self.first_pages = {size: shared_host.part_start(pages) // size for size in pages}
            raw = torch.frombuffer(shared_host.map(pages), dtype=torch.uint8)
            host_bytes = len(raw)
            if self.device.type != "cpu":
                _pin(self, raw)
        elif self.device.type == "cpu":  # NumPy's untouched zeros take no memory, torch's do
            raw = torch.from_numpy(np.zeros(host_bytes, dtype=np.uint8))
        elif (block := pinned_block().take(host_bytes)) is not None:
            raw = block
        else:  # torch allocates pinned memory in powers of two
            raw = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=True)
        self.host_pages = {
            size: raw[: host_bytes // size * size].view(first.dtype).view(host_bytes // size, -1) for size in pages
        }
        if self.device.type == "cpu":
            return
        self.swap_stream = torch.cuda.Stream(self.device)
        self.staging = StagingBuffer(self.device, segment_bytes=2**18)  # of `swap_stream`
        self.writes_event = torch.cuda.Event()  # after the last copy or poison on `main`
        self.pending_swap_outs: list[tuple[int, frozenset[int], torch.cuda.Event]] = []  # size and pages, oldest first
        self.record_writes()

    @property
    def has_pending_swap_outs(self) -> bool:
        """True if a page may still be read by a swap-out."""
        return self.device.type != "cpu" and bool(self.pending_swap_outs)

    def swap_out(self, moves: Mapping[int, int], size: int) -> None:
        """Copy pages of `size` bytes to host pages: {host page: page}."""
        if self.device.type == "cpu":
            _gather_on_cpu(self.host_pages[size], self.pages[size], moves)
        else:
            with torch.cuda.stream(self.swap_stream):
                self.swap_stream.wait_event(self.writes_event)
                left = iter(moves.items())
                while part := dict(islice(left, max(SWAP_OUT_EVENT_BYTES // size, 1))):
                    self._copy_pages(self.host_pages[size], self.pages[size], part, SWAP_OUT_PROGRAMS)
                    event = torch.cuda.Event()
                    event.record(self.swap_stream)
                    self.pending_swap_outs.append((size, frozenset(part.values()), event))
        if self.debug:
            self._check_equal(((page, host) for host, page in moves.items()), size)

    def swap_in(self, moves: Mapping[int, int], size: int) -> None:
        """Copy host pages to pages of `size` bytes: {page: host page}."""
        if self.device.type == "cpu":
            _gather_on_cpu(self.pages[size], self.host_pages[size], moves)
        else:
            with torch.cuda.stream(self.swap_stream):
                self.swap_stream.wait_event(self.writes_event)
                self._copy_pages(self.pages[size], self.host_pages[size], moves, SWAP_IN_PROGRAMS)
            torch.cuda.current_stream(self.device).wait_stream(self.swap_stream)
        if self.debug:
            self._check_equal(moves.items(), size)

    def synchronize(self) -> None:
        """Wait for all swaps."""
        if self.device.type != "cpu":
            self.swap_stream.synchronize()

    def record_writes(self) -> None:
        """Make later swaps wait for the copies and poison enqueued so far."""
        if self.device.type != "cpu":
            self.writes_event.record(torch.cuda.current_stream(self.device))

    def wait_swapped_out(self, pages: Iterable[int], size: int) -> None:
        """Make later work wait for the swap-outs of these pages, which it will write."""
        if self.device.type == "cpu":
            return
        while self.pending_swap_outs and self.pending_swap_outs[0][2].query():
            del self.pending_swap_outs[0]
        written = frozenset(pages) if self.pending_swap_outs else frozenset()
        for i in reversed(range(len(self.pending_swap_outs))):
            other_size, swapped, event = self.pending_swap_outs[i]
            if pages_overlap(written, size, swapped, other_size):
                torch.cuda.current_stream(self.device).wait_event(event)
                del self.pending_swap_outs[: i + 1]  # `swap_stream` is in order: earlier ones are done too
                return

    def _copy_pages(self, target: Tensor, source: Tensor, moves: Mapping[int, int], programs: int) -> None:
        """Copy target[to] = source[from] for {to: from}, on the current stream."""
        if target.shape[1] * target.itemsize >= MIN_COPY_ENGINE_BYTES:
            for dst_page, src_page in moves.items():
                target[dst_page].copy_(source[src_page], non_blocking=True)
        else:
            from quire.kernels.triton.copy_pages import copy_rows

            dst, src = self.staging.upload_all([np.array(list(moves)), np.array(list(moves.values()))])
            copy_rows(target, source, dst, src, programs)

    def _check_equal(self, pairs: Iterable[tuple[int, int]], size: int) -> None:
        """Assert that the bits of these (page, host page) are equal."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        for page, host in pairs:
            same = torch.equal(
                self.pages[size][page].view(torch.uint8).cpu(), self.host_pages[size][host].view(torch.uint8)
            )
            assert same, f"page {page} and row {host} of the host pages differ after a swap"


def _pin(owner: object, raw: Tensor) -> None:
    """Pin memory for as long as `owner` exists. Raise StartupError if the system does not allow it."""
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(raw.data_ptr(), len(raw), 0))
    if status:
        raise StartupError(f"{len(raw):,} bytes of shared host memory can't be pinned: CUDA error {status}",
                           "Use a smaller --swap-gib")  # fmt: skip
    weakref.finalize(owner, lambda: cudart.cudaHostUnregister(raw.data_ptr()))


def _gather_on_cpu(target: Tensor, source: Tensor, moves: Mapping[int, int]) -> None:
    """Copy target[to] = source[from] for {to: from} on a CPU: small pages many at a time, large ones singly."""
    batch = CPU_GATHER_BYTES // (target.shape[1] * target.itemsize)
    if batch < 8:
        for dst_page, src_page in moves.items():
            target[dst_page].copy_(source[src_page])
        return
    left = iter(moves.items())
    while part := list(islice(left, batch)):
        dst, src = torch.tensor(part).unbind(1)
        target.index_copy_(0, dst, source.index_select(0, src))
