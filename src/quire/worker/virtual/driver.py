"""The interface of virtual-memory drivers: ranges of addresses, physical pages, and their mappings.

A driver has bytes, addresses and page numbers, not tokens, sequences or layers. The common parts of all drivers are
here too: reservations, call times, mapping a group of pages as a whole, limits of addresses.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import QuireError, StartupError

if TYPE_CHECKING:
    import torch

ADDRESS_BITS = 47  # of a process's own addresses on x86-64 and in CUDA's unified address space
CALL_KINDS = ("reserve", "create", "map", "access", "unmap", "release", "free")  # of driver calls


class MappingTable:
    """Reservations and the page mapped at each address, a multiple of `page_bytes`."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_pages = 0  # physical pages
        self.page_by_address: dict[int, int] = {}
        self.num_maps = self.num_unmaps = 0
        self._ends: dict[int, int] = {}  # end of a reservation by its first address
        self._starts: list[int] = []  # of reservations, in rising order

    def reserve(self, start: int, nbytes: int) -> None:
        assert start % self.page_bytes == 0, f"a reservation at {start:#x} is no multiple of {self.page_bytes} bytes"
        self._ends[start] = start + nbytes
        insort(self._starts, start)

    def is_reserved(self, address: int, nbytes: int) -> bool:
        """Return True if these addresses are in one reservation."""
        i = bisect_right(self._starts, address) - 1
        return i >= 0 and address + nbytes <= self._ends[self._starts[i]]

    def check_map(self, address: int, page: int, count: int) -> None:
        """Assert that pages page ... page + count - 1 can be mapped at `address`."""
        self._check_range(address, count)
        assert 0 <= page <= page + count <= self.num_pages, f"page {page} and {count - 1} more, of {self.num_pages}"
        for at in self._addresses(address, count):
            assert at not in self.page_by_address, (
                f"a map of page {page} over page {self.page_by_address[at]}, mapped at {at:#x}"
            )

    def check_unmap(self, address: int, count: int) -> None:
        """Assert that a page is mapped at each of these addresses."""
        self._check_range(address, count)
        for at in self._addresses(address, count):
            assert at in self.page_by_address, f"an unmap of {at:#x}, where nothing is mapped"

    def check_tensor(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        """Assert that a tensor at `address` is in one reservation; strides in elements."""
        assert all(size > 0 and stride >= 0 for size, stride in zip(shape, strides, strict=True)), f"{shape}, {strides}"
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        assert self.is_reserved(address, (last + 1) * itemsize), (
            f"a tensor {shape} at {address:#x} lies in no reservation"
        )

    def record_map(self, address: int, page: int, count: int) -> None:
        """Record that pages were mapped."""
        self.page_by_address.update(zip(self._addresses(address, count), range(page, page + count)))
        self.num_maps += count

    def record_unmap(self, address: int, count: int) -> None:
        """Record that pages were unmapped."""
        for at in self._addresses(address, count):
            del self.page_by_address[at]
        self.num_unmaps += count

    def reset(self) -> None:
        """Forget all pages, mappings and reservations."""
        self.num_pages = 0
        self.page_by_address.clear()
        self._ends.clear()
        self._starts.clear()

    def _addresses(self, address: int, count: int) -> range:
        return range(address, address + count * self.page_bytes, self.page_bytes)

    def _check_range(self, address: int, count: int) -> None:
        assert count > 0, f"{count} pages at {address:#x}"
        assert address % self.page_bytes == 0, f"{address:#x} is no multiple of {self.page_bytes} bytes"
        assert self.is_reserved(address, count * self.page_bytes), (
            f"{count} pages at {address:#x} lie in no reservation"
        )


class DriverError(QuireError):
    """A call that the operating system or the device's driver refused; `call` is its name, `reason` its message. The
    failed call changed nothing. At start such a failure is a StartupError instead."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call} failed: {reason}")
        self.call, self.reason = call, reason


class DriverCounters(NamedTuple):
    """Counters since a driver was opened. `maps` and `unmaps` count pages, `mapped` the addresses that hold a page now,
    every alias counted; `physical` is the bytes of existing pages. `calls` and `seconds` are by CALL_KINDS."""

    maps: int
    unmaps: int
    mapped: int
    physical: int
    calls: Mapping[str, int]
    seconds: Mapping[str, float]


class CallTimes:
    """Number and seconds of the calls of each kind; within `record_samples` the seconds of each call too."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(CALL_KINDS, 0)
        self.seconds = dict.fromkeys(CALL_KINDS, 0.0)
        self._samples: dict[str, list[float]] | None = None

    def record_call(self, kind: str, began: float) -> None:
        """Count a call that began at `began`, by time.perf_counter, and ends now."""
        took = time.perf_counter() - began
        self.counts[kind] += 1
        self.seconds[kind] += took
        if self._samples is not None:
            self._samples.setdefault(kind, []).append(took)

    @contextmanager
    def record_samples(self) -> Iterator[dict[str, list[float]]]:
        """Collect the seconds of each call in this context, by kind, in the dict that it returns."""
        samples: dict[str, list[float]] = {}
        self._samples = samples
        try:
            yield samples
        finally:
            self._samples = None


class Driver:
    """Virtual memory of one device, in pages of `page` bytes, a multiple of `granularity`.

    Addresses and lengths are multiples of `page`, inside one reservation. Anything else, a map over a mapped address,
    an unmap of an unmapped one, or a missing page fails an assertion and changes nothing. Not thread-safe: threads
    that share a driver need a lock."""

    granularity: int
    device: torch.device | None = None
    """The device of the memory; None if nothing can compute on it."""
    tensors: Any
    """Makes tensors over addresses."""

    def __init__(self, page: int) -> None:
        self.page, self.calls, self.mapping_table = page, CallTimes(), MappingTable(page)
        self._reservations: list[tuple[int, int]] = []  # first address and length, from the system

    def reserve(self, nbytes: int) -> int:
        """Reserve at least `nbytes` addresses and return the first, a multiple of `page`. Nothing is mapped there, nor
        ever right after their end. Raise StartupError if there are too few addresses."""
        nbytes = -(-nbytes // self.page) * self.page
        check_addresses(nbytes)
        whole = nbytes + 2 * self.page  # room to begin at a multiple of a page and to end before a free one
        try:
            start = self._allocate_addresses(whole)
        except DriverError as error:
            cause = f"The memory 'virtual' asks for {nbytes:,} addresses in a row, which the system refuses ({error})"
            raise StartupError(cause, "Lower --max-num-seqs or --max-model-len, or raise `ulimit -v`") from None
        self._reservations.append((start, whole))
        address = -(-start // self.page) * self.page
        self.mapping_table.reserve(address, nbytes)
        return address

    def _allocate_addresses(self, nbytes: int) -> int:
        """Return the first of `nbytes` free addresses in a row. Raise DriverError if the system refuses."""
        raise NotImplementedError

    def create(self, count: int) -> None:
        """Create all physical pages, 0 to count - 1; once. Each holds zeros when first mapped. Raise StartupError, with
        no page created, if memory does not suffice."""
        raise NotImplementedError

    def map(self, address: int, page: int, count: int = 1) -> None:
        """Map pages page ... page + count - 1 at `address` in a row, readable and writable on return. Each may be
        mapped elsewhere too. Raise DriverError, with none of them mapped, if the system refuses."""
        raise NotImplementedError

    def unmap(self, address: int, count: int = 1) -> None:
        """Unmap `count` pages in a row; they keep their bytes. No enqueued work may access these addresses: see
        `fence`."""
        raise NotImplementedError

    def tensor(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor over reserved addresses, mapped or not; strides in elements. Only mapped ones may be read."""
        self.mapping_table.check_tensor(address, shape, strides, dtype.itemsize)
        tensor: torch.Tensor = self.tensors.create(address, shape, strides, dtype)
        return tensor

    def fence(self) -> None:
        """Wait until no enqueued work can access mappings."""
        raise NotImplementedError

    def physical(self) -> int:
        """Return the bytes of physical memory in use as the system reports them, not as this driver counts them."""
        raise NotImplementedError

    @property
    def counters(self) -> DriverCounters:
        table, calls = self.mapping_table, self.calls
        return DriverCounters(
            table.num_maps, table.num_unmaps, len(table.page_by_address), table.num_pages * self.page,
            dict(calls.counts), dict(calls.seconds),
        )  # fmt: skip

    def close(self) -> None:
        """Unmap and release everything; a second call does nothing. Raise DriverError while tensors live."""
        raise NotImplementedError


class PageRun(NamedTuple):
    """Pages page ... page + length - 1, to be mapped at `address` in a row."""

    address: int
    first_page: int
    num_pages: int = 1


def map_all(driver: Driver, runs: Iterable[PageRun]) -> None:
    """Map all runs or, if a call fails, none: unmap the others before raising its error. No work can have been enqueued
    over them, so no fence is needed."""
    done: list[PageRun] = []
    try:
        for run in runs:
            driver.map(*run)
            done.append(run)
    except BaseException:
        for run in reversed(done):
            driver.unmap(run.address, run.num_pages)
        raise


def check_page_size(page: int, granularity: int, owner: str) -> None:
    """Raise StartupError for a page size that a system or a device cannot map."""
    if page < 1 or page % granularity:
        nearest = max(-(-page // granularity), 1) * granularity
        cause = f"A page of {page:,} bytes is no multiple of the {granularity:,} that this {owner} maps"
        raise StartupError(cause, f"The next one up has {nearest:,}")


def check_addresses(nbytes: int) -> None:
    """Raise StartupError if a process cannot have `nbytes` addresses."""
    fewer = "Lower --max-num-seqs or --max-model-len"
    if nbytes >= 1 << ADDRESS_BITS:
        cause = f"The memory 'virtual' asks for {nbytes:,} addresses in a row; there are {1 << ADDRESS_BITS:,}"
        raise StartupError(cause, f"{fewer} ({ADDRESS_BITS} bits)")
    if os.name != "posix":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and nbytes >= limit:
        cause = f"The memory 'virtual' asks for {nbytes:,} addresses in a row; this process may have {limit:,}"
        raise StartupError(cause, f"Start it under `ulimit -v unlimited` (now {limit // 1024}). {fewer} otherwise")
