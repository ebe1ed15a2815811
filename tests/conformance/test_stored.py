"""Random traces and random calls over real pages: what kernels would read is what was written, and the operating system
has as many bytes as are accounted for."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from memories import MEMORIES, VIRTUAL, Build
from stored import PAGE, PagedRunner, StoredRunner, store_of
from traces import Trace
from unlike import UNLIKE

from quire.control.memory.paged import PagedMemory
from quire.control.memory.virtual import VirtualMemory
from quire.control.request import Sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
SEQS, LENGTH = 12, 48


def leftovers() -> tuple[int, int]:
    """Mappings of pages in this process, and open files."""
    return Path("/proc/self/maps").read_text().count("quire-pages"), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", VIRTUAL)
def test_traces_over_real_pages(name: str, depth: int) -> None:
    """Short of memory, with swaps and prefixes."""
    before, runner = leftovers(), StoredRunner(depth)
    memory = VIRTUAL[name](Build(112, 16, 8, LENGTH, 1000, 0, PAGE))
    trace = Trace(memory, seed=depth, depth=depth, budget=16, max_seqs=8, runner=runner, preemption="auto")
    told = trace.run(20)
    assert told.finished > 5
    store = runner.store
    assert store.driver.physical() == store.driver.counters.physical == memory.geometry.bytes
    for mine, theirs in zip(memory.lying, store.lying):
        for slot, lying in enumerate(mine[1:], 1):
            assert theirs[slot, : len(lying)].tolist() == lying
    mapped = sum(int((lying > 0).sum()) * group.parts for lying, group in zip(store.lying, memory.groups))
    scratch = sum(group.table_width * group.parts for group in memory.groups)
    assert store.driver.counters.mapped == memory.geometry.bytes // PAGE + scratch + mapped
    assert store.mapped.maps - store.mapped.unmaps == mapped
    assert not memory.ahead or store.mapped.ahead > 0
    del store
    runner.close()
    assert leftovers() == before


IN_LARGE_PAGES: dict[str, Callable[[Build], PagedMemory]] = {
    **{name: MEMORIES[name] for name in ("large", "large-16", "large-uncached", "large-poisoned", "gcd", "uniform")},
    **{f"unlike {name}": UNLIKE[name] for name in ("large-6-10-15", "large-poisoned")},
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", IN_LARGE_PAGES)
def test_traces_over_the_bytes_of_a_store(name: str, depth: int) -> None:
    """Pages of several sizes lie in one buffer and in one host memory; no two sequences' ever meet there."""
    runner = PagedRunner(depth)
    memory = IN_LARGE_PAGES[name](Build(112, 16, 8, LENGTH, 1000))
    trace = Trace(memory, seed=depth, depth=depth, budget=16, max_seqs=8, runner=runner, preemption="swap")
    assert trace.run(20).finished > 5
    assert ("large" in name) == (memory.geometry.large_bytes > 0)


class Calls:
    """Random calls of a memory over a store, each told to the store at once. A sequence's tokens are all the same, and
    so are their keys and values in every layer."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.memory: VirtualMemory = VIRTUAL[name](Build(160, 16, SEQS, LENGTH, 24, 0, PAGE))
        self.store = store_of(self.memory.geometry)
        self.numbers = [side.view(torch.int64)[:, 0] for c in self.store.caches.values() for side in (c.keys, c.values)]
        self.live: dict[int, Sequence] = {}
        self.away: dict[int, Sequence] = {}
        self.born = self.done = 0

    def replay(self) -> None:
        now, ahead = self.memory.take_journal()
        self.store.replay(now)
        self.store.replay_ahead(ahead)

    def act(self) -> None:
        what = self.rng.choice(("allocate", "grow", "grow", "grow", "fork", "swap", "back", "free"))
        getattr(self, what)()
        self.done += 1

    def pick(self, among: dict[int, Sequence]) -> Sequence | None:
        return self.rng.choice(list(among.values())) if among else None

    def allocate(self) -> None:
        """A sequence comes in, which may share what others computed."""
        self.born += 1
        seq = Sequence(self.born, [self.rng.randint(1, 2)] * self.rng.randint(1, 30))
        admitted = self.memory.admit([seq], 16)
        if isinstance(admitted, list):
            seq.computed = seq.planned = admitted[0].reused
            self.live[seq.id] = seq
            self.replay()

    def grow(self) -> None:
        seq = self.pick(self.live)
        if seq is None or seq.planned == LENGTH:
            return
        end = min(seq.planned + self.rng.choice((1, 1, 1, 16)), LENGTH)
        seq.tokens += [seq.tokens[0]] * (end - len(seq.tokens))
        if not self.memory.grow(seq, end):
            return
        self.replay()
        for numbers in self.numbers:
            numbers[self.memory.slot(seq), seq.planned : end] = seq.tokens[0]
        seq.computed = seq.planned = end
        self.memory.commit(seq)

    def fork(self) -> None:
        parent = self.pick(self.live)
        if parent is None or not parent.computed:
            return
        self.born += 1
        child = parent.fork(self.born, 1, 0)
        if self.memory.fork(parent, child):
            self.live[child.id] = child
            self.replay()

    def swap(self) -> None:
        seq = self.pick(self.live)
        if seq is not None and self.memory.swap_out([seq]):
            self.away[seq.id] = self.live.pop(seq.id)
            self.replay()

    def back(self) -> None:
        seq = self.pick(self.away)
        if seq is not None and self.memory.swap_in([seq]):
            self.live[seq.id] = self.away.pop(seq.id)
            self.replay()

    def free(self) -> None:
        seq = self.pick(self.live if self.rng.random() < 0.8 else self.away)
        if seq is not None:
            (self.live if seq.id in self.live else self.away).pop(seq.id)
            self.memory.free(seq)

    def check(self) -> None:
        """Bytes, mappings and contents are what they are said to be."""
        self.memory.check()
        driver = self.store.driver
        assert driver.physical() == driver.counters.physical == self.memory.geometry.bytes
        assert self.store.mapped.maps - self.store.mapped.unmaps == sum(
            int((lying > 0).sum()) * group.parts for lying, group in zip(self.store.lying, self.memory.groups)
        )
        for seq in self.live.values():
            for group in self.memory.groups:
                begin = 0 if group.window is None else max(0, seq.computed - group.window + 1)
                sides = [self.numbers[2 * layer + side] for layer in group.layers for side in range(2)]
                for numbers in sides:
                    assert (numbers[self.memory.slot(seq), begin : seq.computed] == seq.tokens[0]).all()

    def end(self) -> None:
        for seq in (*self.live.values(), *self.away.values()):
            self.memory.free(seq)
        self.memory.check()
        assert sum(self.memory.pages.used) == 0
        self.numbers.clear()
        self.store.close()
        assert self.store.driver.physical() == 0


def calls(name: str, count: int, every: int) -> Calls:
    before, done = leftovers(), Calls(name, 0)
    while done.done < count:
        done.act()
        if done.done % every == 0:
            done.check()
    done.end()
    assert leftovers() == before
    return done


@pytest.mark.parametrize("name", ["virtual-4", "virtual-not-whole", "virtual-mixed"])
def test_random_calls_over_real_pages(name: str) -> None:
    done = calls(name, 1500, 50)
    assert done.memory.swap.in_bytes > 0
    assert done.memory.copies > 0
    assert done.memory.prefixes.hits > 0
    assert done.store.mapped.ahead > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_million_calls_over_real_pages() -> None:
    calls("virtual-4", 10**6, 2000)
