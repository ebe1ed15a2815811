"""The table of calls, and the harness that measures ours: every kind, the right numbers of calls, nothing left."""

from __future__ import annotations

import sys

import pytest

from quire.data.runner.virtual import latencies
from quire.data.runner.virtual.latencies import Latency, bandwidth, measure
from quire.data.runner.virtual.memfd import MemfdDriver


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_every_kind_of_call_is_measured() -> None:
    loads = []
    driver = MemfdDriver(64 << 10)
    rows = measure(driver, pages=32, runs=(1, 4), load=lambda: loads.append(1))
    calls = {(row.kind, row.run, row.loaded): row.calls for row in rows}
    many = {(kind, run, loaded): 32 // run for kind in ("map", "unmap") for run in (1, 4) for loaded in (False, True)}
    once = {("reserve", 1, False): latencies.RESERVES, ("free", 1, False): latencies.RESERVES,
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
    rows = [Latency(kind, 2 << 20, 1, False, 9, 1.0, p50) for kind, p50 in (("map", 2.0), ("access", 38.0))]
    assert bandwidth([*rows, Latency("unmap", 2 << 20, 1, False, 9, 1.0, 34.0)]) == pytest.approx(52.4288)
