"""The hit rule (Jenga §5.2) against brute force: of any set of cached pages, of any types, the longest prefix that is
valid for all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import MEMORIES, Build, admit_one
from test_invariants import compute, sequence, serve
from unlike import UNLIKE, Kind, unlike

from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SwapIn

RUNS, SIGHTS = st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 40)
KINDS = st.one_of(
    st.builds(lambda run, window: Kind(4, run, window=window), RUNS, st.none() | SIGHTS),
    st.builds(lambda run, chunk: Kind(4, run, kind="chunked", chunk=chunk), RUNS, SIGHTS),
    st.builds(lambda run: Kind(4, run, kind="state"), RUNS),
)


def needed(kind: Kind, hit: int) -> range:
    """The tokens before `hit` whose pages the next one needs."""
    if kind.kind == "state":
        return range(hit - 1, hit)
    if kind.chunk is not None:
        return range(hit - hit % kind.chunk, hit)
    return range(0 if kind.window is None else max(hit - kind.window + 1, 0), hit)


def longest(length: int, kinds: list[Kind], cached: list[set[int]]) -> int:
    """By trying every length, and in each every token that the next one sees."""
    stride = math.lcm(*(kind.run for kind in kinds))
    for hit in range((length - 1) // stride * stride, 0, -stride):
        if all(token // kind.run in pages for kind, pages in zip(kinds, cached) for token in needed(kind, hit)):
            return hit
    return 0


@given(kinds=st.lists(KINDS, min_size=1, max_size=4), length=st.integers(1, 97), data=st.data())
def test_the_longest_prefix_that_is_valid_for_all_types_is_found(
    kinds: list[Kind], length: int, data: st.DataObject
) -> None:
    memory = unlike(*kinds)(Build(tokens=400, chunk=16, max_len=100))
    first = Sequence(1, list(range(length)))
    first.max_prefix_hit = 0  # a window of one token needs nothing
    assert serve(memory, first) == 0
    memory.free(first)
    cached: list[set[int]] = []
    for g, kind in enumerate(kinds):
        names = memory.prefix_cache.page_keys(g, first.page_keys, 0, length // kind.run)
        gone = data.draw(st.sets(st.integers(0, max(len(names) - 1, 0)), max_size=6))
        for at in gone & set(range(len(names))):
            page = memory.page_pool.find(g, names[at])
            assert page is not None
            memory.page_pool.evict(g, page)
        cached.append(set(range(len(names))) - gone)
    again = Sequence(2, list(first.tokens))
    found = memory.prefix_cache.find_cached(again)
    assert found.tokens == longest(length, kinds, cached)
    full = [kind.kind == "" and kind.window is None for kind in kinds]
    if any(full):
        alone = [pages if of_all else set(range(length)) for of_all, pages in zip(full, cached)]
        assert found.full_hit_tokens == longest(length, kinds, alone)
    for table, kind in zip(found.tables, kinds):
        assert len(table) == found.tokens // kind.run
    memory.check()


# What is held is what is read


@pytest.mark.parametrize("name", [*MEMORIES, *UNLIKE])
def test_grow_and_drop_follow_from_what_is_read_and_written(name: str) -> None:
    """Whatever a policy says of a chunk is there when it was asked for, private where it is written; and what the next
    token doesn't read is gone after it was computed."""
    memory = (MEMORIES | UNLIKE)[name](Build(tokens=512, chunk=16))
    seq = sequence(1, 44)
    assert admit_one(memory, seq, 3) == 0
    for count in (3, 1, 7, 16, 1, 12, 4):
        start, end = seq.planned, seq.planned + count
        assert compute(memory, seq, count)
        for policy, table in zip(memory.policies, memory.get_placement(seq).tables):
            shrunk = policy.shrinks and end >= seq.prompt_len  # its pages behind what is kept are gone already
            assert len(table) >= policy.reads(seq, end if shrunk else start, end).stop
            later = policy.reads(seq, end, end + 1)
            assert not any(table[: min(later.start, len(table))]), "a page that nobody reads is still held"
            assert all(table[later.start : later.stop]), "a page that the next token reads is gone"
    memory.check()


@pytest.mark.parametrize("name", ["paged-4", "mixed"])
def test_twins_that_were_swapped_out_come_back_to_one_page(name: str) -> None:
    """Two branches that drew the same tokens have pages of their own with the same content, of which one is cached.
    When both come back to that one it is named twice, and has two references."""
    memory = MEMORIES[name](Build(tokens=256, max_seqs=8, host=1000))
    stem = sequence(1, 6)
    assert serve(memory, stem) == 0
    twin = stem.fork(2, 1, 0)
    assert memory.fork(stem, twin)
    for seq in (stem, twin):
        seq.tokens += [7] * 8
        assert compute(memory, seq, 8)
    memory.check()
    assert memory.swap_out([stem, twin])
    memory.check()
    assert memory.swap_in([stem, twin])
    memory.check()
    for seq in (stem, twin):
        memory.free(seq)
    memory.check()
    assert memory.account().usage.used == 0


def test_who_comes_back_shares_what_is_still_cached() -> None:
    """Full pages that nobody took meanwhile are named again; only what has no name is copied back."""
    memory = MEMORIES["paged-4"](Build(tokens=64, max_seqs=8, host=1000))
    seq = sequence(1, 14)
    assert serve(memory, seq) == 0
    before = memory.get_placement(seq).tables[0][:3]
    assert memory.swap_out([seq])
    memory.take_page_ops()
    assert memory.swap_in([seq])
    back = [entry for entry in sum(memory.take_page_ops(), ()) if isinstance(entry, SwapIn)]
    assert memory.get_placement(seq).tables[0][:3] == before
    assert len(back) == 1
    memory.check()
