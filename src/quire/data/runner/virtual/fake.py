"""A driver without memory, which checks the rules of virtual memory. Pure Python: no torch, and any size costs nothing.

Beyond what every driver asserts: nothing that a step in flight or a swap may touch is unmapped (`hold`), only mapped
places are read and written, and no kernel writes bytes through one address and reads them through another (`kernel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as numbers
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from quire.data.runner.virtual.driver import Calls, Counters, DriverError, check_addresses, counted
from quire.data.runner.virtual.places import Places

if TYPE_CHECKING:
    import torch

FIRST = 1 << 44  # where reservations begin: far from small numbers, which are mistakes


class Span(NamedTuple):
    """Bytes offset ... offset + nbytes - 1 of a physical page."""

    page: int
    offset: int
    nbytes: int


class FakeDriver:
    """The driver that checks. The `fail_at`-th page that is mapped, counted from 1, is refused, once."""

    device: torch.device | None = None

    def __init__(self, page: int, fail_at: int = 0) -> None:
        self.page = self.granularity = page
        self.calls = Calls()
        self.fail_at = fail_at
        self.places = Places(page)
        self._next, self._tried = FIRST, 0
        self._holds: dict[int, tuple[int, int]] = {}  # token -> first address, end
        self._tokens = numbers(1)
        self._touched: dict[int, list[tuple[Span, int, bool]]] | None = (
            None  # by a kernel: bytes, through where, written
        )
        self._closed = False

    def reserve(self, nbytes: int) -> int:
        self._called("reserve")
        nbytes = -(-nbytes // self.page) * self.page
        check_addresses(nbytes)
        address = self._next = -(-self._next // self.page) * self.page
        self.places.reserve(address, nbytes)
        self._next += nbytes + self.page
        return address

    def create(self, count: int) -> None:
        self._called("create")
        assert not self.places.count, "pages are created once"
        self.places.count = count

    def map(self, address: int, page: int, count: int = 1) -> None:
        self._called("map")
        self.places.check_map(address, page, count)
        self._tried += count
        if self._tried - count < self.fail_at <= self._tried:
            raise DriverError("map", f"page {self.fail_at} is refused, as was asked for")
        self.places.fill(address, page, count)

    def unmap(self, address: int, count: int = 1) -> None:
        self._called("unmap")
        self.places.check_unmap(address, count)
        end = address + count * self.page
        for start, stop in self._holds.values():
            assert stop <= address or end <= start, f"an unmap of {address:#x} to {end:#x}, of which {start:#x} is held"
        self.places.clear(address, count)

    def tensor(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> NoReturn:
        raise AssertionError("the fake driver has no bytes: `read` and `write` say which pages hold them")

    def fence(self) -> None:
        """All that was enqueued is over: nothing is held."""
        self._holds.clear()

    def hold(self, address: int, nbytes: int) -> int:
        """Something enqueued may touch these addresses, which are mapped, until `let_go` of the token returned."""
        self._spans(address, nbytes)
        token = next(self._tokens)
        self._holds[token] = (address, address + nbytes)
        return token

    def let_go(self, token: int) -> None:
        """It is over. A fence may have said so before."""
        self._holds.pop(token, None)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """What is read and written meanwhile is one kernel's doing: a GPU doesn't promise it that a write through one
        address is seen through another."""
        assert self._touched is None, "a kernel within a kernel"
        self._touched = {}
        try:
            yield
        finally:
            self._touched = None

    def read(self, address: int, nbytes: int) -> list[Span]:
        """Where the bytes at these addresses are, every one of which must be mapped."""
        return self._touch(address, nbytes, written=False)

    def write(self, address: int, nbytes: int) -> list[Span]:
        """The same for bytes that will be written."""
        return self._touch(address, nbytes, written=True)

    def page_at(self, address: int) -> int | None:
        """The page mapped at this place, if one is."""
        return self.places.mapped.get(address // self.page * self.page)

    def references(self, page: int) -> int:
        """The number of places that hold a page."""
        return sum(held == page for held in self.places.mapped.values())

    @property
    def handles(self) -> int:
        """Pages that exist."""
        return self.places.count

    def physical(self) -> int:
        return self.places.count * self.page

    def regions(self) -> int:
        return 0

    @property
    def counters(self) -> Counters:
        return counted(self.places, self.calls, self.physical())

    def close(self) -> None:
        assert not self._holds, f"closed while {len(self._holds)} ranges are held"
        self._closed = True
        self.places.forget()

    def _called(self, kind: str) -> None:
        assert not self._closed, f"{kind} after close"
        self.calls.number[kind] += 1

    def _touch(self, address: int, nbytes: int, written: bool) -> list[Span]:
        found = list(self._spans(address, nbytes))
        if self._touched is None:
            return [span for span, _ in found]
        for span, via in found:
            others = self._touched.setdefault(span.page, [])
            for other, through, was in others:
                apart = other.offset + other.nbytes <= span.offset or span.offset + span.nbytes <= other.offset
                hazard = via != through and (written or was) and not apart
                assert not hazard, f"page {span.page} is written or read at {via:#x} and at {through:#x} by one kernel"
            others.append((span, via, written))
        return [span for span, _ in found]

    def _spans(self, address: int, nbytes: int) -> list[tuple[Span, int]]:
        """Runs of bytes within a page, each with the place that the page is mapped at."""
        found, at, end = [], address, address + nbytes
        while at < end:
            place, offset = at - at % self.page, at % self.page
            page = self.places.mapped.get(place)
            assert page is not None, f"access to {at:#x}, where nothing is mapped"
            size = min(end - at, self.page - offset)
            found.append((Span(page, offset, size), place))
            at += size
        return found
