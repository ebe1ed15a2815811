"""Random traces over real pages: what kernels would read is what was written, and the operating system has as many
bytes as are accounted for."""

from __future__ import annotations

import sys

import pytest
from memories import VIRTUAL, Build
from stored import PAGE, StoredRunner, leftovers
from traces import Trace

from quire.core.outputs import BranchOutput
from quire.memory.virtual.virtual_memory import VirtualMemory
from quire.worker.virtual.store import VirtualStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
LENGTH = 48


def check(memory: VirtualMemory, store: VirtualStore) -> None:
    """Bytes and mappings are what they are said to be."""
    driver = store.driver
    assert driver.physical() == driver.counters.physical == memory.kv_config.bytes
    for mine, theirs in zip(memory.mapped_pages, store.mapped_pages):
        for slot, lying in enumerate(mine[1:], 1):
            assert theirs[slot, : len(lying)].tolist() == lying
    mapped = sum(int((lying > 0).sum()) * group.parts for lying, group in zip(store.mapped_pages, memory.groups))
    scratch = sum(group.table_width * group.parts for group in memory.groups)
    assert driver.counters.mapped == memory.kv_config.bytes // PAGE + scratch + mapped
    assert store.mapping_stats.maps - store.mapping_stats.unmaps == mapped


class Checked(Trace):
    """A trace that looks at its pages whenever no step is in flight."""

    def step(self) -> list[BranchOutput]:
        outputs = super().step()
        if not self.engine.in_flight:
            check(self.memory.memory, self.runner.runner.store)
        return outputs


def traced(name: str, seed: int, depth: int) -> None:
    """Short of memory, with swaps and prefixes."""
    before, runner = leftovers(), StoredRunner(depth)
    memory = VIRTUAL[name](Build(112, 16, 8, LENGTH, 1000, 0, PAGE))
    trace = Checked(memory, seed=seed, depth=depth, budget=16, max_seqs=8, runner=runner, preemption="auto")
    assert trace.run(20).finished > 5
    check(memory, runner.store)
    assert not memory.maps_ahead or runner.store.mapping_stats.overlapped > 0
    runner.close()
    assert leftovers() == before


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", VIRTUAL)
def test_traces_over_real_pages(name: str, depth: int) -> None:
    traced(name, depth, depth)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", VIRTUAL)
def test_many_traces_over_real_pages(name: str) -> None:
    for seed in range(100, 400):
        traced(name, seed, 1 + seed % 3)


@pytest.mark.parametrize("name", ["virtual-4", "virtual-mixed"])
def test_mapped_pages_are_given_back_and_mapped_anew(name: str) -> None:
    before, runner = leftovers(), StoredRunner(2)
    memory = VIRTUAL[name](Build(112, 16, 8, 48, 1000, 0, PAGE))
    trace = Trace(memory, seed=1, depth=2, budget=16, max_seqs=8, runner=runner, preemption="auto")
    trace.sleeps = []
    trace.run(8, arrivals=0.05)
    assert len(trace.sleeps) > 3
    trace.engine.sleep(1)
    del runner.store
    assert leftovers() == before, "pages are mapped still"
