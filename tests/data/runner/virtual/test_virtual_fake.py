"""The driver that checks: every rule broken is an assertion with a message, and nothing has changed then."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from quire.data.runner.virtual import DriverError, FakeDriver, Run, map_all
from quire.errors import StartupError

PAGE = 64


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver(PAGE)
    made.create(8)
    return made


def test_it_imports_no_torch() -> None:
    code = "import sys, quire.data.runner.virtual; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_maps_that_break_the_rules(driver: FakeDriver) -> None:
    at = driver.reserve(4 * PAGE)
    driver.map(at, 0, 2)
    with pytest.raises(AssertionError, match="nothing is mapped"):
        driver.unmap(at + PAGE, 2)
    with pytest.raises(AssertionError, match="0 pages"):
        driver.unmap(at, 0)
    with pytest.raises(AssertionError, match="no multiple"):
        driver.unmap(at + 1)
    with pytest.raises(AssertionError, match="a map of page 3 over page 0"):
        driver.map(at, 3)
    with pytest.raises(AssertionError, match="page 7 and 1 more, of 8"):
        driver.map(at + 2 * PAGE, 7, 2)
    with pytest.raises(AssertionError, match="no reservation"):
        driver.map(at + 3 * PAGE, 2, 2)
    with pytest.raises(AssertionError, match="nothing is mapped"):
        driver.read(at + 2 * PAGE - 1, 2)
    with pytest.raises(AssertionError, match="nothing is mapped"):
        driver.write(at - 1, 1)
    assert driver.counters.mapped == 2


def test_what_is_held_stays(driver: FakeDriver) -> None:
    at = driver.reserve(4 * PAGE)
    driver.map(at, 0, 4)
    step, swap = driver.hold(at + PAGE + 1, 2), driver.hold(at, 2 * PAGE)
    driver.unmap(at + 2 * PAGE)
    driver.let_go(swap)
    driver.unmap(at)
    with pytest.raises(AssertionError, match="is held"):
        driver.unmap(at + PAGE)
    driver.let_go(step)
    driver.let_go(step)
    driver.unmap(at + PAGE)
    driver.hold(at + 3 * PAGE, PAGE)
    driver.fence()
    driver.unmap(at + 3 * PAGE)
    with pytest.raises(AssertionError, match="nothing is mapped"):
        driver.hold(at, 1)


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


def test_a_group_that_fails_half_way_is_rolled_back() -> None:
    """Whichever page the system refuses: what was mapped before stays, and the same group goes through later."""
    runs = [Run(0, 2), Run(PAGE, 4, 3), Run(5 * PAGE, 2)]
    for k in range(1, 6):
        driver = FakeDriver(PAGE, fail_at=k + 1)
        driver.create(8)
        at = driver.reserve(8 * PAGE)
        driver.map(at + 7 * PAGE, 7)
        before = dict(driver.places.mapped)
        group = [Run(at + run.address, run.page, run.length) for run in runs]
        with pytest.raises(DriverError, match="refused"):
            map_all(driver, group)
        assert driver.places.mapped == before
        map_all(driver, group)
        assert driver.counters.mapped == 6


def test_addresses_and_the_end() -> None:
    driver = FakeDriver(2**21)
    with pytest.raises(StartupError, match=r"140,737,488,355,328.*--max-num-seqs"):
        driver.reserve(1 << 47)
    buffers = [driver.reserve(100 * 2**30 + 1) for _ in range(120)]
    assert all(address % driver.page == 0 for address in buffers)
    assert all(after - before > 100 * 2**30 + driver.page for before, after in pairwise(buffers))
    driver.create(4)
    assert (driver.handles, driver.physical()) == (4, 4 * 2**21)
    with pytest.raises(AssertionError, match="once"):
        driver.create(1)
    driver.map(buffers[119] + 100 * 2**30, 3)
    token = driver.hold(buffers[119] + 100 * 2**30, 1)
    with pytest.raises(AssertionError, match="held"):
        driver.close()
    driver.let_go(token)
    driver.close()
    driver.close()
    assert (driver.handles, driver.physical(), driver.counters.mapped) == (0, 0, 0)
    with pytest.raises(AssertionError, match="after close"):
        driver.reserve(1)
