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
    reset,
    total_bytes,
    usage_of,
)  # fmt: skip

from quire.control.memory import LATER, KVMemory
from quire.control.memory.paged import PagedMemory
from quire.control.request import Sequence
from quire.vocabulary.plan import Copy, In, Journal, Out, Poison

every_memory = pytest.mark.parametrize("name", EVERY)
every_cache = pytest.mark.parametrize("name", CACHED)
every_paged = pytest.mark.parametrize("name", MEMORIES)  # for what reserved memories don't have: sharing, swapping


def sequence(id: int, length: int, *, start: int = 1, branches: int = 0, salt: str = "") -> Sequence:
    seq = Sequence(id, [start + i for i in range(length)], salt=salt)
    seq.branches = branches
    return seq


def compute(memory: KVMemory, seq: Sequence, count: int) -> bool:
    """One step of `count` tokens, begun and confirmed; the sequence gets them if it hasn't."""
    while len(seq.tokens) < seq.planned + count:
        seq.tokens.append(len(seq.tokens))
    if not memory.grow(seq, seq.planned + count):
        return False
    memory.take_journal()
    seq.planned += count
    seq.computed = seq.planned
    memory.commit(seq)
    return True


def admit(memory: KVMemory, seq: Sequence, budget: int = 64) -> int | None:
    reused = admit_one(memory, seq, budget)
    if reused is None or reused is LATER:
        return None
    seq.computed = seq.planned = reused
    return reused


def serve(memory: KVMemory, seq: Sequence) -> int | None:
    """Admit a sequence and compute all of its tokens."""
    reused = admit(memory, seq)
    while reused is not None and seq.planned < len(seq.tokens):
        assert compute(memory, seq, min(64, len(seq.tokens) - seq.planned))
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


def pages_of(memory: KVMemory, seq: Sequence) -> list[int]:
    """Its pages, by where they begin: numbers of two groups' pages may be the same."""
    tables = zip(memory.geometry.groups, memory.place(seq).tables)
    return [page * group.page_bytes for group, table in tables for page in table if page]


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
    memory.take_journal()
    before = insides(memory)
    assert admit_one(memory, sequence(2, 40), 64) is None
    assert insides(memory) == before
    blocked = next(seq for seq in residents if not memory.grow(seq, seq.planned + 16))
    assert insides(memory) == before
    assert not memory.grow(blocked, blocked.planned + 16)
    assert memory.take_journal() == ((), ())


@every_cache
def test_a_failed_admit_leaves_the_order_of_eviction_alone(name: str) -> None:
    """Hits that a failed admission looked at are still evicted in the order of their last use."""
    memory = EVERY[name](Build(tokens=96, max_seqs=3))
    first, second = sequence(1, 17), sequence(2, 17, start=500)
    for seq in (first, second):
        serve(memory, seq)
    for seq in (first, second):
        memory.free(seq)
    blocker = sequence(3, 1, start=900)
    serve(memory, blocker)
    while compute(memory, blocker, 1) and len(blocker.tokens) < 16:
        pass
    before = insides(memory)
    greedy = sequence(4, 47, branches=10**6)
    assert admit_one(memory, greedy, 64) is None
    assert insides(memory) == before


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


def group_of(memory: KVMemory, count: int, shared: int, tail: int) -> list[Sequence]:
    """Branches of one request as they are after a preemption: they have a prompt and more in common."""
    group = []
    for id in range(count):
        seq = Sequence(50 + id, [7 + i for i in range(shared)] + [1000 * (id + 1) + i for i in range(tail)])
        seq.prompt_len, seq.final = min(shared, 4), shared + tail
        group.append(seq)
    return group


@every_memory
def test_branches_come_in_together_or_not_at_all(name: str) -> None:
    """Where most of them would find room, but not all, nothing changes; and they come in once something has left."""
    memory = EVERY[name](Build(tokens=640, max_seqs=12))
    alone = sequence(1, 10)
    alone.final = 10
    assert serve(memory, alone) == 0
    blockers = []
    while True:
        group = group_of(memory, 3, 8, 9)
        if not isinstance(memory.admit(group, 64), list):
            break
        for seq in group:
            memory.free(seq)
        memory.take_journal()
        blockers.append(sequence(100 + len(blockers), 17, start=1000 * len(blockers) + 100))
        blockers[-1].final = 17
        if admit(memory, blockers[-1]) is None:
            blockers.pop()
            break
        memory.take_journal()
    assert blockers
    before = insides(memory)
    assert memory.admit(group_of(memory, 3, 8, 9), 64) is None
    assert insides(memory) == before
    one = sequence(99, 17, start=9000)
    one.final = 17
    assert isinstance(admit_one(memory, one), int)
    for seq in blockers:
        memory.free(seq)
    assert isinstance(memory.admit(group, 64), list)
    assert all(memory.slot(seq) for seq in group)
    memory.check()


