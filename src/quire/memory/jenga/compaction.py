"""Compact the pinned pages of a two-level pool.

Registered prefixes stay where they were computed, beside pages of finished requests, and so may take more large pages
than they fill."""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import PagePool


def compact(page_pool: PagePool | TwoLevelPagePool | PoolView, group: int, used: Iterable[int]) -> dict[int, int]:
    """Move these pages, all used pages of a group, into as few large pages as they fill: the fullest ones.

    Return old page -> new page; the content must be copied. The new pages were empty, or cached and are evicted."""
    if isinstance(page_pool, PoolView):
        # While other models hold pages, this one may have no step soon, and they would take the freed pages.
        return {} if page_pool.other_used_bytes else compact(page_pool.page_pool, page_pool.group_range[group], used)
    if isinstance(page_pool, PagePool):
        return {}
    ratio = page_pool.small_pages_per_large[group]
    by_large_page: dict[int, list[int]] = {}
    for page in used:
        by_large_page.setdefault(page // ratio, []).append(page)
    fullest = sorted(by_large_page, key=lambda large_page: -len(by_large_page[large_page]))
    num_kept = -(-sum(map(len, by_large_page.values())) // ratio)
    to_move = [page for large_page in fullest[num_kept:] for page in by_large_page[large_page]]
    targets: list[int] = []
    for large_page in fullest[:num_kept]:
        for page in range(large_page * ratio, large_page * ratio + ratio):
            if len(targets) < len(to_move) and not page_pool.ref_count(group, page):
                if not page_pool.is_empty(group, page):
                    page_pool.evict(group, page)
                targets.append(page)
    for old, new in zip(to_move, targets):
        page_pool.move_page(group, old, new)
    return dict(zip(to_move, targets))
