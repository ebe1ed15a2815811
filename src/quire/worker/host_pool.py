"""The host pool: pages of swapped sequences in host memory, and their way there and back (PagedAttention §4.5).

Order. A journal means in-order replay before the step's rows; on a GPU that is kept with less waiting. Of two streams
`main`, the current one, runs rows, copies and poison; `side` moves pages out and in, in the journal's order.
- Earlier rows, then Out or In: nothing waits. The memory swaps out quiet sequences only and takes pages that no step in
  flight names; whatever rows used them have been collected, so they have run. Swaps thus go on while the step before
  computes (depth 2). It may read pages that are on their way out, where they are shared, but doesn't write them: a
  shared page is copied before it is written.
- Earlier copies and poison, of this journal or another, then Out or In: `side` waits for the last of them.
- Out, then what writes the page: it is named first, by a table, a copy or poison. Whoever names it makes `main` wait
  for its Out, so a page is used again while others still leave. An In after the Out is on the same stream.
- In, then anything: `main` waits for it at once, behind the rows of the step before, which are enqueued already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from quire.worker.hazards import pages_overlap
from quire.worker.staging_buffer import StagingBuffer

CPU_GATHER_BYTES = (
    2**18
)  # gathered at once on a CPU, so that its caches hold it; larger pages than an eighth go one by one
SWAP_OUT_EVENT_BYTES = 2**25  # of pages that leave under one event: 0.6 ms over PCIe
# Pages from here on are moved by the copy engines, one by one (5 us each for the host, 50 GB/s from 1 MiB on); smaller
# ones by one kernel that addresses host memory itself (alone 50 GB/s from 16 KiB on, 45 GB/s at 4 KiB, where single
# copies move 0.6). So few programs are enough, and leave the device to the rows. An H200 behind PCIe 5 (55 GB/s).
MIN_COPY_ENGINE_BYTES = 2**20
SWAP_OUT_PROGRAMS, SWAP_IN_PROGRAMS = 8, 16


class HostPool:
    """`host_pages` beside `pages`: views [pages, numbers] of all host memory and of all device memory, for each size of
    pages, in bytes; pinned where a GPU moves them. With `debug` every move is waited for and compared."""

    def __init__(self, pages: Mapping[int, Tensor], host_bytes: int, debug: bool = False) -> None:
        """`host_bytes` bytes of host memory; a page at least of every size."""
        self.pages, self.debug = pages, debug
        some = next(iter(pages.values()))
        self.device, host_bytes = some.device, max(host_bytes, *pages, 0)
        if self.device.type == "cpu":  # NumPy's untouched zeros cost a CPU no memory, torch's do
            raw = torch.from_numpy(np.zeros(host_bytes, dtype=np.uint8))
        else:  # no byte more than is needed: pinned memory is given out in powers of two
            raw = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=True)
        self.host_pages = {
            own: raw[: host_bytes // own * own].view(some.dtype).view(host_bytes // own, -1) for own in pages
        }
        if self.device.type == "cpu":
            return
        self.swap_stream = torch.cuda.Stream(self.device)
        self.staging = StagingBuffer(self.device, segment_bytes=2**18)  # the side stream's own
        self.writes_event = torch.cuda.Event()  # behind the last copy or poison on `main`
        self.pending_swap_outs: list[
            tuple[int, frozenset[int], torch.cuda.Event]
        ] = []  # pages on their way out, oldest first
        self.record_writes()

    @property
    def has_pending_swap_outs(self) -> bool:
        """Whether a page may still be on its way out."""
        return self.device.type != "cpu" and bool(self.pending_swap_outs)

    def swap_out(self, moves: Mapping[int, int], size: int) -> None:
        """Copy pages of this size to rows of `host_pages`: {row: page}."""
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
        """Copy rows of `host_pages` to pages of this size: {page: row}."""
        if self.device.type == "cpu":
            _gather_on_cpu(self.pages[size], self.host_pages[size], moves)
        else:
            with torch.cuda.stream(self.swap_stream):
                self.swap_stream.wait_event(self.writes_event)
                self._copy_pages(self.pages[size], self.host_pages[size], moves, SWAP_IN_PROGRAMS)
            torch.cuda.current_stream(self.device).wait_stream(self.swap_stream)
        if self.debug:
            self._check_equal(moves.items(), size)

    def record_writes(self) -> None:
        """To be called when pages were copied or poisoned: later swaps wait for it."""
        if self.device.type != "cpu":
            self.writes_event.record(torch.cuda.current_stream(self.device))

    def wait_swapped_out(self, pages: Iterable[int], size: int) -> None:
        """To be called before anything else writes these pages: it will wait until their bytes have left."""
        if self.device.type == "cpu":
            return
        while self.pending_swap_outs and self.pending_swap_outs[0][2].query():
            del self.pending_swap_outs[0]
        wanted = frozenset(pages) if self.pending_swap_outs else frozenset()
        for i in reversed(range(len(self.pending_swap_outs))):
            other, some, event = self.pending_swap_outs[i]
            if pages_overlap(wanted, size, some, other):
                torch.cuda.current_stream(self.device).wait_event(event)
                del self.pending_swap_outs[: i + 1]  # the side stream is in order: those before have left too
                return

    def _copy_pages(self, target: Tensor, source: Tensor, moves: Mapping[int, int], programs: int) -> None:
        """target[to] = source[from] for {to: from}, on the current stream."""
        if target.shape[1] * target.itemsize >= MIN_COPY_ENGINE_BYTES:
            for to, come in moves.items():
                target[to].copy_(source[come], non_blocking=True)
        else:
            from quire.kernels.triton.copy_pages import copy_rows

            dst, src = self.staging.upload_all([np.array(list(moves)), np.array(list(moves.values()))])
            copy_rows(target, source, dst, src, programs)

    def _check_equal(self, pairs: Iterable[tuple[int, int]], size: int) -> None:
        """Debug: these (page, row of `host_pages`) hold the same bits."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        for page, host in pairs:
            same = torch.equal(
                self.pages[size][page].view(torch.uint8).cpu(), self.host_pages[size][host].view(torch.uint8)
            )
            assert same, f"page {page} and row {host} of the host pages differ after a swap"


def _gather_on_cpu(target: Tensor, source: Tensor, moves: Mapping[int, int]) -> None:
    """target[to] = source[from] for {to: from} on a CPU: small pages many at a time, large ones one by one."""
    most = CPU_GATHER_BYTES // (target.shape[1] * target.itemsize)
    if most < 8:
        for to, come in moves.items():
            target[to].copy_(source[come])
        return
    left = iter(moves.items())
    while part := list(islice(left, most)):
        places, sources = torch.tensor(part).unbind(1)
        target.index_copy_(0, places, source.index_select(0, sources))
