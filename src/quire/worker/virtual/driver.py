"""A driver of virtual memory: ranges of addresses, physical pages, and which page is mapped where.

It knows bytes, addresses and numbers of pages; nothing of tokens, sequences or layers. The parts that are alike in all
drivers are here too: what calls cost, how a group of maps is done as a whole, how many addresses there can be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.errors import QuireError, StartupError

if TYPE_CHECKING:
    import torch

    from quire.worker.virtual.mapping_table import MappingTable

ADDRESS_BITS = 47  # of a process's own addresses on x86-64 and in CUDA's unified address space
CALL_KINDS = ("reserve", "create", "map", "access", "unmap", "release", "free")  # of calls, as the field counts them


class DriverError(QuireError):
    """A call that the operating system or the device's driver refused; `call` is its name, `reason` what it said.
    What the failed call was to change is as before. At start such a failure is a StartupError instead."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call} failed: {reason}")
        self.call, self.reason = call, reason


class DriverCounters(NamedTuple):
    """What a driver did since it was opened. `maps` and `unmaps` count pages, and `mapped` the places that hold a page
    now, every alias counted; `physical` is the bytes of the pages that exist. `calls` and `seconds` are by KINDS."""

    maps: int
    unmaps: int
    mapped: int
    physical: int
    calls: Mapping[str, int]
    seconds: Mapping[str, float]


class CallTimes:
    """Number and seconds of the calls of each kind; while `samples` is a table of lists, those of each call too."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(CALL_KINDS, 0)
        self.seconds = dict.fromkeys(CALL_KINDS, 0.0)
        self.samples: dict[str, list[float]] | None = None

    def record_call(self, kind: str, began: float) -> None:
        """A call that began at `began`, by time.perf_counter, is over."""
        took = time.perf_counter() - began
        self.counts[kind] += 1
        self.seconds[kind] += took
        if self.samples is not None:
            self.samples.setdefault(kind, []).append(took)


class Driver(Protocol):
    """Virtual memory of one device, in pages of `page` bytes, a multiple of `granularity`.

    Addresses and lengths that are passed are multiples of `page`, inside one reservation; anything else, a map over a
    place that is mapped, an unmap of one that isn't, and a page that doesn't exist break an invariant: an assertion
    fails and nothing has changed. Not for several threads at once: whoever shares a driver has a lock for it."""

    page: int
    granularity: int
    calls: CallTimes

    @property
    def device(self) -> torch.device | None:
        """Whose memory this is; None where nothing can compute over it."""
        ...

    def reserve(self, nbytes: int) -> int:
        """The first of at least `nbytes` addresses, a multiple of `page`: nothing is mapped there, nor ever behind
        their end. StartupError if there are not so many addresses."""
        ...

    def create(self, count: int) -> None:
        """Make all physical pages there will be, 0 to count - 1; once. Each holds zeros when first mapped.
        StartupError if the memory isn't there; then none exist."""
        ...

    def map(self, address: int, page: int, count: int = 1) -> None:
        """Pages page ... page + count - 1 lie at `address` in a row, and can be read and written on return. Each may
        be mapped elsewhere too. DriverError, with none of them mapped, if the system refuses."""
        ...

    def unmap(self, address: int, count: int = 1) -> None:
        """`count` places in a row hold nothing any more; the pages keep their bytes. Nothing that is enqueued may
        touch these places: see `fence`."""
        ...

    def tensor(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over reserved addresses, mapped or not; strides in elements. What it reads must be mapped."""
        ...

    def fence(self) -> None:
        """Wait until nothing that was enqueued can touch mappings."""
        ...

    def physical(self) -> int:
        """Bytes of physical memory in use, as the system reports them, not as this driver counts them."""
        ...

    def regions(self) -> int:
        """Mappings of this process as the system counts them, where they are bounded; else 0."""
        ...

    @property
    def counters(self) -> DriverCounters: ...

    def close(self) -> None:
        """Everything is unmapped, released and given back; again does nothing. DriverError while tensors live."""
        ...


class PageRun(NamedTuple):
    """Pages page ... page + length - 1, to be mapped at `address` in a row."""

    address: int
    first_page: int
    num_pages: int = 1


def map_all(driver: Driver, runs: Iterable[PageRun]) -> None:
    """Map all of these or, when a call fails, none: those done are unmapped again before its error is raised. Nothing
    can have been enqueued over them meanwhile, so there is no fence to wait for."""
    done: list[PageRun] = []
    try:
        for run in runs:
            driver.map(*run)
            done.append(run)
    except BaseException:
        for run in reversed(done):
            driver.unmap(run.address, run.num_pages)
        raise


def make_counters(mapping_table: MappingTable, calls: CallTimes, physical_bytes: int) -> DriverCounters:
    """What a driver has in these places, and did by these calls; its pages have `physical_bytes`."""
    return DriverCounters(
        mapping_table.num_maps,
        mapping_table.num_unmaps,
        len(mapping_table.page_by_address),
        physical_bytes,
        dict(calls.counts),
        dict(calls.seconds),
    )


def check_page_size(page: int, granularity: int, owner: str) -> None:
    """StartupError for pages that a system, or a device, doesn't map."""
    if page < 1 or page % granularity:
        nearest = max(-(-page // granularity), 1) * granularity
        cause = f"A page of {page:,} bytes is no multiple of the {granularity:,} that this {owner} maps"
        raise StartupError(cause, f"The next one up has {nearest:,}")


def check_addresses(nbytes: int) -> None:
    """StartupError if a process can't have so many addresses, whatever else it holds."""
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


def out_of_addresses(nbytes: int, reason: str) -> StartupError:
    """The system has no `nbytes` addresses in a row left."""
    cause = f"The memory 'virtual' asks for {nbytes:,} addresses in a row, which the system refuses ({reason})"
    return StartupError(cause, "Lower --max-num-seqs or --max-model-len, or raise `ulimit -v`")
