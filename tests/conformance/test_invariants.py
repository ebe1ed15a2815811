"""What every memory must hold: one test for each invariant of the KVMemory interface."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import (
    CACHED,
    EVERY,
    MEMORIES,
    Build,
    admit_one,
    host_free,
    host_total,
    insides,
    total_bytes,
    usage_of,
)  # fmt: skip

from quire.memory.answers import DEFERRED
from quire.memory.interface import KVMemory
from quire.memory.paged import PagedMemory
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SwapIn, SwapOut

every_memory = pytest.mark.parametrize("name", EVERY)
every_cache = pytest.mark.parametrize("name", CACHED)
every_paged = pytest.mark.parametrize("name", MEMORIES)  # for what reserved memories don't have: sharing, swapping


def sequence(id: int, length: int, *, start: int = 1, branches: int = 0, salt: str = "") -> Sequence:
    seq = Sequence(id, [start + i for i in range(length)], cache_salt=salt)
    seq.num_forks = branches
    return seq


def compute(memory: KVMemory, seq: Sequence, count: int) -> bool:
    """One step of `count` tokens, begun and confirmed; the sequence gets them if it hasn't."""
    while len(seq.tokens) < seq.planned + count:
        seq.tokens.append(len(seq.tokens))
    if not memory.grow(seq, seq.planned + count):
        return False
    memory.take_page_ops()
    seq.planned += count
    seq.computed = seq.planned
    memory.commit(seq)
    return True


def admit(memory: KVMemory, seq: Sequence, budget: int = 64) -> int | None:
    reused = admit_one(memory, seq, budget)
    if reused is None or reused is DEFERRED:
        return None
    seq.computed = seq.planned = reused
    return reused


def serve(memory: KVMemory, seq: Sequence) -> int | None:
    """Admit a sequence and compute all of its tokens."""
    reused = admit(memory, seq)
    while reused is not None and seq.planned < len(seq.tokens):
        assert compute(memory, seq, min(64, len(seq.tokens) - seq.planned))
    return reused


