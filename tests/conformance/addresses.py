"""A data plane over contiguous addresses, which fault where nothing is mapped: tokens are reached by where their slot
begins, never through a page table.

Mappings change when a plan is submitted, as a host's calls do; contents move and rows run when it is collected. What a
step in flight touches is held meanwhile. Pages on their way to the host are read behind the rows, as on a stream of
their own, unless somebody claims them before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from bench.echo_pages import POISON, STATE_BYTES, Bytes, EchoPages, States
from bench.echo_runner import EchoRunner
from bench.fake_driver import ByteSpan, FakeDriver
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.step_plan import (
    PageCopy,
    PageOp,
    SeqSlice,
    SliceResult,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TableWrite,
)
from quire.worker.virtual.driver import PageRun

Places = npt.NDArray[np.int64]
"""Which of all cells hold some bytes."""


class Addressed(EchoPages):
    """The pages of a group as sequences see them: a buffer for each part, in which slot after slot has its place. Every
    part of a token repeats its state."""

    def __init__(
        self, group: KVCacheGroup, number: int, cells: Bytes, host: Bytes, slots: int, driver: FakeDriver
    ) -> None:
        super().__init__(group, number, cells, host, slots)
        self.cells, self.driver = cells, driver
        self.stride = driver.page * group.run_pages // group.run_tokens
        self.room = group.table_width * driver.page
        self.bases = [driver.reserve(slots * self.room) for _ in range(group.parts)]
        self.lying = np.zeros_like(self.table)
        for at in range(group.table_width):
            for run in self.runs(0, at, 0):
                driver.map(*run)
        self.slot, self.first, self.where = 0, 0, np.zeros((group.parts, 0), dtype=np.int64)

    def runs(self, slot: int, at: int, page: int) -> Iterator[PageRun]:
        """Where the parts of a page lie at a place."""
        for part, base in enumerate(self.bases):
            yield PageRun(base + slot * self.room + at * self.driver.page, page * self.group.parts + part)

    def lay(self, slot: int, at: int, page: int) -> None:
        """Map a page at a place, in place of another one."""
        before = int(self.lying[slot, at])
        if before:
            for run in self.runs(slot, at, before):
                self.driver.unmap(run.address)
        for run in self.runs(slot, at, page):
            self.driver.map(*run)
        self.lying[slot, at] = page

    def touched(self, row: SeqSlice) -> tuple[int, int]:
        """The first token that a row reads, and the end of those that it writes."""
        return self.group.first_visible(row.start), row.start + len(row.tokens) + len(row.draft_tokens)

    def spans(self, slot: int, first: int, end: int) -> list[tuple[int, int]]:
        """The addresses, and how many bytes, of these tokens in each part."""
        begin = slot * self.room + first * self.stride
        return [(base + begin, (end - first) * self.stride) for base in self.bases]

    def enter(self, row: SeqSlice) -> None:
        """A row begins: where the bytes are that it touches, now."""
        self.slot, (self.first, end) = row.slot, self.touched(row)
        reads = self.spans(row.slot, self.first, row.start) if row.start > self.first else [(0, 0)] * len(self.bases)
        writes = self.spans(row.slot, row.start, end)
        where = []
        for read, write in zip(reads, writes):
            spans = (self.driver.read(*read) if read[1] else []) + self.driver.write(*write)
            where.append(np.concatenate([self._bytes(span) for span in spans]))
        self.where = np.stack(where)

    def _bytes(self, span: ByteSpan) -> Places:
        begin = span.page * self.driver.page + span.offset
        return np.arange(begin, begin + span.nbytes)

    def _of(self, slot: int, first: int, end: int) -> Places:
        """Which cells hold these tokens, a row each part."""
        assert first >= self.first, f"token {first} of slot {slot} is touched unsaid"
        assert slot == self.slot, f"slot {slot} is touched unsaid"
        return self.where[:, (first - self.first) * self.stride : (end - self.first) * self.stride]

    def read_states(self, slot: int, first: int, last: int) -> States:
        shape = len(self.bases), last - first, self.stride // STATE_BYTES
        words = self.cells[self._of(slot, first, last)].view(np.int64).reshape(shape)
        states = words[0, :, 0]
        assert (words == states[None, :, None]).all(), f"a token of slot {slot} is torn"
        return np.ascontiguousarray(states) ^ self.group_index

    def write_state(self, slot: int, position: int, state: int) -> None:
        word = np.array([state ^ self.group_index], dtype=np.int64).view(np.uint8)
        self.cells[self._of(slot, position, position + 1)] = np.tile(word, self.stride // STATE_BYTES)


class AddressedRunner(EchoRunner):
    """An EchoRunner over a FakeDriver, which knows who holds what."""

    groups: list[Addressed]  # type: ignore[assignment]

    def bind(self, geometry: KVCacheConfig) -> None:
        self.geometry = geometry
        sizes = {group.page_bytes // group.parts for group in geometry.groups}
        assert len(sizes) == 1, "pages of a device have one size"
        self.driver = driver = FakeDriver(sizes.pop())
        count = geometry.bytes // driver.page
        driver.create(count)
        self.identity = driver.reserve(count * driver.page)
        driver.map(self.identity, 0, count)
        cells, host = np.zeros(geometry.bytes, dtype=np.uint8), np.full(geometry.host_bytes, POISON, dtype=np.uint8)
        self.groups = [
            Addressed(group, g, cells, host, geometry.slots, driver) for g, group in enumerate(geometry.groups)
        ]
        self.holds: dict[int, list[int]] = {}  # of steps in flight
        self.leaving: list[tuple[SwapOut, int]] = []  # pages on their way out, and what holds them

    def submit(self, plan: StepPlan) -> int:
        """Change the mappings: before the rows, and behind them, when their places are held already."""
        ticket = super().submit(plan)
        self._map(plan.page_ops)
        self.holds[ticket] = [
            self.driver.pin(*span)
            for row in plan.slices
            for group in self.groups
            for span in group.spans(row.slot, *group.touched(row))
        ]
        self._map(plan.overlapped_page_ops)
        return ticket

    def _map(self, journal: Iterable[PageOp]) -> None:
        """Map what these tables say and isn't there yet. Of several that name a place the last counts."""
        wanted = {
            (entry.group, entry.slot, at): page
            for entry in journal
            if isinstance(entry, TableWrite)
            for at, page in enumerate(entry.pages, entry.first_page)
            if page
        }
        wanted = {at: page for at, page in wanted.items() if self.groups[at[0]].lying[at[1:]] != page}
        for (g, slot, at), page in wanted.items():
            self.groups[g].lay(slot, at, page)

    def collect(self, ticket: int) -> StepResult:
        with ExitStack() as kernel:
            kernel.enter_context(self.driver.kernel())
            result = super().collect(ticket)
        for token in self.holds.pop(ticket):
            self.driver.unpin(token)
        self.claim(None)
        return result

    def apply(self, entry: PageOp) -> None:
        if isinstance(entry, TableWrite):
            for page in filter(None, entry.pages):
                self.claim(self._extent(entry.group, page))
        elif isinstance(entry, SwapOut):
            begin, size = self._extent(entry.group, entry.page)
            self.leaving.append((entry, self.driver.pin(self.identity + begin, size)))
            return
        elif isinstance(entry, SwapIn):
            self.claim(None)  # the same stream: behind everything that leaves
        else:
            self.claim(self._extent(entry.group, entry.dst if isinstance(entry, PageCopy) else entry.page))
        super().apply(entry)

    def _extent(self, group: int, page: int) -> tuple[int, int]:
        size = self.groups[group].group.page_bytes
        return page * size, size

    def claim(self, extent: tuple[int, int] | None) -> None:
        """These bytes, or any (None), will be written: whatever leaves has left, up to the last that shares a byte with
        them."""
        last = len(self.leaving) if extent is None else 0
        for i, (entry, _) in enumerate(self.leaving if extent else ()):
            begin, size = self._extent(entry.group, entry.page)
            last = i + 1 if begin < extent[0] + extent[1] and extent[0] < begin + size else last
        for entry, token in self.leaving[:last]:
            super().apply(entry)
            self.driver.unpin(token)
        del self.leaving[:last]

    def compute_row(self, row: SeqSlice) -> SliceResult:
        for group in self.groups:
            group.enter(row)
        return super().compute_row(row)


def runner_for(geometry: KVCacheConfig, depth: int, vocab_size: int) -> EchoRunner:
    """The data plane that a memory of this geometry is for."""
    kind = AddressedRunner if geometry.layout is KVCacheLayout.CONTIGUOUS else EchoRunner
    return kind(depth, vocab_size=vocab_size)
