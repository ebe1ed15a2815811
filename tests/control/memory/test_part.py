"""Parts of one ledger: each is a ledger of its own groups, and what is free is everybody's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.control.memory.large import LargePages
from quire.control.memory.part import Common, Part
from quire.vocabulary.specs import Geometry, Group, Layout

LARGE, COUNT = 96, 8


def parts(association: str = "bulk") -> tuple[Part, Part]:
    """One with pages of 2 and 3 to a large page, and one with pages of 4."""
    ratios = (2, 3, 4)
    groups = tuple(
        Group((i,), LARGE // ratio, LARGE // ratio // 4, 9, range(ratio, (COUNT + 1) * ratio), run_tokens=4)
        for i, ratio in enumerate(ratios)
    )
    whole = Geometry(Layout.PAGED, (COUNT + 1) * LARGE, 4, groups, 2, 0, LARGE)
    both = [replace(whole, groups=groups[:2]), replace(whole, groups=groups[2:])]
    first, second = Common(LargePages(ratios, COUNT, association), both, [0, 20]).parts
    return first, second


def taken(part: Part, group: int, count: int, owner: int = 1) -> list[int]:
    needs = [0] * len(part)
    needs[group] = count
    assert part.reserve(needs)
    return part.take_all(group, count, owner)


def test_what_one_holds_another_cannot_have() -> None:
    first, second = parts()
    pages = taken(first, 1, 3 * 6)
    assert (first.used, second.used) == ([0, 18], [0])
    assert (first.elsewhere, second.elsewhere) == (0, 6 * LARGE)
    assert second.reserve([8])
    assert not second.reserve([9])
    assert second.space([24]).external == 6 * LARGE
    assert second.space([24]).free == 2 * LARGE
    first.release(1, pages)
    assert second.reserve([32])


def test_an_idle_memory_still_keeps_the_others_prefixes() -> None:
    """20 tokens of the second's are 5 pages: 2 large ones."""
    first, second = parts()
    assert first.affords([2 * 6, 0], idle=True)
    assert not first.affords([2 * 6 + 1, 0], idle=True)
    assert second.affords([32], idle=True)


def test_one_evicts_what_another_has_cached_and_the_older_first() -> None:
    first, second = parts()
    [old], [young] = taken(second, 0, 1), taken(first, 0, 1)
    second.publish(0, old, b"old")
    first.publish(0, young, b"young")
    second.release(0, [old])
    first.release(0, [young])
    assert first.resting([(0, young)]).pages == [1, 0]
    taken(first, 1, 3 * 7)
    assert second.find(0, b"old") is None
    assert first.find(0, b"young") == young
    assert second.evictions == 1


def test_each_drops_its_own() -> None:
    first, second = parts()
    for part, group in ((first, 0), (first, 1), (second, 0)):
        [page] = taken(part, group, 1)
        part.publish(group, page, b"key")
        part.release(group, [page])
    assert first.drop_cached() == 2
    assert second.find(0, b"key") is not None
    first.check([{}, {}])


def test_requests_of_two_models_may_have_one_number() -> None:
    """Of the one that leaves the rest of its large page is everybody's; not of the other."""
    first, second = parts("paper")
    taken(first, 1, 1)
    [page] = taken(second, 0, 1)
    first.leave(1)
    assert taken(second, 0, 1, owner=2)[0] // 4 != page // 4
    assert taken(second, 0, 1, owner=1)[0] // 4 == page // 4
    before = second.releases
    first.releases += 1
    assert second.releases == before + 1


def test_what_is_lost_is_seen_by_both() -> None:
    class Holds:
        def __init__(self, *named: dict[int, int]) -> None:
            self.named = list(named)

        def references(self) -> list[dict[int, int]]:
            return self.named

    first, second = parts()
    [page] = taken(second, 0, 1)
    with pytest.raises(AssertionError, match="reference counts"):
        first.check([{}, {}])
    second.holder = Holds({page: 1})
    first.check([{}, {}])
    second.check([{page: 1}])
    second.close()
    first.check([{}, {}])
    assert first.elsewhere == 0
