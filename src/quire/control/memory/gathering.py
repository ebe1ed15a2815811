"""The pinned pages of a two-level ledger, brought together: registered prefixes stay where they were computed, beside
pages of requests that are gone, and so may hold more large pages than they fill. Knows neither prefixes nor tables."""

from __future__ import annotations

from collections.abc import Iterable

from quire.control.memory.large import LargePages
from quire.control.memory.pages import Ledger
from quire.control.memory.part import Part


def gather(pages: Ledger | LargePages | Part, group: int, used: Iterable[int]) -> dict[int, int]:
    """Move these pages, all that are used of a group, into as few large pages as they fill: the fullest ones. Returns
    where their content has to follow to: pages that were empty, or are now."""
    if isinstance(pages, Part):  # while others hold pages there may be no step soon, and they would take what is left
        return {} if pages.elsewhere else gather(pages.ledger, pages.own[group], used)
    if isinstance(pages, Ledger):
        return {}
    ratio = pages.ratios[group]
    homes: dict[int, list[int]] = {}
    for page in used:
        homes.setdefault(page // ratio, []).append(page)
    fullest = sorted(homes, key=lambda home: -len(homes[home]))
    kept = -(-sum(map(len, homes.values())) // ratio)
    left = [page for home in fullest[kept:] for page in homes[home]]
    room: list[int] = []
    for home in fullest[:kept]:
        for page in range(home * ratio, home * ratio + ratio):
            if len(room) < len(left) and not pages.names(group, page):
                if not pages.is_empty(group, page):
                    pages.evict(group, page)
                room.append(page)
    for old, new in zip(left, room):
        _move(pages, group, old, new)
    return dict(zip(left, room))


def _move(pages: LargePages, group: int, old: int, new: int) -> None:
    """An empty page of an active large page takes the place of a used one."""
    home = new // pages.ratios[group]
    times, key = pages.names(group, old), pages.keys[group][old]
    pages.refs[group][new] = times
    pages.used[group] += 1
    pages.busy[home] += 1
    pages.holes[home] -= 1
    if not pages.holes[home]:
        pages.partial[group].remove(home)
    if key is not None:
        pages.keys[group][old] = None
        del pages.index[group][key]
        pages.publish(group, new, key)
    pages.release(group, [old] * times)