def text(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def serve_once(memory: KVMemory, id: int, tokens: list[int], answer: int = 0) -> int:
    """Serve a sequence of these tokens and of `answer` more, and free it. Return the tokens that it reused."""
    seq = Sequence(id, list(tokens))
    reused = serve(memory, seq)
    assert reused is not None
    for i in range(answer):
        seq.tokens.append(10_000 * id + i)
        assert compute(memory, seq, 1)
    memory.check()
    memory.free(seq)
    memory.check()
    return reused


def fill(memory: KVMemory) -> list[Sequence]:
    """Sequences until not one more page can be had."""
    residents: list[Sequence] = []
    while True:
        seq = sequence(100 + len(residents), 5, start=1000 * len(residents))
        if serve(memory, seq) is None:
            break
        residents.append(seq)
    grown = True
    while grown:
        grown = sum(len(seq.tokens) < 48 and compute(memory, seq, 1) for seq in residents) > 0
    return residents


def lines_run(call: Callable[[], Any]) -> int:
    """Lines of Python that a call executes: a cost that no clock disturbs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # others' callbacks of it are lines too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@every_memory
def test_shortage_is_a_value_and_changes_nothing(name: str) -> None:
    memory = EVERY[name](Build(tokens=64, max_seqs=64))
    cached = sequence(1, 20)
    serve(memory, cached)
    memory.free(cached)
    residents = fill(memory)
    memory.take_page_ops()
    before = insides(memory)
    assert admit_one(memory, sequence(2, 40), 64) is None
    assert insides(memory) == before
    blocked = next(seq for seq in residents if not memory.grow(seq, seq.planned + 16))
    assert insides(memory) == before
    assert not memory.grow(blocked, blocked.planned + 16)
    assert memory.take_page_ops() == ((), ())


@every_memory
def test_a_failed_admit_is_retried_only_after_pages_were_released(name: str) -> None:
    memory = EVERY[name](Build(tokens=64, max_seqs=64))
    residents = fill(memory)
    blocked = sequence(2, 40)
    first = lines_run(lambda: admit_one(memory, blocked, 64))
    again = lines_run(lambda: admit_one(memory, blocked, 64))
    assert again < 10 < first
    for seq in residents:
        memory.free(seq)
    assert isinstance(admit_one(memory, blocked, 64), int)


@every_paged
def test_what_branches_have_in_common_is_computed_by_one_and_held_once(name: str) -> None:
    """Each says after whom its rows come; where pages are dropped as a sequence computes, it has no pages before."""
    memory = MEMORIES[name](Build(tokens=640))
    group = [Sequence(id, [*range(7, 40), *range(1000 * id, 1000 * id + 5)]) for id in range(1, 5)]
    group[3].tokens[:] = [*group[2].tokens[:36], 5, 5]  # in common with the third, more than with the first
    admitted = memory.admit(group, 64)
    assert isinstance(admitted, list)
    memory.check()
    size = memory.prefix_cache.prefix_granularity
    common, more = 33 // size * size, 36 // size * size
    assert admitted[0] == (0, None, 0)
    assert admitted[1] == admitted[2] == (common, group[0], 0)
    assert admitted[3] == (more, group[2] if more > common else group[0], 0)
    tables = [memory.get_placement(seq).tables for seq in group]
    assert not memory.drops_pages or not any(map(any, tables[1:]))
    for g, pages in enumerate(() if memory.drops_pages else memory.kv_config.groups):
        first, _, third, fourth = (table[g] for table in tables)
        assert first[: pages.num_full_pages(common)] == third[: pages.num_full_pages(common)]
        assert third[: pages.num_full_pages(more)] == fourth[: pages.num_full_pages(more)]
    for seq in group:
        memory.free(seq)
        memory.check()
    assert memory.account().usage.used == 0
    serve(memory, sequence(5, 40))
    assert isinstance(memory.admit([sequence(6, 41), sequence(7, 42)], 64), list)  # what has come is shared by both
    memory.check()


@every_memory
def test_grow_is_monotone_and_idempotent(name: str) -> None:
    memory = EVERY[name](Build())
    seq = sequence(1, 9)
    admit(memory, seq)
    assert memory.grow(seq, 21)
    memory.take_page_ops()
    before = insides(memory)
    for length in (21, 20, 9, 1, 21):
        assert memory.grow(seq, length)
        assert insides(memory) == before


@every_memory
def test_admit_is_undone_exactly_by_free(name: str) -> None:
    memory = EVERY[name](Build())
    old = sequence(1, 20)
    serve(memory, old)
    memory.free(old)
    before = usage_of(memory)
    for length in (1, 16, 20, 33):
        seq = sequence(2, length)
        assert isinstance(admit_one(memory, seq, 64), int)
        memory.free(seq)
        assert usage_of(memory) == before
    memory.check()


@every_cache
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33])
def test_admit_leaves_one_token_to_compute(name: str, length: int) -> None:
    memory = EVERY[name](Build())
    for id in (1, 2):
        seq = sequence(id, length)
        reused = serve(memory, seq)
        memory.free(seq)
    size = memory.prefix_cache.prefix_granularity
    assert reused == (length - 1) // size * size


@given(
    name=st.sampled_from(sorted(EVERY)),
    lengths=st.lists(st.integers(1, 48), min_size=1, max_size=6),
    chunk=st.integers(1, 4) | st.integers(1, 40),
    spare=st.just(0) | st.integers(0, 120),
    data=st.data(),
)
def test_fits_means_that_they_can_be_held_together(
    name: str, lengths: list[int], chunk: int, spare: int, data: st.DataObject
) -> None:
    """In the smallest memory that says so, sequences are admitted and grown to these lengths, in chunks."""
    memory = next(
        memory for tokens in range(1 + spare, 2000) if (memory := EVERY[name](Build(tokens, chunk))).fits(lengths)
    )
    if data.draw(st.booleans()):  # idle, but full of cached prefixes
        for id in range(1000, 1006):
            old = sequence(id, 12, start=id)
            old.max_total_len = 12
            if memory.fits([12]) and admit(memory, old, chunk) is not None:
                while old.planned < 12:
                    assert compute(memory, old, min(chunk, 12 - old.planned))
                memory.free(old)
    seqs = []
    for id, length in enumerate(lengths):
        seq = sequence(id, data.draw(st.just(length) | st.integers(1, length)), start=100 * id)
        seq.max_total_len = length
        assert admit(memory, seq, chunk) is not None, f"{lengths} fit, but sequence {id} isn't admitted"
        seqs.append((seq, length))
    while any(seq.planned < length for seq, length in seqs):
        for seq, length in seqs:
            count = min(length - seq.planned, data.draw(st.integers(1, chunk)))
            if count:
                assert compute(memory, seq, count), f"{lengths} fit, but {seq.id} can't grow from {seq.planned}"
    memory.check()


def test_what_is_kept_free_for_others_is_counted_by_fits() -> None:
    """From 100 pages on, those who join others leave a page free: what fills the last page doesn't fit."""
    lengths = [48, 48, 10]
    assert not EVERY["paged-1"](Build(tokens=106)).fits(lengths)
    memory = EVERY["paged-1"](Build(tokens=107))
    assert memory.fits(lengths)
    for id, length in enumerate(lengths):
        assert admit(memory, sequence(id, length, start=100 * id)) == 0


@every_memory
def test_what_does_not_fit_is_not_said_to(name: str) -> None:
    memory = EVERY[name](Build(tokens=64, max_seqs=3))
    assert memory.fits([10])
    assert not memory.fits([1] * 4)  # slots
    assert not memory.fits([49])  # the width of a table
    assert not EVERY[name](Build(tokens=16)).fits([48, 48, 48])


@pytest.mark.parametrize("name", ["paged-1", "paged-4", "layer-tables", "window"])
def test_grow_and_commit_cost_the_pages_that_change(name: str) -> None:
    """More tokens cost the same after 600 tokens as after 4000."""

    def costs(length: int) -> list[int]:
        memory = EVERY[name](Build(tokens=8192, chunk=8192, max_len=8192))
        seq = sequence(1, length)
        assert admit(memory, seq, length) is not None
        assert compute(memory, seq, length)
        return [lines_run(lambda: compute(memory, seq, 1)) for _ in range(8)]

    assert costs(600) == costs(4000)  # both beyond what is kept behind a window


@every_memory
def test_conservation(name: str) -> None:
    memory = EVERY[name](Build())
    geometry = memory.kv_config
    total = total_bytes(geometry)
    assert memory.account().usage.total == total
    seqs, held = [sequence(id, 11) for id in range(4)], set[tuple[int, int]]()
    for seq in seqs:
        assert serve(memory, seq) is not None
        for group, table in zip(geometry.groups, memory.get_placement(seq).tables):
            held |= {(page * group.page_bytes, group.page_bytes) for page in table if page}
        usage = usage_of(memory)
        assert usage.total == total
        assert usage.used + usage.reserved + usage.internal == sum(size for _, size in held)
    for seq in seqs:
        memory.free(seq)
    usage = usage_of(memory)
    assert usage.used == usage.reserved == usage.internal == 0
    assert usage.cached + usage.external + usage.free == usage.total == total


def forked(memory: PagedMemory) -> tuple[Sequence, Sequence]:
    """A sequence of 18 tokens, and a fork of it."""
    parent = sequence(1, 18)
    serve(memory, parent)
    child = parent.fork(2, 1, 0)
    assert memory.fork(parent, child)
    return parent, child


@every_paged
def test_reference_counts_equal_the_tables_that_name_a_page(name: str) -> None:
    """A sequence and its fork name the same pages, and write to pages of their own."""
    memory = EVERY[name](Build())
    parent, child = forked(memory)
    assert memory.get_placement(parent).tables == memory.get_placement(child).tables
    memory.check()
    memory.take_page_ops()
    for seq in (parent, child):
        assert compute(memory, seq, 3)
        memory.check()
    for group, mine, yours in zip(
        memory.groups, memory.get_placement(parent).tables, memory.get_placement(child).tables
    ):
        full = group.num_full_pages(18)
        assert not {page for page in mine[full:] if page} & set(yours[full:])
        assert mine[:full] == yours[:full] or not all(mine)
    memory.free(parent)
    memory.check()


@every_memory
def test_only_quiet_sequences_are_freed_and_forked(name: str) -> None:
    """Nor are others swapped."""
    memory = EVERY[name](Build(host=100))
    seq = sequence(1, 9)
    admit(memory, seq)
    assert memory.grow(seq, 9)
    seq.planned = 9
    calls = [lambda: memory.free(seq), lambda: memory.fork(seq, sequence(2, 9)), lambda: memory.swap_out([seq])]
    for call in calls if name in MEMORIES else calls[:2]:
        with pytest.raises(AssertionError, match="in flight"):
            call()
    seq.computed = 9
    memory.free(seq)


@every_memory
def test_admission_leaves_room_for_the_branches_to_come(name: str) -> None:
    """What an empty memory admits for a prompt alone, it refuses when each branch would need a page more."""
    tight = next(tokens for tokens in range(1, 200) if EVERY[name](Build(tokens)).fits([9]))
    for branches, admitted in ((0, 0), (100, None)):
        memory, seq = EVERY[name](Build(tight)), sequence(1, 9, branches=branches)
        seq.max_total_len = 9
        assert admit_one(memory, seq, 64) == admitted


# Swapping


def host_keeps(memory: PagedMemory, seqs: Iterable[Sequence]) -> set[tuple[int, int]]:
    tables = [(g, table) for seq in seqs for g, table in enumerate(memory.swap.seq_pages[seq.id].tables)]
    return {(g, page) for g, table in tables for page in table if page}


@every_paged
def test_a_failed_swap_changes_nothing(name: str) -> None:
    memory = EVERY[name](Build(tokens=96, max_seqs=64, host=4))
    large, small = sequence(1, 20), sequence(2, 1, start=500)
    for seq in (large, small):
        serve(memory, seq)
    fits = memory.swap.host_pool.can_allocate([sum(map(bool, table)) for table in memory.get_placement(large).tables])
    before = insides(memory)
    if not fits:
        assert not memory.swap_out([large])
        assert not memory.swap_out([small, large])  # all or none
        assert insides(memory) == before
    assert memory.swap_out([small])
    residents = fill(memory)
    before = insides(memory)
    assert not memory.swap_in([small])
    assert insides(memory) == before
    for seq in [*residents, large]:
        memory.free(seq)
    assert memory.swap_in([small])
    memory.check()
    memory = EVERY[name](Build(max_seqs=1, host=100))  # with room, but no slot
    for seq in (small, large):
        seq.computed = seq.planned = 0
        serve(memory, seq)
        assert seq is large or memory.swap_out([seq])
    before = insides(memory)
    assert not memory.swap_in([small])
    assert insides(memory) == before


@every_paged
def test_conservation_on_the_host(name: str) -> None:
    """Shared pages go out once and come back shared; none is lost; there are never more than pages, and they come from
    where they went."""
    memory = EVERY[name](Build(tokens=128, max_seqs=64, host=10**6))
    assert [len(group.host_ids) for group in memory.groups] == [len(group.ids) for group in memory.groups]
    parent, child = forked(memory)
    assert compute(memory, child, 3)
    held = {
        (g, page)
        for seq in (parent, child)
        for g, table in enumerate(memory.get_placement(seq).tables)
        for page in table
    }
    held -= {(g, 0) for g in range(len(memory.groups))}
    for _ in range(3):
        assert memory.swap_out([parent, child])
        memory.check()
        assert len(host_keeps(memory, (parent, child))) == len(held)
        assert host_free(memory) == host_total(memory) - len(held)
        there = [
            (entry.group, entry.host_page) for entry in sum(memory.take_page_ops(), ()) if isinstance(entry, SwapOut)
        ]
        assert len(there) == len(held)
        assert all(page in memory.groups[g].host_ids for g, page in there)
        assert memory.account().usage.used == memory.account().usage.internal == 0
        assert memory.swap_in([parent, child])
        memory.check()
        back = [
            (entry.group, entry.host_page) for entry in sum(memory.take_page_ops(), ()) if isinstance(entry, SwapIn)
        ]
        assert set(back) <= set(there)
        assert host_free(memory) == host_total(memory)
    assert memory.swap_out([parent, child])
    memory.free(parent)
    assert len(host_keeps(memory, [child])) == host_total(memory) - host_free(memory)
    memory.check()
    memory.free(child)
    assert host_free(memory) == host_total(memory)
    memory.check()


@given(
    name=st.sampled_from(sorted(MEMORIES)),
    shared=st.integers(1, 30),
    tails=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    more=st.integers(0, 6),
    chunk=st.integers(1, 40),
    data=st.data(),
)
def test_what_fits_with_a_common_prefix_comes_back_together(
    name: str, shared: int, tails: list[int], more: int, chunk: int, data: st.DataObject
) -> None:
    """In the smallest memory that says so, a group that was preempted is admitted again, sharing, and grows."""
    lengths = [min(shared + tail + more, 48) for tail in tails]
    memory = next(
        memory
        for tokens in range(1, 3000)
        if (memory := EVERY[name](Build(tokens, chunk))).fits([max(lengths)] * len(lengths), shared)
    )
    group: list[Sequence] = []
    for id, tail in enumerate(tails):
        seq = sequence(id, min(shared + tail, 48))
        seq.tokens[shared:] = [1000 * id + i for i in range(len(seq.tokens) - shared)]
        group.append(seq)
    admitted = memory.admit(group, chunk)
    assert isinstance(admitted, list), f"{lengths} fit with {shared} in common, but aren't admitted"
    for seq, (reused, *_) in zip(group, admitted):
        seq.computed = seq.planned = reused
    while any(seq.planned < length for seq, length in zip(group, lengths)):
        for seq, length, (reused, after, _) in zip(group, lengths, admitted):
            if after is not None and after.planned < reused:
                continue  # that one's rows come first
            count = min(length - seq.planned, data.draw(st.integers(1, chunk)))
            if count:
                assert compute(memory, seq, count), f"{lengths} fit, but {seq.id} can't grow from {seq.planned}"
    memory.check()


def test_fits_counts_a_common_prefix_once_but_for_its_last_page() -> None:
    memory = EVERY["paged-4"](Build(tokens=4 * 14))
    assert memory.fits([20] * 4, 16)  # 4 pages in common, 1 page each: 8
    assert memory.fits([24] * 5, 19)  # the fifth page is each one's own: 4 + 5 * 2
    assert not memory.fits([24] * 6, 19)
    assert not memory.fits([24] * 5)
