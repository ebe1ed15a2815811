"""Jenga, Figure 4: what is evicted must be balanced between layer types, and aligned. Pages of one token; the types
have one pool, as where their pages have one size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memories import Build
from test_invariants import serve, serve_once, text
from unlike import Kind, unlike

from quire.memory.paged import PagedMemory
from quire.protocol.sequence import Sequence


def memory_of(pages: int, window: int, **orders: Any) -> PagedMemory:
    """Self-attention and a sliding window over `pages` pages."""
    geometry = unlike(Kind(16, 1), Kind(16, 1, window=window))(Build(tokens=pages, max_len=64)).kv_config
    ids = geometry.groups[0].ids
    groups = tuple(replace(group, ids=ids) for group in geometry.groups)
    geometry = replace(geometry, groups=groups, bytes=ids.stop * 16)
    return PagedMemory(geometry, max_step_tokens=4, retention="slack", slack=0, **orders)


def hits(memory: PagedMemory) -> list[int]:
    """Two texts were read, the first long ago; a third one comes. Then what is left of the first two?"""
    for id, first in ((1, 100), (2, 200), (3, 300)):
        assert serve_once(memory, id, text(first, 24)) == 0
    looked = (Sequence(9, [*text(first, 24), 7]) for first in (100, 200))
    return [memory.prefix_cache.find_cached(seq).tokens for seq in looked]


def test_figure_4a_one_clock_for_all_types_keeps_what_another_type_of_the_same_tokens_keeps() -> None:
    """Where each type evicts its own pages, the sliding window's are gone, those of the second text too, though
    self-attention has all of it."""
    assert hits(memory_of(78, 4)) == [0, 24]
    assert hits(memory_of(78, 4, balanced=False)) == [0, 0]


def test_figure_4b_the_same_tokens_are_evicted_of_every_type() -> None:
    """Of a text of 24 tokens 8 pages must go. Aligned, these are the last four tokens of both types; else, of one type
    only, the last eight."""
    found = {}
    for aligned in (1, 0):
        memory = memory_of(60, 64, aligned_pages=aligned)
        assert serve_once(memory, 1, text(100, 24)) == 0
        other = Sequence(2, text(200, 10))
        assert serve(memory, other) == 0
        assert memory.page_pool.evictions == 8
        found[aligned] = memory.prefix_cache.find_cached(Sequence(9, [*text(100, 24), 7])).tokens
    assert found == {1: 20, 0: 16}


def test_the_deepest_pages_of_all_types_are_evicted_together() -> None:
    """What is evicted step by step is always the end of one prefix (§5.1, set_prefix_length)."""
    memory = memory_of(60, 64, aligned_pages=1)
    assert serve_once(memory, 1, text(100, 24)) == 0
    for gone in range(1, 13):
        memory.page_pool.make_room(gone % 2)
        left = [len(index) for index in memory.page_pool.index]
        assert abs(left[0] - left[1]) <= 1
        assert memory.prefix_cache.find_cached(Sequence(9, [*text(100, 24), 7])).tokens == min(left)
