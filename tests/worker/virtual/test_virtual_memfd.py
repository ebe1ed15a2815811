"""Virtual memory on the CPU: real pages, at real addresses, whose bytes, faults and accounts the system tells."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import leftovers

from bench.fake_driver import FakeDriver
from papers import call_latencies as latencies
from papers.call_latencies import CallLatency, bandwidth, measure_latencies
from quire.errors import StartupError
from quire.worker.virtual import DriverError, PageRun, map_all, open_driver
from quire.worker.virtual.memfd import MemfdDriver, check_map_count

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
KIB = 1 << 10


def mappings(start: int, end: int) -> list[str]:
    """How the system describes its mappings between two addresses: their permissions."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        low, high = (int(number, 16) for number in span.split("-"))
        if low < end and start < high:
            found.append(permissions)
    return found


def test_neighbours_are_one_mapping() -> None:
    driver = MemfdDriver(4 * KIB)
    at, count = driver.reserve(2**24), 64
    driver.create(count)
    before = len(mappings(at, at + 2**24))
    for i in range(count):
        driver.map(at + i * driver.page, i)
    assert len(mappings(at, at + 2**24)) == before + 1
    for i in range(0, count, 2):
        driver.unmap(at + i * driver.page)
    assert len(mappings(at, at + 2**24)) >= count - 1
    driver.close()


def test_too_many_mappings_are_refused() -> None:
    check_map_count(500, limit=1000)
    with pytest.raises(StartupError, match=r"501 mappings.*max_map_count = 1,000.*to 1,002 with sysctl"):
        check_map_count(501, limit=1000)
    with pytest.raises(StartupError, match="max_map_count"):
        check_map_count(1 << 40)


@pytest.mark.parametrize("page", [0, -4096, 1000, 4097, 240_000])
def test_pages_that_the_system_cannot_map(page: int) -> None:
    before = leftovers()
    with pytest.raises(StartupError, match=rf"A page of {page:,} bytes .* The next one up has [\d,]+"):
        open_driver("cpu", page)
    assert leftovers() == before


def test_more_addresses_than_there_are() -> None:
    driver = MemfdDriver(2048 * KIB)
    with pytest.raises(StartupError, match=f"asks for {1 << 47:,} addresses.*--max-model-len"):
        driver.reserve(1 << 47)
    most = (1 << 46) - (1 << 42)
    with suppress(StartupError):  # two fit if the program lies at the end of the addresses
        driver.reserve(most)
        driver.reserve(most)
    with pytest.raises(StartupError, match=r"refuses \(mmap failed: Cannot allocate memory\).*--max-num-seqs"):
        driver.reserve(most)
    driver.close()


