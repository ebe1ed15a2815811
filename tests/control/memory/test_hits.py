"""The hit rule (Jenga §5.2) against brute force: of any set of cached pages, of any types, the longest prefix that is
valid for all."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from memories import Build
from test_invariants import serve
from unlike import Kind, unlike

from quire.control.request import Sequence

KINDS = st.builds(
    lambda run, window: Kind(4, run, window=window),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.none() | st.integers(1, 40),
)


def longest(length: int, kinds: list[Kind], cached: list[set[int]]) -> int:
    """By trying every length, and in each every token that the next one sees."""
    stride = math.lcm(*(kind.run for kind in kinds))
    for hit in range((length - 1) // stride * stride, 0, -stride):
        seen = [range(0 if kind.window is None else max(hit - kind.window + 1, 0), hit) for kind in kinds]
        if all(token // kind.run in pages for kind, pages, see in zip(kinds, cached, seen) for token in see):
            return hit
    return 0


@given(kinds=st.lists(KINDS, min_size=1, max_size=4), length=st.integers(1, 97), data=st.data())
def test_the_longest_prefix_that_is_valid_for_all_types_is_found(
    kinds: list[Kind], length: int, data: st.DataObject
) -> None:
    memory = unlike(*kinds)(Build(tokens=400, chunk=16, max_len=100))
    first = Sequence(1, list(range(length)))
    first.reusable = 0  # a window of one token needs nothing
    assert serve(memory, first) == 0
    memory.free(first)
    cached: list[set[int]] = []
    for g, kind in enumerate(kinds):
        names = memory.prefixes.names(g, first.keys, 0, length // kind.run)
        gone = data.draw(st.sets(st.integers(0, max(len(names) - 1, 0)), max_size=6))
        for at in gone & set(range(len(names))):
            page = memory.pages.find(g, names[at])
            assert page is not None
            memory.pages.evict(g, page)
        cached.append(set(range(len(names))) - gone)
    again = Sequence(2, list(first.tokens))
    found = memory.prefixes.cached(again)
    assert found.tokens == longest(length, kinds, cached)
    full = [(kind, pages) for kind, pages in zip(kinds, cached) if kind.window is None]
    if full:
        alone = [pages if kind.window is None else set(range(length)) for kind, pages in zip(kinds, cached)]
        assert found.junction == longest(length, kinds, alone)
    for table, kind in zip(found.tables, kinds):
        assert len(table) == found.tokens // kind.run
    memory.check()
