"""A driver without memory, which checks the rules of virtual memory. Pure Python without torch; any size is free.

In addition to every driver's checks it asserts that no address that a step in flight or a swap may access is unmapped
(`pin`), only mapped addresses are read and written, and no kernel writes bytes through one address and reads them
through another (`kernel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as numbers
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from quire.worker.virtual.driver import Driver, DriverError

if TYPE_CHECKING:
    import torch

FIRST_ADDRESS = 1 << 44  # of reservations; far from small numbers, which are errors


class ByteSpan(NamedTuple):
    """Bytes offset ... offset + nbytes - 1 of a physical page."""

    page: int
    offset: int
    nbytes: int


class FakeDriver(Driver):
    """The checking driver. The `fail_at`-th map of a page, counted from 1, fails once."""

    device: torch.device | None = None

    def __init__(self, page: int, fail_at: int = 0) -> None:
        super().__init__(page)
        self.granularity, self.fail_at = page, fail_at
        self._next_address, self._map_attempts = FIRST_ADDRESS, 0
        self._pins: dict[int, tuple[int, int]] = {}  # id -> first address, end
        self._pin_ids = numbers(1)
        # Accesses of the current kernel, by page: bytes, mapped address, written.
        self._kernel_accesses: dict[int, list[tuple[ByteSpan, int, bool]]] | None = None
        self._is_closed = False

    def _allocate_addresses(self, nbytes: int) -> int:
        self._count_call("reserve")
        self._next_address += nbytes
        return self._next_address - nbytes

    def create(self, count: int) -> None:
        self._count_call("create")
        assert not self.mapping_table.num_pages, "pages are created once"
        self.mapping_table.num_pages = count

    def map(self, address: int, page: int, count: int = 1) -> None:
        self._count_call("map")
        self.mapping_table.check_map(address, page, count)
        self._map_attempts += count
        if self._map_attempts - count < self.fail_at <= self._map_attempts:
            raise DriverError("map", f"page {self.fail_at} is refused by `fail_at`")
        self.mapping_table.record_map(address, page, count)

    def unmap(self, address: int, count: int = 1) -> None:
        self._count_call("unmap")
        self.mapping_table.check_unmap(address, count)
        end = address + count * self.page
        for start, stop in self._pins.values():
            assert stop <= address or end <= start, f"an unmap of {address:#x} to {end:#x}, of which {start:#x} is held"
        self.mapping_table.record_unmap(address, count)

    def tensor(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> NoReturn:
        raise AssertionError("the fake driver has no bytes: `read` and `write` say which pages hold them")

    def fence(self) -> None:
        """Drop all pins: all enqueued work has finished."""
        self._pins.clear()

    def pin(self, address: int, nbytes: int) -> int:
        """Declare that enqueued work may access these mapped addresses until `unpin` of the id returned."""
        self._byte_spans(address, nbytes)
        token = next(self._pin_ids)
        self._pins[token] = (address, address + nbytes)
        return token

    def unpin(self, pin_id: int) -> None:
        """End a pin, unless a fence ended it before."""
        self._pins.pop(pin_id, None)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """Treat accesses in this context as those of one kernel: a GPU does not guarantee it that a write through one
        address is visible through another."""
        assert self._kernel_accesses is None, "a kernel within a kernel"
        self._kernel_accesses = {}
        try:
            yield
        finally:
            self._kernel_accesses = None

    def read(self, address: int, nbytes: int) -> list[ByteSpan]:
        """Return where the bytes at these addresses are; all of them must be mapped."""
        return self._access(address, nbytes, written=False)

    def write(self, address: int, nbytes: int) -> list[ByteSpan]:
        """Return the same for bytes that will be written."""
        return self._access(address, nbytes, written=True)

    def page_at(self, address: int) -> int | None:
        """Return the page mapped at this address, if any."""
        return self.mapping_table.page_by_address.get(address // self.page * self.page)

    def physical(self) -> int:
        return self.mapping_table.num_pages * self.page

    def close(self) -> None:
        assert not self._pins, f"closed while {len(self._pins)} ranges are held"
        self._is_closed = True
        self.mapping_table.reset()

    def _count_call(self, kind: str) -> None:
        assert not self._is_closed, f"{kind} after close"
        self.calls.counts[kind] += 1

    def _access(self, address: int, nbytes: int, written: bool) -> list[ByteSpan]:
        spans = list(self._byte_spans(address, nbytes))
        if self._kernel_accesses is None:
            return [span for span, _ in spans]
        for span, at in spans:
            others = self._kernel_accesses.setdefault(span.page, [])
            for other, other_at, other_written in others:
                disjoint = other.offset + other.nbytes <= span.offset or span.offset + span.nbytes <= other.offset
                hazard = at != other_at and (written or other_written) and not disjoint
                assert not hazard, f"page {span.page} is written or read at {at:#x} and at {other_at:#x} by one kernel"
            others.append((span, at, written))
        return [span for span, _ in spans]

    def _byte_spans(self, address: int, nbytes: int) -> list[tuple[ByteSpan, int]]:
        """Return runs of bytes within a page, each with the address of the page."""
        spans, at, end = [], address, address + nbytes
        while at < end:
            place, offset = at - at % self.page, at % self.page
            page = self.mapping_table.page_by_address.get(place)
            assert page is not None, f"access to {at:#x}, where nothing is mapped"
            size = min(end - at, self.page - offset)
            spans.append((ByteSpan(page, offset, size), place))
            at += size
        return spans
