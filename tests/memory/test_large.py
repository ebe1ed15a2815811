"""The two-level ledger: the paper's examples (Jenga §4, §5.4), the order of its steps, and what they don't say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.memory.jenga.shared_pool import PoolView, SharedPool
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import WATERMARK_DIVISOR
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout


def take(pages: TwoLevelPagePool | PoolView, group: int, count: int, owner: int | None = None) -> list[int]:
    """As a memory takes them: reserved before."""
    needs = [0] * len(pages.index)
    needs[group] = count
    assert pages.reserve(needs)
    return pages.allocate(group, count, owner)


def cached(pages: TwoLevelPagePool, group: int, table: Sequence[int], keys: bytes) -> None:
    """Publish a page under each of these keys, and let all go."""
    for page, key in zip(table, keys, strict=True):
        pages.publish(group, page, bytes([key]))
    pages.decref(group, table)


def homes(pages: TwoLevelPagePool, group: int, table: Sequence[int]) -> list[int]:
    """The paper's number of the large page of each: ours less the scratch."""
    return [page // pages.small_pages_per_large[group] - 1 for page in table]


def test_in_bulk_whole_large_pages_are_a_requests_own_and_the_rest_lies_together() -> None:
    pages = TwoLevelPagePool([4, 1], 8)
    a, b = take(pages, 0, 10, 1), take(pages, 0, 5, 2)
    assert homes(pages, 0, a) == [0] * 4 + [1] * 4 + [2] * 2
    assert homes(pages, 0, b) == [3] * 4 + [2]
    assert homes(pages, 0, take(pages, 0, 1, 1)) == [2]
    pages.decref_tables([b])
    pages.remove_owner(2)
    assert (len(pages.free_large), pages.num_active) == (5, [3, 0])


def test_the_five_steps_in_order() -> None:
    pages = TwoLevelPagePool([2], 4, "paper")
    [mine] = take(pages, 0, 1, 1)  # large page 0 is request 1's
    old = take(pages, 0, 2, 9)
    cached(pages, 0, old, b"xy")  # 1 is reclaimable
    pages.remove_owner(9)
    used, kept = take(pages, 0, 2, 3)
    cached(pages, 0, [kept], b"z")  # 2 is active, with a cached page; 3 is free
    assert take(pages, 0, 1, 1) == [mine + 1]
    fresh = take(pages, 0, 1, 1)
    assert homes(pages, 0, fresh) == [3]
    assert pages.evictions == 0
    evicted = take(pages, 0, 1, 2)
    assert homes(pages, 0, evicted) == [1]
    assert pages.find(0, b"x") is pages.find(0, b"y") is None
    assert pages.evictions == 2, "a large page at once"
    others = take(pages, 0, 1, 4) + take(pages, 0, 1, 4)
    assert sorted(homes(pages, 0, others)) == [1, 3]
    assert pages.find(0, b"z") == kept
    assert take(pages, 0, 1, 4) == [kept]
    assert pages.find(0, b"z") is None
    assert pages.evictions == 3
    assert not pages.reserve([1])
    pages.check([dict.fromkeys([mine, mine + 1, used, kept, *fresh, *evicted, *others], 1)])


def test_a_request_fills_its_own_large_pages_before_it_uses_what_all_share() -> None:
    """A window's pages come back while it goes on."""
    pages = TwoLevelPagePool([4], 8)
    table = take(pages, 0, 4, 1)
    [shared] = take(pages, 0, 1, 2)
    pages.decref(0, table[:1])
    assert take(pages, 0, 1, 2) == [shared + 1]
    assert take(pages, 0, 1, 1) == table[:1]
    assert take(pages, 0, 1, 1) == [shared + 2]


def test_a_large_page_in_part_cached_and_in_part_empty_is_not_lost() -> None:
    """The paper calls a large page empty or evictable if all of its pages are."""
    pages = TwoLevelPagePool([3, 1], 1)
    table = take(pages, 0, 2, 1)
    cached(pages, 0, table, b"ab")
    assert (pages.free_large, pages.num_active, pages.num_reclaimable) == ([], [0, 0], [1, 0])
    [page] = take(pages, 1, 1, 2)
    assert page == 1
    assert (pages.free_large, pages.num_active, pages.num_reclaimable) == ([], [0, 1], [0, 0])


def test_a_large_page_is_as_old_as_the_latest_use_in_it() -> None:
    pages = TwoLevelPagePool([2], 3)
    a, b = take(pages, 0, 2, 1), take(pages, 0, 2, 2)
    cached(pages, 0, a[:1], b"a")  # the first of all
    cached(pages, 0, b, b"bc")
    cached(pages, 0, a[1:], b"d")
    assert [home - 1 for home in pages.reclaimable] == [*homes(pages, 0, b[:1]), *homes(pages, 0, a[:1])]
    pages.incref(0, b[1])
    pages.decref(0, [b[1]])
    assert [home - 1 for home in pages.reclaimable] == [*homes(pages, 0, a[:1]), *homes(pages, 0, b[:1])]


def test_of_what_was_released_together_the_deepest_goes_first_whatever_its_group() -> None:
    """Aligned (§5.1): depth counts in tokens. Group 1 has pages of one token each, group 0 of two, two in a large
    page, so that its second large page begins at token 4."""
    pages = TwoLevelPagePool([2, 1], 20, page_tokens=[2, 1])
    tables = [take(pages, 0, 4, 1), take(pages, 1, 8, 1)]
    for group, table in enumerate(tables):
        for page in table:
            pages.publish(group, page, bytes([page]))
    pages.decref_tables(tables)
    deep = {home: max(0, 2 * tables[0].index(2 * home)) for home in {page // 2 for page in tables[0]}}
    depths = [tables[1].index(home) if pages.bound_group[home] else deep[home] for home in pages.reclaimable]
    assert depths == sorted(depths, reverse=True)
    assert depths == [7, 6, 5, 4, 4, 3, 2, 1, 0, 0]


def test_a_margin_is_a_hundredth_of_the_large_pages_and_idle_counts_all() -> None:
    pages = TwoLevelPagePool([2, 1], 2 * WATERMARK_DIVISOR)
    assert pages.can_allocate([2, 2 * WATERMARK_DIVISOR - 1])
    assert not pages.can_allocate([3, 2 * WATERMARK_DIVISOR - 1])
    assert pages.can_allocate([0, 2 * WATERMARK_DIVISOR - 2], margin=True)
    assert not pages.can_allocate([1, 2 * WATERMARK_DIVISOR - 2], margin=True)
    take(pages, 1, 2 * WATERMARK_DIVISOR, 1)
    assert not pages.can_allocate([1, 0])
    assert pages.can_allocate([2, 2 * WATERMARK_DIVISOR - 1], assume_empty=True)
    assert not pages.can_allocate([2, 2 * WATERMARK_DIVISOR], assume_empty=True)
    assert pages.fits_within([3, 1], [2, 2])
    assert not pages.fits_within([3, 2], [2, 2])
    assert not TwoLevelPagePool([4, 4], 10).fits_within([6, 0], [2, 2]), (
        "more of one isn't made up for by less of another in part"
    )


def test_bytes_add_up() -> None:
    """What is empty beside used pages can't be had by every group."""
    pages, sizes = TwoLevelPagePool([3, 1], 5), [2, 6]
    table, other = take(pages, 0, 4, 1), take(pages, 1, 1, 1)
    assert pages.count_unused_bytes(sizes) == (0, 4, 12)
    cached(pages, 0, table[2:], b"cd")  # one beside two that are used, one with two empty ones
    assert pages.count_unused_bytes(sizes) == (4, 0, 16)
    cached(pages, 1, other, b"x")
    assert pages.count_unused_bytes(sizes) == (10, 0, 16)
    assert pages.evictions == 0
    assert pages.drop_cached() == 3
    assert pages.count_unused_bytes(sizes) == (0, 2, 24)
    assert (len(pages.free_large), pages.num_active, pages.num_reclaimable) == (4, [1, 0], [0, 0])


def test_what_must_not_happen() -> None:
    pages = TwoLevelPagePool([2], 1)
    a, b = take(pages, 0, 2, 1)
    with pytest.raises(AssertionError, match="must be reserved"):
        pages.allocate(0, 1, 2)
    pages.decref(0, [a])
    with pytest.raises(AssertionError, match="no references"):
        pages.decref(0, [a])
    with pytest.raises(AssertionError, match="shared but empty"):
        TwoLevelPagePool([2], 1).incref(0, b)
    with pytest.raises(AssertionError, match="association is 'loose'"):
        TwoLevelPagePool([2], 1, "loose")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pages: pages.free_large.pop(), "large pages are lost"),
        (lambda pages: pages.free_large.append(pages.free_large[0]), "free twice"),
        (lambda pages: pages.free_large.append(next(iter(pages.reclaimable))), "free and reclaimable"),
        (lambda pages: pages.refs[0].__setitem__(2, 2), "reference counts"),
        (lambda pages: pages.used.__setitem__(0, 7), "count of a group's pages"),
        (lambda pages: pages.cached[0].clear(), "reference counts and the list"),
        (lambda pages: pages.index[0].clear(), "the index differs"),
        (lambda pages: pages.keys[0].__setitem__(9, b"x"), "is empty and has a key"),
        (lambda pages: pages.keys[0].__setitem__(2, b"a"), "two pages have the same key"),
        (lambda pages: pages.partial[0].live_owners.clear(), "empty pages of a finished request"),
        (lambda pages: pages.bound_group.__setitem__(1, 1), "held by two groups"),
        (lambda pages: pages.used_small.__setitem__(1, 2), "used pages of 1 are miscounted"),
        (lambda pages: pages.empty_small.__setitem__(1, 0), "empty pages of 1 are miscounted"),
        (lambda pages: pages.num_active.__setitem__(0, 3), "large pages of group 0 are miscounted"),
        (lambda pages: pages.partial[0].by_owner.clear(), "the partial pages differ"),
        (lambda pages: pages.partial[0].owner_of.__setitem__(1, 5), "found under another owner"),
    ],
)
def test_check_finds_what_is_broken(harm: object, message: str) -> None:
    pages = TwoLevelPagePool([2, 1], 4, "paper")
    [page] = take(pages, 0, 1, 1)
    cached(pages, 0, take(pages, 0, 2, 2), b"ab")
    pages.check([{page: 1}, {}])
    assert callable(harm)
    harm(pages)
    with pytest.raises(AssertionError, match=message):
        pages.check([{page: 1}, {}])