def test_addresses_under_a_limit() -> None:
    driver, limits = MemfdDriver(4 * KIB), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 42, limits[1]))
    try:
        with pytest.raises(StartupError, match=rf"this process may have {1 << 42:,}. .*`ulimit -v unlimited`"):
            driver.reserve(1 << 42)
        with pytest.raises(StartupError, match=r"which the system refuses.*or raise `ulimit -v`"):
            driver.reserve((1 << 42) - 4 * KIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    driver.reserve(1 << 42)
    driver.close()


def test_closing_with_live_tensors_is_refused() -> None:
    driver = MemfdDriver(4 * KIB)
    at = driver.reserve(2**20)
    driver.create(1)
    driver.map(at, 0)
    whole = driver.tensor(at, (4, 8), (64, 1), torch.bfloat16)
    part = whole[0, 2:]
    del whole
    with pytest.raises(DriverError, match=r"close failed: tensors live over these addresses: bfloat16\[4, 8\]$"):
        driver.close()
    part.fill_(1)  # still there
    many = [driver.tensor(at, (i + 1,), (1,), torch.int8) for i in range(12)]
    with pytest.raises(DriverError, match=r"int8\[7\] and 5 more"):
        driver.close()
    del part, many
    driver.close()
    driver.close()


def test_a_map_that_the_system_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th call of a group fails, as when the process has too many mappings."""

    class Refusing:
        def __init__(self, libc: Any, k: int) -> None:
            self.libc, self.left = libc, k

        def mmap(self, *given: Any) -> int | None:
            self.left -= 1
            if self.left == 0:
                self.libc.munmap(given[0], given[1])  # what an older kernel may have done by then
                ctypes.set_errno(12)
                return ctypes.c_void_p(-1).value
            return self.libc.mmap(*given)

    for k in (1, 2, 3):
        driver = MemfdDriver(4 * KIB)
        at = driver.reserve(2**20)
        driver.create(8)
        driver.map(at, 7)
        group = [PageRun(at + (2 + 2 * i) * driver.page, 2 * i, 2) for i in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(driver, "_libc", Refusing(driver._libc, k))
            with pytest.raises(DriverError, match="mmap failed: Cannot allocate memory, mapping 2 pages at"):
                map_all(driver, group)
        assert set(driver.mapping_table.page_by_address) == {at}
        assert mappings(at, at + 9 * driver.page) == ["rw-s", "---p"]
        map_all(driver, group)
        driver.close()


def run(code: str) -> subprocess.CompletedProcess[str]:
    lines = (
        "import ctypes, sys, torch\n"
        "from quire.worker.virtual import open_driver\n"
        "driver = open_driver('cpu', 4096)\n"
        "at = driver.reserve(16 * 4096)\n"
        "driver.create(16)\n"
        "driver.map(at, 0)\n"
        "view = driver.tensor(at, (16, 4096), (4096, 1), torch.uint8)\n"
        "assert view[0].sum() == 0\n" + code
    )
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("kept", ["", "torch.kept = view[3]", "sys.kept = view", "del driver"])
def test_a_process_may_end_with_live_tensors(kept: str) -> None:
    done = run(f"{kept}\nprint('done')")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_started_programs_inherit_no_file() -> None:
    driver = MemfdDriver(4 * KIB)
    code = f"import os; os.fstat({driver._file})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, close_fds=False, timeout=60)
    assert b"Bad file descriptor" in done.stderr
    driver.close()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn]
)
def test_tensors_over_nothing(dtype: torch.dtype) -> None:
    """Any type and strides, with nothing mapped; and none outside the reservation."""
    driver = MemfdDriver(64 * KIB)
    at = driver.reserve(2**40)
    view = driver.tensor(at + 64, (3, 5, 7), (2**30, 16, 1), dtype)
    facts = (view.dtype, view.shape, view.stride(), view.data_ptr(), view.device.type)
    assert facts == (dtype, (3, 5, 7), (2**30, 16, 1), at + 64, "cpu")
    with pytest.raises(AssertionError, match="no reservation"):
        driver.tensor(at + 2**40 - 64, (65,), (1,), torch.uint8)
    if dtype.itemsize > 1:
        with pytest.raises(AssertionError, match="no multiple of an element"):
            driver.tensor(at + 1, (1,), (1,), dtype)
    del view
    driver.close()


# The table of calls, and the harness that measures ours.


def test_every_kind_of_call_is_measured() -> None:
    loads = []
    driver = MemfdDriver(64 << 10)
    rows = measure_latencies(driver, pages=32, run_lengths=(1, 4), load=lambda: loads.append(1))
    calls = {(row.kind, row.run, row.loaded): row.calls for row in rows}
    many = {(kind, run, loaded): 32 // run for kind in ("map", "unmap") for run in (1, 4) for loaded in (False, True)}
    once = {("reserve", 1, False): latencies.NUM_RESERVATIONS, ("free", 1, False): latencies.NUM_RESERVATIONS,
            ("create", 1, False): 1, ("release", 1, False): 1}  # fmt: skip
    assert calls == many | once
    assert len(loads) == 2 * (32 + 8)
    assert all(0 < row.p10 <= row.p50 and row.page == 64 << 10 for row in rows)
    assert driver.physical() == driver.counters.mapped == 0
    assert bandwidth(rows) > 0
    with pytest.raises(AssertionError, match="runs of 3"):
        bandwidth(rows, run=3)


def test_bandwidth_counts_map_and_access() -> None:
    """2 MiB in 2 us and 38 us, as CUDA's own calls take in the paper, are 52 GB/s."""
    rows = [CallLatency(kind, 2 << 20, 1, False, 9, 1.0, p50) for kind, p50 in (("map", 2.0), ("access", 38.0))]
    assert bandwidth([*rows, CallLatency("unmap", 2 << 20, 1, False, 9, 1.0, 34.0)]) == pytest.approx(52.4288)


# The driver that checks: every rule broken is an assertion with a message, and nothing has changed then.


PAGE = 64


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver(PAGE)
    made.create(8)
    return made


@pytest.mark.parametrize("kind", [FakeDriver, MemfdDriver])
def test_maps_that_break_the_rules(kind: Callable[[int], FakeDriver | MemfdDriver]) -> None:
    driver, page = kind(4 * KIB), 4 * KIB
    driver.create(8)
    at = driver.reserve(4 * page)
    driver.map(at, 0, 2)
    broken: list[tuple[Callable[[], object], str]] = [
        (partial(driver.unmap, at + page, 2), "nothing is mapped"), (partial(driver.unmap, at, 0), "0 pages"),
        (partial(driver.unmap, at + 1), "no multiple"), (partial(driver.map, at, 3), "a map of page 3 over page 0"),
        (partial(driver.map, at + 2 * page, 7, 2), "page 7 and 1 more, of 8"),
        (partial(driver.map, at + 3 * page, 2, 2), "no reservation"),
    ]  # fmt: skip
    if isinstance(driver, FakeDriver):
        broken.append((partial(driver.read, at + 2 * page - 1, 2), "nothing is mapped"))
        broken.append((partial(driver.write, at - 1, 1), "nothing is mapped"))
    for call, words in broken:
        with pytest.raises(AssertionError, match=words):
            call()
    assert driver.counters.mapped == 2
    driver.close()


def test_what_is_held_stays(driver: FakeDriver) -> None:
    at = driver.reserve(4 * PAGE)
    driver.map(at, 0, 4)
    step, swap = driver.pin(at + PAGE + 1, 2), driver.pin(at, 2 * PAGE)
    driver.unmap(at + 2 * PAGE)
    driver.unpin(swap)
    driver.unmap(at)
    with pytest.raises(AssertionError, match="is held"):
        driver.unmap(at + PAGE)
    driver.unpin(step)
    driver.unpin(step)
    driver.unmap(at + PAGE)
    driver.pin(at + 3 * PAGE, PAGE)
    driver.fence()
    driver.unmap(at + 3 * PAGE)
    with pytest.raises(AssertionError, match="nothing is mapped"):
        driver.pin(at, 1)


def test_one_kernel_goes_through_one_address(driver: FakeDriver) -> None:
    at = driver.reserve(4 * PAGE)
    for place in range(2):
        driver.map(at + place * PAGE, 3)
    with driver.kernel():
        driver.write(at, 8)
        driver.read(at, 8)
        driver.read(at + PAGE + 8, 8)  # other bytes of the same page
        with pytest.raises(AssertionError, match="by one kernel"):
            driver.read(at + PAGE + 7, 1)
    with driver.kernel():
        driver.read(at + PAGE, 8)
        driver.read(at, 8)
        with pytest.raises(AssertionError, match="by one kernel"):
            driver.write(at, 1)
    driver.write(at, 8)
    driver.read(at + PAGE, 8)


def test_addresses_and_the_end() -> None:
    driver = FakeDriver(2**21)
    with pytest.raises(StartupError, match=r"140,737,488,355,328.*--max-num-seqs"):
        driver.reserve(1 << 47)
    buffers = [driver.reserve(100 * 2**30 + 1) for _ in range(120)]
    assert all(address % driver.page == 0 for address in buffers)
    assert all(after - before > 100 * 2**30 + driver.page for before, after in pairwise(buffers))
    driver.create(4)
    assert driver.physical() == 4 * 2**21
    with pytest.raises(AssertionError, match="once"):
        driver.create(1)
    driver.map(buffers[119] + 100 * 2**30, 3)
    token = driver.pin(buffers[119] + 100 * 2**30, 1)
    with pytest.raises(AssertionError, match="held"):
        driver.close()
    driver.unpin(token)
    driver.close()
    driver.close()
    assert (driver.physical(), driver.counters.mapped) == (0, 0)
    with pytest.raises(AssertionError, match="after close"):
        driver.reserve(1)
