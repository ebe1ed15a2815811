"""Latencies of virtual-memory calls: vAttention's Table 3 beside the calls of CUDA and memfd, and functions that
measure a driver's, one kind of call at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.worker.virtual.driver import CALL_KINDS, Driver

KIB = 1 << 10
PAGE_SIZES = (64 * KIB, 128 * KIB, 256 * KIB, 2048 * KIB)  # the paper's
NUM_RESERVATIONS = 16  # that are measured


class CallInfo(NamedTuple):
    """One kind of call: its name in the paper's patched driver, in CUDA and over memfd ("" if another call does it),
    and the paper's microseconds for each of PAGE_SIZES (on an A100; for 2 MiB those of CUDA's own calls)."""

    description: str
    vmem: str
    cuda: str
    memfd: str
    paper: tuple[float | None, ...]


CALL_INFOS = {
    "reserve": CallInfo("reserve addresses", "vMemReserve", "cuMemAddressReserve", "mmap(PROT_NONE)", (18, 17, 16, 2)),
    "create": CallInfo("make a page", "vMemCreate", "cuMemCreate", "madvise(MADV_POPULATE_WRITE)", (1.7, 2, 2.1, 29)),
    "map": CallInfo("map it", "vMemMap", "cuMemMap", "mmap(MAP_FIXED | MAP_POPULATE)", (8, 8.5, 9, 2)),
    "access": CallInfo("make it accessible", "", "cuMemSetAccess", "", (None, None, None, 38)),
    "unmap": CallInfo("unmap it", "", "cuMemUnmap", "mmap(MAP_FIXED, PROT_NONE)", (None, None, None, 34)),
    "release": CallInfo("free it", "vMemRelease", "cuMemRelease", "close", (2, 3, 4, 23)),
    "free": CallInfo("free the addresses", "vMemFree", "cuMemAddressFree", "munmap", (35, 35, 35, 1)),
}
PAPER_BANDWIDTH = (7.59, 14.56, 27.04, 35.17)  # the paper's Table 7 for PAGE_SIZES, one worker: GB/s made accessible


class CallLatency(NamedTuple):
    """The latency of calls of a kind, in microseconds a page (reserve and free: a call). The driver got pages in runs
    of `run`. With `loaded` the device had other work."""

    kind: str
    page: int
    run: int
    loaded: bool
    calls: int
    p10: float
    p50: float


def measure_latencies(
    driver: Driver, pages: int = 256, run_lengths: Sequence[int] = (1, 16), load: Callable[[], None] | None = None
) -> list[CallLatency]:
    """Measure a new driver and close it: create `pages` pages and map them at random places in runs of each length in
    `run_lengths`. `load`, if given, is called before each map and unmap of a second round, to enqueue device work that
    does not access these addresses."""
    rows: list[CallLatency] = []
    size = pages * driver.page
    buffers = [0] * NUM_RESERVATIONS

    def reserve() -> None:
        buffers[:] = [driver.reserve(size) for _ in range(NUM_RESERVATIONS)]

    rows += _time_calls(driver, reserve, NUM_RESERVATIONS)
    rows += _time_calls(driver, lambda: driver.create(pages), pages)
    driver.map(buffers[0], 0, pages)  # the first map takes longer
    driver.unmap(buffers[0], pages)
    for run in run_lengths:
        starts = range(0, pages - run + 1, run)
        for work in (None,) if load is None else (None, load):
            rows += _measure_round(driver, buffers[0], starts, run, work)
    rows += [row for row in _time_calls(driver, driver.close, pages) if row.kind in ("release", "free")]
    return rows


def bandwidth(rows: Sequence[CallLatency], run: int = 1, loaded: bool = False) -> float:
    """Return the GB/s made accessible, by the medians of these rows of one driver (the paper's Table 7)."""
    chosen = [row for row in rows if row.kind in ("map", "access") and (row.run, row.loaded) == (run, loaded)]
    assert chosen, f"no maps in runs of {run} were measured"
    return chosen[0].page / sum(row.p50 for row in chosen) / 1e3


def _measure_round(
    driver: Driver, buffer: int, starts: range, run: int, load: Callable[[], None] | None
) -> list[CallLatency]:
    """Map all runs of pages at random places, then unmap them in random order."""
    rng = random.Random(0)
    firsts = rng.sample(starts, len(starts))
    places = [buffer + start * driver.page for start in rng.sample(starts, len(starts))]

    def fill() -> None:
        for place, first in zip(places, firsts):
            if load is not None:
                load()
            driver.map(place, first, run)

    def clear() -> None:
        for place in rng.sample(places, len(places)):
            if load is not None:
                load()
            driver.unmap(place, run)

    handled = len(starts) * run
    return _time_calls(driver, fill, handled, run, load is not None) + _time_calls(
        driver, clear, handled, run, load is not None
    )


def _time_calls(
    driver: Driver, work: Callable[[], None], pages: int, run: int = 1, loaded: bool = False
) -> list[CallLatency]:
    """Return the latencies of the calls of `work`, which handles `pages` pages."""
    with driver.calls.record_samples() as samples:
        work()
    rows = []
    for kind in (kind for kind in CALL_KINDS if kind in samples):
        times = sorted(samples[kind])
        each = 1.0 if kind in ("reserve", "free") else pages / len(times)  # pages of a call
        p10, p50 = (1e6 * times[len(times) * share // 100] / each for share in (10, 50))
        rows.append(CallLatency(kind, driver.page, run, loaded, len(times), p10, p50))
    return rows
