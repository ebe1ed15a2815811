"""The pinned pages of a two-level ledger, brought together: registered prefixes stay where they were computed, beside
pages of requests that are gone, and so may hold more large pages than they fill. Knows neither prefixes nor tables."""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import PagePool


def compact(page_pool: PagePool | TwoLevelPagePool | PoolView, group: int, used: Iterable[int]) -> dict[int, int]:
    """Move these pages, all that are used of a group, into as few large pages as they fill: the fullest ones. Returns
    where their content has to follow to: pages that were empty, or are now."""
    if isinstance(
        page_pool, PoolView
    ):  # while others hold pages there may be no step soon, and they would take what is left
        return {} if page_pool.other_used_bytes else compact(page_pool.page_pool, page_pool.group_range[group], used)
    if isinstance(page_pool, PagePool):
        return {}
    ratio = page_pool.small_pages_per_large[group]
    homes: dict[int, list[int]] = {}
    for page in used:
        homes.setdefault(page // ratio, []).append(page)
    fullest = sorted(homes, key=lambda home: -len(homes[home]))
    kept = -(-sum(map(len, homes.values())) // ratio)
    left = [page for home in fullest[kept:] for page in homes[home]]
    room: list[int] = []
    for home in fullest[:kept]:
        for page in range(home * ratio, home * ratio + ratio):
            if len(room) < len(left) and not page_pool.ref_count(group, page):
                if not page_pool.is_empty(group, page):
                    page_pool.evict(group, page)
                room.append(page)
    for old, new in zip(left, room):
        _move_page(page_pool, group, old, new)
    return dict(zip(left, room))


def _move_page(page_pool: TwoLevelPagePool, group: int, old: int, new: int) -> None:
    """An empty page of an active large page takes the place of a used one."""
    home = new // page_pool.small_pages_per_large[group]
    times, key = page_pool.ref_count(group, old), page_pool.keys[group][old]
    page_pool.refs[group][new] = times
    page_pool.used[group] += 1
    page_pool.used_small[home] += 1
    page_pool.empty_small[home] -= 1
    if not page_pool.empty_small[home]:
        page_pool.partial[group].remove(home)
    if key is not None:
        page_pool.keys[group][old] = None
        del page_pool.index[group][key]
        page_pool.publish(group, new, key)
    page_pool.decref(group, [old] * times)
