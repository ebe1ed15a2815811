"""Branches that come back together where pages are dropped: their prompt is computed once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from memories import MEMORIES, Build
from test_invariants import compute
from traces import run_trace

from quire.memory.paged import PagedMemory
from quire.protocol.sequence import Sequence

WINDOWED = ["window", "mixed", "mixed-16", "own-sizes", "mixed-uncached", "slack", "boundary", "virtual-mixed"]
every = pytest.mark.parametrize("name", WINDOWED)


def group_of(count: int, common: int, own: int) -> list[Sequence]:
    return [Sequence(i, [*range(common), *range(1000 * i, 1000 * i + own)]) for i in range(1, count + 1)]


def admitted(memory: PagedMemory, group: list[Sequence]) -> list[int]:
    told = memory.admit(group, 64)
    assert isinstance(told, list)
    for seq, (reused, after, _) in zip(group, told):
        seq.computed = seq.planned = reused
        seq.prefix_source = after
    return [one.reused_tokens for one in told]


@every
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_followers_get_their_pages_as_the_first_passes(name: str, chunk: int) -> None:
    memory = MEMORIES[name](Build(tokens=640))
    group = group_of(3, 33, 6)
    stride = memory.prefix_cache.prefix_granularity
    assert admitted(memory, group) == [0, 33 // stride * stride, 33 // stride * stride]
    first, *others = group
    while first.computed < len(first.tokens):
        assert compute(memory, first, min(chunk, len(first.tokens) - first.computed))
        memory.check()
        there = first.computed >= others[0].computed
        assert [any(map(any, memory.get_placement(seq).tables)) for seq in others] == [there, there]
    for seq in others:
        assert compute(memory, seq, len(seq.tokens) - seq.computed)
        for policy, table in zip(memory.policies, memory.get_placement(seq).tables):
            assert all(table[policy.reads(seq, seq.computed, seq.computed + 1).start :])
        memory.check()
    for seq in group:
        memory.free(seq)
        memory.check()
    assert memory.account().usage.used == 0


@every
def test_followers_may_leave_before(name: str) -> None:
    memory = MEMORIES[name](Build(tokens=640, host=1000))
    group = group_of(3, 33, 6)
    admitted(memory, group)
    assert not memory.swap_out(group), "there is nothing to be swapped of two of them"
    memory.free(group[1])
    memory.check()
    assert compute(memory, group[0], 39)
    memory.free(group[0])
    memory.check()
    assert compute(memory, group[2], 39 - group[2].computed)
    memory.free(group[2])
    memory.check()
    assert memory.account().usage.used == 0
    assert memory.prefix_waiters.waiters == {}


@pytest.mark.share(8)
@every
def test_random_traces_in_which_branches_come_back(name: str) -> None:
    told: list[Any] = [
        run_trace(
            MEMORIES[name], seed=seed, depth=1 + seed % 3, budget=random.Random(seed).choice((3, 8, 16)), tokens=160,
            requests=20, preemption="recompute", host=0, aborts=0.1, unforked=0.5,
        )
        for seed in range(6)
    ]  # fmt: skip
    assert sum(t.siblings for t in told) > 0
