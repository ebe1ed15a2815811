"""The two-level ledger, recounted: the bytes of what isn't used, and its invariants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.control.memory.answers import LargeCounts
from quire.control.memory.pages import Space

if TYPE_CHECKING:
    from quire.control.memory.large import LargePages

EMPTY, CACHED = 0, -1
"""References of small pages that aren't used."""


def space_of(pages: LargePages, sizes: Sequence[int]) -> Space:
    """As Ledger.space. What is empty in active large pages can be had by their group alone: that is external."""
    empty = [0] * len(sizes)  # bytes of empty pages of reclaimable large pages
    for home in pages.reclaimable:
        empty[pages.kind[home]] += pages.holes[home] * sizes[pages.kind[home]]
    cached = [len(found) * size for found, size in zip(pages.cached, sizes)]
    bound = [
        size * ratio * (active + idle)
        for size, ratio, active, idle in zip(sizes, pages.ratios, pages.active, pages.idle)
    ]
    unused = sum(bound) - sum(used * size for used, size in zip(pages.used, sizes))
    large = sizes[0] * pages.ratios[0]
    return Space(sum(cached), unused - sum(cached) - sum(empty), large * len(pages.free) + sum(empty))


def coldest_of(pages: LargePages) -> Iterator[tuple[int, int]]:
    """The large pages that could leave the device, the one used longest ago first, and their groups (§8: one size to
    offload, and an order)."""
    return ((home, pages.kind[home]) for home in pages.reclaimable)


def cached_of(pages: LargePages, group: int) -> Iterator[int]:
    """As Ledger.cached_of."""
    return iter(pages.cached[group])


def counts_of(pages: LargePages) -> LargeCounts:
    """For an allocator's statistics."""
    evicted = pages.evicted_large, pages.evicted_small
    return LargeCounts(len(pages.free), list(pages.active), list(pages.idle), *evicted, pages.rebound)


def dropped_of(pages: LargePages) -> int:
    """Empty every cached page. Returns how many there were."""
    count = sum(map(len, pages.cached))
    for group, cached in enumerate(pages.cached):
        for page in list(cached):
            pages.evict(group, page)
    return count


def audit(pages: LargePages, named: Sequence[dict[int, int]]) -> None:
    """As Ledger.check: every small page is in one state, what is kept about large pages is what their small ones say,
    and each group's pages have as many references as `named` says."""
    kinds = dict(pages.reclaimable)
    assert len(set(pages.free)) == len(pages.free), "a large page is free twice"
    assert not kinds.keys() & set(pages.free), "a large page is free and reclaimable"
    assert not any(pages.busy[home] or pages.holes[home] for home in pages.free), "a free large page isn't free"
    owned: dict[int, int] = dict.fromkeys([*pages.free, *kinds], 0)
    for group, (refs, keys, ratio) in enumerate(zip(pages.refs, pages.keys, pages.ratios)):
        held = {page: count for page, count in enumerate(refs) if count > 0}
        assert held == named[group], "reference counts differ from the tables that name the pages"
        assert all(page >= ratio for page in held), f"group {group} holds a page of the scratch"
        assert pages.used[group] == len(held), "the count of a group's pages is wrong"
        found = {page for page, count in enumerate(refs) if count == CACHED}
        assert found == set(pages.cached[group]), "a page is cached or isn't, as one looks at it"
        assert min(refs) >= CACHED, "a page has fewer references than none"
        for page, key in enumerate(keys):
            assert key is not None or refs[page] != CACHED, f"page {page} is cached without a key"
            assert key is None or refs[page] != EMPTY, f"page {page} is empty and has a key"
        keyed = {key: page for page, key in enumerate(keys) if key is not None}
        assert keyed == pages.index[group], "the index differs from the pages' keys"
        assert len(keyed) == sum(key is not None for key in keys), "two pages have the same key"
        _audit_large(pages, group, held.keys() | found, owned)
    assert len(owned) == pages.count, "large pages are lost"
    assert sum(pages.idle) == len(pages.reclaimable), "a large page is reclaimable without a cached page"


def _audit_large(pages: LargePages, group: int, live: set[int], owned: dict[int, int]) -> None:
    refs, ratio = pages.refs[group], pages.ratios[group]
    active = idle = 0
    holed = set()
    for home in {page // ratio for page in live}:
        states = refs[home * ratio : (home + 1) * ratio]
        assert pages.kind[home] == group, f"large page {home} is held by two groups"
        assert pages.busy[home] == sum(count > 0 for count in states), f"used pages of {home} are miscounted"
        assert pages.holes[home] == states.count(EMPTY), f"empty pages of {home} are miscounted"
        if pages.busy[home]:
            assert home not in owned, f"large page {home} is active, and free or another group's"
            owned[home], active = 1, active + 1
            if pages.holes[home]:
                holed.add(home)
        else:
            assert home in pages.reclaimable, f"large page {home} is reclaimable and not in the queue"
            idle += 1
    assert (pages.active[group], pages.idle[group]) == (active, idle), f"large pages of group {group} are miscounted"
    partial = pages.partial[group]
    assert sorted(home for _, home in partial) == sorted(holed), "empty pages aren't found, or are where there are none"
    for owner, home in partial:
        assert owner is None or owner in partial.living, "what a request left empty is lost"
        assert partial.owner[home] == owner, f"large page {home} is found under another owner"