@every_paged
def test_what_branches_have_in_common_is_computed_by_one_and_held_once(name: str) -> None:
    """Each says after whom its rows come; where pages are dropped as a sequence computes, it has no pages before."""
    memory = MEMORIES[name](Build(tokens=640))
    group = group_of(memory, 4, 33, 5)
    group[3].tokens[:] = [*group[2].tokens[:36], 5, 5]  # in common with the third, more than with the first
    admitted = memory.admit(group, 64)
    assert isinstance(admitted, list)
    memory.check()
    size = memory.prefixes.stride
    common, more = 33 // size * size, 36 // size * size
    assert admitted[0] == (0, None)
    assert admitted[1] == admitted[2] == (common, group[0])
    assert admitted[3] == (more, group[2] if more > common else group[0])
    tables = [memory.place(seq).tables for seq in group]
    if memory.forgets:
        assert not any(map(any, tables[1:]))
        return
    for g, pages in enumerate(memory.geometry.groups):
        first, second, third, fourth = (table[g] for table in tables)
        some, most = pages.whole(common), pages.whole(more)
        assert first[:some] == second[:some] == third[:some]
        assert third[:most] == fourth[:most]
        own = [page for table in (first, second, third) for page in table[some:]] + [*fourth[most:]]
        assert len(own) == len(set(own))
    for seq in group:
        memory.free(seq)
        memory.check()
    assert memory.account().usage.used == 0