def test_a_content_that_is_computed_again_is_found_in_the_page_that_stays() -> None:
    """Whoever can't use what is cached, its window being gone, computes it again. Its pages are found, not the old
    ones, which would be evicted first; what somebody uses keeps its name."""
    pages = TwoLevelPagePool([2], 4)
    old = take(pages, 0, 2)
    cached(pages, 0, old, b"ab")
    new = take(pages, 0, 2)
    for page, key in zip(new, (b"a", b"b")):
        pages.publish(0, page, key)
    assert [pages.index[0][key] for key in (b"a", b"b")] == new
    assert pages.num_cached == [0]
    pages.check([dict.fromkeys(new, 1)])
    third = take(pages, 0, 1)
    pages.publish(0, third[0], b"a")
    assert pages.index[0][b"a"] == new[0]
    assert pages.keys[0][third[0]] is None


# Parts of one ledger: each is a ledger of its own groups, and what is free is everybody's


LARGE, COUNT = 96, 8


def parts(association: str = "bulk") -> tuple[PoolView, PoolView]:
    """One with pages of 2 and 3 to a large page, and one with pages of 4."""
    ratios = (2, 3, 4)
    groups = tuple(
        KVCacheGroup((i,), LARGE // ratio, LARGE // ratio // 4, 9, range(ratio, (COUNT + 1) * ratio), run_tokens=4)
        for i, ratio in enumerate(ratios)
    )
    whole = KVCacheConfig(KVCacheLayout.PAGED, (COUNT + 1) * LARGE, 4, groups, 2, 0, LARGE)
    both = [replace(whole, groups=groups[:2]), replace(whole, groups=groups[2:])]
    first, second = SharedPool(TwoLevelPagePool(ratios, COUNT, association), both, [0, 20]).views
    return first, second


def test_what_one_holds_another_cannot_have() -> None:
    first, second = parts()
    pages = take(first, 1, 3 * 6)
    assert (first.used, second.used) == ([0, 18], [0])
    assert (first.other_used_bytes, second.other_used_bytes) == (0, 6 * LARGE)
    assert second.reserve([8])
    assert not second.reserve([9])
    assert second.count_unused_bytes([24]).external == 6 * LARGE
    assert second.count_unused_bytes([24]).free == 2 * LARGE
    first.decref(1, pages)
    assert second.reserve([32])


def test_an_idle_memory_still_keeps_the_others_prefixes() -> None:
    """20 tokens of the second's are 5 pages: 2 large ones."""
    first, second = parts()
    assert first.can_allocate([2 * 6, 0], assume_empty=True)
    assert not first.can_allocate([2 * 6 + 1, 0], assume_empty=True)
    assert second.can_allocate([32], assume_empty=True)


def test_one_evicts_what_another_has_cached_and_the_older_first() -> None:
    first, second = parts()
    [old], [young] = take(second, 0, 1), take(first, 0, 1)
    second.publish(0, old, b"old")
    first.publish(0, young, b"young")
    second.decref(0, [old])
    first.decref(0, [young])
    assert first.find_cached_hits([(0, young)]).num_pages == [1, 0]
    take(first, 1, 3 * 7)
    assert second.find(0, b"old") is None
    assert first.find(0, b"young") == young
    assert second.evictions == 1


def test_each_drops_its_own() -> None:
    first, second = parts()
    for part, group in ((first, 0), (first, 1), (second, 0)):
        [page] = take(part, group, 1)
        part.publish(group, page, b"key")
        part.decref(group, [page])
    assert first.drop_cached() == 2
    assert second.find(0, b"key") is not None
    first.check([{}, {}])


def test_what_is_lost_is_seen_by_both() -> None:
    class Holds:
        def __init__(self, *named: dict[int, int]) -> None:
            self.named = list(named)

        def count_refs(self) -> list[dict[int, int]]:
            return self.named

    first, second = parts()
    [page] = take(second, 0, 1)
    with pytest.raises(AssertionError, match="reference counts"):
        first.check([{}, {}])
    second.bind(Holds({page: 1}))
    first.check([{}, {}])
    second.check([{page: 1}])
    second.close()
    first.check([{}, {}])
    assert first.other_used_bytes == 0
