"""The two-level ledger, recounted: the bytes of what isn't used, and its invariants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.memory.answers import LargePageStats
from quire.memory.page_pool import UnusedBytes

if TYPE_CHECKING:
    from quire.memory.jenga.two_level_pool import TwoLevelPagePool

EMPTY, CACHED = 0, -1
"""References of small pages that aren't used."""


def count_unused_bytes(pool: TwoLevelPagePool, sizes: Sequence[int]) -> UnusedBytes:
    """As Ledger.space. What is empty in active large pages can be had by their group alone: that is external."""
    empty = [0] * len(sizes)  # bytes of empty pages of reclaimable large pages
    for home in pool.reclaimable:
        empty[pool.bound_group[home]] += pool.empty_small[home] * sizes[pool.bound_group[home]]
    cached = [len(found) * size for found, size in zip(pool.cached, sizes)]
    bound = [
        size * ratio * (active + idle)
        for size, ratio, active, idle in zip(sizes, pool.small_pages_per_large, pool.num_active, pool.num_reclaimable)
    ]
    unused = sum(bound) - sum(used * size for used, size in zip(pool.used, sizes))
    large = sizes[0] * pool.small_pages_per_large[0]
    return UnusedBytes(sum(cached), unused - sum(cached) - sum(empty), large * len(pool.free_large) + sum(empty))


def iter_coldest(pool: TwoLevelPagePool) -> Iterator[tuple[int, int]]:
    """The large pages that could leave the device, the one used longest ago first, and their groups (§8: one size to
    offload, and an order)."""
    return ((home, pool.bound_group[home]) for home in pool.reclaimable)


def iter_cached(pool: TwoLevelPagePool, group: int) -> Iterator[int]:
    """As Ledger.cached_of."""
    return iter(pool.cached[group])


def get_stats(pool: TwoLevelPagePool) -> LargePageStats:
    """For an allocator's statistics."""
    evicted = pool.evicted_large, pool.evicted_small
    return LargePageStats(
        len(pool.free_large), list(pool.num_active), list(pool.num_reclaimable), *evicted, pool.rebound
    )


def drop_cached(pool: TwoLevelPagePool) -> int:
    """Empty every cached page. Returns how many there were."""
    count = sum(map(len, pool.cached))
    for group, cached in enumerate(pool.cached):
        for page in list(cached):
            pool.evict(group, page)
    return count


def check(pool: TwoLevelPagePool, expected_refs: Sequence[dict[int, int]]) -> None:
    """As Ledger.check: every small page is in one state, what is kept about large pages is what their small ones say,
    and each group's pages have as many references as `expected_refs` says."""
    kinds = dict(pool.reclaimable)
    assert len(set(pool.free_large)) == len(pool.free_large), "a large page is free twice"
    assert not kinds.keys() & set(pool.free_large), "a large page is free and reclaimable"
    assert not any(pool.used_small[home] or pool.empty_small[home] for home in pool.free_large), (
        "a free large page isn't free"
    )
    owned: dict[int, int] = dict.fromkeys([*pool.free_large, *kinds], 0)
    for group, (refs, keys, ratio) in enumerate(zip(pool.refs, pool.keys, pool.small_pages_per_large)):
        held = {page: count for page, count in enumerate(refs) if count > 0}
        assert held == expected_refs[group], "reference counts differ from the tables that name the pages"
        assert all(page >= ratio for page in held), f"group {group} holds a page of the scratch"
        assert pool.used[group] == len(held), "the count of a group's pages is wrong"
        found = {page for page, count in enumerate(refs) if count == CACHED}
        assert found == set(pool.cached[group]), "a page is cached or isn't, as one looks at it"
        assert min(refs) >= CACHED, "a page has fewer references than none"
        for page, key in enumerate(keys):
            assert key is not None or refs[page] != CACHED, f"page {page} is cached without a key"
            assert key is None or refs[page] != EMPTY, f"page {page} is empty and has a key"
        keyed = {key: page for page, key in enumerate(keys) if key is not None}
        assert keyed == pool.index[group], "the index differs from the pages' keys"
        assert len(keyed) == sum(key is not None for key in keys), "two pages have the same key"
        _check_large_pages(pool, group, held.keys() | found, owned)
    assert len(owned) == pool.num_large, "large pages are lost"
    assert sum(pool.num_reclaimable) == len(pool.reclaimable), "a large page is reclaimable without a cached page"


def _check_large_pages(pool: TwoLevelPagePool, group: int, live: set[int], owned: dict[int, int]) -> None:
    refs, ratio = pool.refs[group], pool.small_pages_per_large[group]
    active = idle = 0
    holed = set()
    for home in {page // ratio for page in live}:
        states = refs[home * ratio : (home + 1) * ratio]
        assert pool.bound_group[home] == group, f"large page {home} is held by two groups"
        assert pool.used_small[home] == sum(count > 0 for count in states), f"used pages of {home} are miscounted"
        assert pool.empty_small[home] == states.count(EMPTY), f"empty pages of {home} are miscounted"
        if pool.used_small[home]:
            assert home not in owned, f"large page {home} is active, and free or another group's"
            owned[home], active = 1, active + 1
            if pool.empty_small[home]:
                holed.add(home)
        else:
            assert home in pool.reclaimable, f"large page {home} is reclaimable and not in the queue"
            idle += 1
    assert (pool.num_active[group], pool.num_reclaimable[group]) == (active, idle), (
        f"large pages of group {group} are miscounted"
    )
    partial = pool.partial[group]
    assert sorted(home for _, home in partial) == sorted(holed), "empty pages aren't found, or are where there are none"
    for owner, home in partial:
        assert owner is None or owner in partial.live_owners, "what a request left empty is lost"
        assert partial.owner_of[home] == owner, f"large page {home} is found under another owner"
