"""Every memory over a runner that loses all its pages now and then: what is computed afterwards is right, and nothing
from before is found."""

from __future__ import annotations

import sys

import pytest
from memories import EVERY, RESERVED, VIRTUAL, Build
from stored import PAGE, StoredRunner, leftovers
from traces import Trace

FEW = ("paged-4", "poisoned", "mixed", "large-16", "boundary", "states", "virtual-poisoned", "virtual-one-pool", "ft")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.soak) for name in EVERY]
)
def test_traces_with_naps(name: str) -> None:
    build = Build(tokens=400, chunk=16) if name in RESERVED else Build(160, chunk=16, host=200, prefix_tokens=24)
    memory = EVERY[name](build)
    trace = Trace(memory, seed=3, depth=2, budget=16, max_seqs=8, preemption="auto")
    trace.sleeps = []
    told = trace.run(10, arrivals=0.05)
    assert told.finished > 3
    assert len(trace.sleeps) > 3


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
@pytest.mark.parametrize("name", ["virtual-4", "virtual-mixed"])
def test_mapped_pages_are_given_back_and_mapped_anew(name: str) -> None:
    before, runner = leftovers(), StoredRunner(2)
    memory = VIRTUAL[name](Build(112, 16, 8, 48, 1000, 0, PAGE))
    trace = Trace(memory, seed=1, depth=2, budget=16, max_seqs=8, runner=runner, preemption="auto")
    trace.sleeps = []
    trace.run(8, arrivals=0.05)
    assert len(trace.sleeps) > 3
    trace.engine.rest.sleep(1)
    del runner.store
    assert leftovers() == before, "pages are mapped still"