@every_cache
def test_what_is_being_computed_for_another_is_awaited(name: str) -> None:
    """LATER changes nothing, others are let in meanwhile, and what has come is shared; also by several branches."""
    memory = MEMORIES[name](Build(tokens=640))
    first, unlike = sequence(1, 40), sequence(2, 40, start=500)
    assert admit(memory, first) == 0
    group = [sequence(3, 41), sequence(4, 42)]
    before = insides(memory)
    for _ in range(3):
        assert admit_one(memory, sequence(5, 40)) is LATER
        assert memory.admit(group, 64) is LATER
        assert insides(memory) == before
    assert admit(memory, unlike) == 0
    while first.planned < 40:
        assert compute(memory, first, min(40 - first.planned, 64))
    size = memory.prefixes.stride
    assert admit_one(memory, sequence(5, 40)) == 39 // size * size
    admitted = memory.admit(group, 64)
    assert isinstance(admitted, list)
    assert [after for _, after in admitted] == [None, None]
    assert [reused for reused, _ in admitted] == [40 // size * size] * 2
    memory.check()


@every_memory
def test_grow_is_monotone_and_idempotent(name: str) -> None:
    memory = EVERY[name](Build())
    seq = sequence(1, 9)
    admit(memory, seq)
    assert memory.grow(seq, 21)
    memory.take_journal()
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
    size = memory.prefixes.stride
    assert reused == (length - 1) // size * size


@every_cache
def test_prefixes_of_another_salt_are_not_reused(name: str) -> None:
    memory = EVERY[name](Build())
    assert serve(memory, sequence(1, 33)) == 0
    assert serve(memory, sequence(2, 33, salt="adapter")) == 0
    assert serve(memory, sequence(3, 33)) == 32
    assert serve(memory, sequence(4, 33, salt="adapter")) == 32


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
            old.final = 12
            if memory.fits([12]) and admit(memory, old, chunk) is not None:
                while old.planned < 12:
                    assert compute(memory, old, min(chunk, 12 - old.planned))
                memory.free(old)
    seqs = []
    for id, length in enumerate(lengths):
        seq = sequence(id, data.draw(st.just(length) | st.integers(1, length)), start=100 * id)
        seq.final = length
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
def test_the_journal_has_the_effect_of_in_order_replay(name: str) -> None:
    """Pages freed and reused between two calls of take_journal, slots too: in order, the tables come out right."""
    memory = EVERY[name](Build(tokens=128))
    tables: dict[tuple[int, int, int], int] = {}

    def replay(journal: Journal) -> None:
        for entry in journal:
            for i, page in enumerate(getattr(entry, "pages", ())):
                tables[entry.slot, entry.group, entry.at + i] = page  # type: ignore[union-attr]

    for round in range(6):
        seqs = [sequence(10 * round + i, 9 + 3 * i, start=7 * i) for i in range(3)]
        held = [seq for seq in seqs if admit(memory, seq, 30) is not None]
        assert held
        for seq in held:
            memory.grow(seq, len(seq.tokens))
        for seq in held[:-1]:
            memory.free(seq)
        late = sequence(10 * round + 9, 11, start=3)
        assert isinstance(admit_one(memory, late, 30), int)
        replay(memory.take_journal()[0])
        for seq in (held[-1], late):
            place = memory.place(seq)
            for g, table in enumerate(place.tables):
                assert tuple(tables[place.slot, g, i] for i in range(len(table))) == table
            memory.free(seq)


@every_memory
def test_conservation(name: str) -> None:
    memory = EVERY[name](Build())
    total = memory.account().usage.total
    geometry = memory.geometry
    assert total == total_bytes(geometry)
    seqs = []
    for id in range(4):
        seq = sequence(id, 11)
        assert serve(memory, seq) is not None
        seqs.append(seq)
        usage = usage_of(memory)
        assert usage.total == total
        held = {
            page * group.page_bytes: group.page_bytes
            for seq in seqs
            for group, table in zip(geometry.groups, memory.place(seq).tables)
            for page in table
            if page
        }
        assert usage.used + usage.reserved + usage.internal == sum(held.values())
    for seq in seqs:
        memory.free(seq)
        assert memory.account().usage.total == total
    usage = usage_of(memory)
    assert usage.used == usage.reserved == usage.internal == 0
    assert usage.cached + usage.external + usage.free == total


def forked(memory: PagedMemory) -> tuple[Sequence, Sequence]:
    """A sequence of 18 tokens, and a fork of it."""
    parent = sequence(1, 18)
    serve(memory, parent)
    child = parent.fork(2, 1, 0)
    assert memory.fork(parent, child)
    return parent, child


@every_paged
def test_reference_counts_equal_the_tables_that_name_a_page(name: str) -> None:
    memory = EVERY[name](Build())
    parent, child = forked(memory)
    assert pages_of(memory, parent) == pages_of(memory, child)
    memory.check()
    memory.free(parent)
    memory.check()
    assert compute(memory, child, 5)
    memory.check()


@every_paged
def test_a_fork_writes_to_pages_of_its_own(name: str) -> None:
    memory = EVERY[name](Build())
    parent, child = forked(memory)
    memory.take_journal()
    for seq in (parent, child):
        assert compute(memory, seq, 3)
    for group, mine, yours in zip(memory.groups, memory.place(parent).tables, memory.place(child).tables):
        full = group.whole(18)
        assert not {page for page in mine[full:] if page} & set(yours[full:])
        assert mine[:full] == yours[:full] or not all(mine)


@every_memory
def test_deterministic(name: str) -> None:
    """The same calls give the same placements and the same journal, so page ids mean the same on every rank."""

    def journals() -> list[object]:
        memory = EVERY[name](Build(tokens=96))
        seen: list[object] = []
        for id in range(12):
            seq = sequence(id, 5 + 7 * (id % 4), start=id % 3)
            reused = admit(memory, seq)
            seen.append(reused)
            if reused is not None:
                memory.grow(seq, len(seq.tokens))
                seen.append(memory.place(seq))
                seen.append(memory.take_journal())
                seq.planned = seq.computed = len(seq.tokens)
                memory.commit(seq)
                if id % 2:
                    memory.free(seq)
        return seen

    assert journals() == journals()


@every_memory
def test_admission_leaves_room_for_the_branches_to_come(name: str) -> None:
    """What an empty memory admits for a prompt alone, it refuses when each branch would need a page more."""
    tight = next(tokens for tokens in range(1, 200) if EVERY[name](Build(tokens)).fits([9]))
    for branches, admitted in ((0, 0), (100, None)):
        memory, seq = EVERY[name](Build(tight)), sequence(1, 9, branches=branches)
        seq.final = 9
        assert admit_one(memory, seq, 64) == admitted


@every_memory
def test_only_quiet_sequences_are_freed_and_forked(name: str) -> None:
    """Nor are others swapped."""
    memory = EVERY[name](Build(host=100))
    seq = sequence(1, 9)
    admit(memory, seq)
    assert memory.grow(seq, 9)
    seq.planned = 9
    with pytest.raises(AssertionError, match="in flight"):
        memory.free(seq)
    with pytest.raises(AssertionError, match="in flight"):
        memory.fork(seq, sequence(2, 9))
    if name in MEMORIES:
        with pytest.raises(AssertionError, match="in flight"):
            memory.swap_out([seq])
    seq.computed = 9
    memory.free(seq)


@every_memory
def test_slots_are_dense_and_scratch_is_nobodys(name: str) -> None:
    memory = EVERY[name](Build(max_seqs=3))
    seqs = [sequence(id, 4, start=10 * id) for id in range(3)]
    for seq in seqs:
        assert isinstance(admit_one(memory, seq, 64), int)
    assert sorted(memory.slot(seq) for seq in seqs) == [1, 2, 3]
    assert 0 not in [page for seq in seqs for page in pages_of(memory, seq)]
    assert admit_one(memory, sequence(3, 4), 64) is None
    memory.free(seqs[1])
    late = sequence(4, 4)
    assert isinstance(admit_one(memory, late, 64), int)
    assert memory.slot(late) == 2


# Swapping


def host_keeps(memory: PagedMemory, seqs: Iterable[Sequence]) -> set[tuple[int, int]]:
    tables = [(g, table) for seq in seqs for g, table in enumerate(memory.swap.residents[seq.id].tables)]
    return {(g, page) for g, table in tables for page in table if page}


@every_paged
def test_a_failed_swap_changes_nothing(name: str) -> None:
    memory = EVERY[name](Build(tokens=96, max_seqs=64, host=4))
    large, small = sequence(1, 20), sequence(2, 1, start=500)
    for seq in (large, small):
        serve(memory, seq)
    fits = memory.swap.host.affords([sum(map(bool, table)) for table in memory.place(large).tables])
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
def test_pages_go_out_before_they_are_used_again_and_come_in_before_they_are_read(name: str) -> None:
    """A device that replays the journal in order finds each sequence's content after the swaps."""
    memory = EVERY[name](Build(tokens=96, max_seqs=64, host=1000))
    cells: dict[int, object] = {}
    host: dict[int, object] = {}

    def replay() -> None:
        now, ahead = memory.take_journal()
        for entry in now + ahead:
            size = memory.groups[entry.group].page_bytes
            if isinstance(entry, Out):
                host[(entry.host - 1) * size] = cells[entry.page * size]
            elif isinstance(entry, In):
                cells[entry.page * size] = host.pop((entry.host - 1) * size)
            elif isinstance(entry, Copy):
                cells[entry.dst * size] = cells[entry.src * size]
            elif isinstance(entry, Poison):
                cells[entry.page * size] = None

    def write(seq: Sequence) -> None:
        replay()
        for page in pages_of(memory, seq):
            cells[page] = seq.id

    away = sequence(1, 20)
    admit(memory, away)
    assert memory.grow(away, 20)
    write(away)
    away.planned = away.computed = 20
    assert memory.swap_out([away])
    other = sequence(2, 20, start=500)  # in the same step, on the pages that became free
    admit(memory, other)
    assert memory.grow(other, 20)
    write(other)
    other.planned = other.computed = 20
    memory.free(other)
    assert memory.swap_in([away])
    replay()
    held = pages_of(memory, away)
    assert held
    assert {cells[page] for page in held} == {1}


@every_paged
def test_conservation_on_the_host(name: str) -> None:
    """Shared pages go out once and come back shared; none is lost; there are never more than pages."""
    memory = EVERY[name](Build(tokens=128, max_seqs=64, host=10**6))
    assert [len(group.host_ids) for group in memory.groups] == [len(group.ids) for group in memory.groups]
    parent, child = forked(memory)
    assert compute(memory, child, 3)
    held = {(g, page) for seq in (parent, child) for g, table in enumerate(memory.place(seq).tables) for page in table}
    held -= {(g, 0) for g in range(len(memory.groups))}
    places = [memory.place(seq).tables for seq in (parent, child)]
    for _ in range(3):
        assert memory.swap_out([parent, child])
        memory.check()
        assert len(host_keeps(memory, (parent, child))) == len(held)
        assert host_free(memory) == host_total(memory) - len(held)
        assert memory.account().usage.used == memory.account().usage.internal == 0
        assert memory.swap_in([parent, child])
        memory.check()
        assert host_free(memory) == host_total(memory)
    back = [memory.place(seq).tables for seq in (parent, child)]
    sizes = [group.page_bytes for group in memory.groups]
    names = [
        [page * size for tables in place for size, table in zip(sizes, tables) for page in table]
        for place in (places, back)
    ]
    assert [names[0].index(page) for page in names[0]] == [names[1].index(page) for page in names[1]]
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
    for seq, (reused, _) in zip(group, admitted):
        seq.computed = seq.planned = reused
    while any(seq.planned < length for seq, length in zip(group, lengths)):
        for seq, length, (reused, after) in zip(group, lengths, admitted):
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


@every_paged
def test_what_filled_the_memory_comes_back_when_it_is_alone(name: str) -> None:
    """No page beyond its own is asked for then: nobody is left who could give one."""
    tokens = next(tokens for tokens in range(1, 400) if EVERY[name](Build(tokens)).fits([40]))
    memory = EVERY[name](Build(tokens, host=10**6))
    seq = sequence(1, 40)
    assert serve(memory, seq) == 0
    assert memory.swap_out([seq])
    reset(memory)
    assert memory.swap_in([seq])
    memory.check()
