"""The ledger of pages: stacks of empty pages, queues of cached ones, pools of one size, and what `check` finds."""

from __future__ import annotations

import pytest

from quire.memory.page_pool import SCRATCH, WATERMARK_DIVISOR, EmptyPageQueue, PagePool


def ledger(total: int, groups: int = 1, order: list[int] | None = None) -> PagePool:
    """Groups that have all pages in common."""
    return PagePool([range(1, total + 1)] * groups, order)


def cached(pages: PagePool, page: int, key: bytes, group: int = 0) -> None:
    pages.publish(group, page, key)
    pages.decref(group, (page,))


def available(pages: PagePool) -> int:
    return sum(pool.available for pool in pages.size_classes)


def test_empty_pages_go_before_cached_ones_and_those_by_age() -> None:
    pages = ledger(3)
    first, second, third = (pages.allocate_one(0) for _ in range(3))
    cached(pages, second, b"b")
    cached(pages, first, b"a")
    pages.decref(0, (third,))
    assert pages.allocate_one(0) == third
    assert pages.evictions == 0
    assert [pages.allocate_one(0), pages.allocate_one(0)] == [second, first]
    assert pages.evictions == 2
    assert pages.find(0, b"a") is pages.find(0, b"b") is None


def test_groups_with_pages_of_one_size_share_them_and_others_do_not() -> None:
    pages = PagePool([range(1, 4), range(10, 12), range(1, 4)])
    assert [pool.groups for pool in pages.size_classes] == [[0, 2], [1]]
    assert [pages.allocate_one(0), pages.allocate_one(2), pages.allocate_one(1)] == [1, 2, 10]
    assert pages.used == [1, 1, 1]
    assert pages.can_allocate([1, 1, 0])
    assert pages.can_allocate([0, 1, 1])
    assert not pages.can_allocate([1, 0, 1])
    assert not pages.can_allocate([0, 2, 0])
    pages.check([{1: 1}, {10: 1}, {2: 1}])
    with pytest.raises(AssertionError, match="group 1 holds page 2, which is not its own"):
        pages.check([{1: 1}, {10: 1, 2: 1}, {2: 1}])


def test_a_margin_is_a_hundredth_of_each_pool() -> None:
    small, large = WATERMARK_DIVISOR - 1, 2 * WATERMARK_DIVISOR
    pages = PagePool([range(1, 1 + small), range(1000, 1000 + large)])
    for needs, margin in (([small, large], False), ([small, large - 2], True)):
        assert pages.can_allocate(needs, margin=margin)
        assert not pages.can_allocate([needs[0], needs[1] + 1], margin=margin)
    for _ in range(5):
        pages.allocate_one(1)
    assert not pages.can_allocate([0, large - 2], margin=True)
    assert pages.can_allocate([0, large - 2], margin=True, assume_empty=True)
    assert not pages.can_allocate([0, large - 1], margin=True, assume_empty=True)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pages: pages.size_class_of[0].empty.pop(), "lost"),
        (lambda pages: pages.size_class_of[0].empty.__setitem__(0, pages.size_class_of[0].empty[1]), "empty twice"),
        (lambda pages: pages.size_class_of[0].cached.pop(2), "lost"),
        (lambda pages: pages.size_class_of[0].keys.__setitem__(2, None), "without a key"),
        (lambda pages: pages.index[0].clear(), "not indexed"),
        (lambda pages: pages.index[0].__setitem__(b"x", 2), "under another key"),
        (lambda pages: pages.size_class_of[0].refs.__setitem__(SCRATCH, 1), "reference counts"),
        (lambda pages: pages.size_class_of[0].refs.__setitem__(1, 0), "reference counts"),
        (lambda pages: pages.used.__setitem__(0, 2), "count of a group's pages"),
        (lambda pages: pages.size_class_of[0].keys.__setitem__(3, (0, b"x")), "empty and has a key"),
        (lambda pages: pages.num_cached.__setitem__(0, 2), "count of a group's cached pages"),
    ],
)
def test_check_finds_what_is_broken(harm: object, message: str) -> None:
    pages = ledger(5)
    pages.allocate_one(0)
    cached(pages, pages.allocate_one(0), b"k")
    pages.check([{1: 1}])
    assert callable(harm)
    harm(pages)
    with pytest.raises(AssertionError, match=message):
        pages.check([{1: 1}])


def test_a_queue_gives_out_promised_pages_last() -> None:
    queue = EmptyPageQueue([4, 3, 2, 1])  # as a stack: the last one first
    queue.set_premapped(1, (0, 1, 0))
    queue.set_premapped(3, (0, 1, 1))
    queue.append(5)
    assert (list(queue), len(queue)) == ([2, 4, 5, 1, 3], 5)
    queue.put_first(3)
    queue.set_premapped(4, (0, 2, 0))
    queue.clear_premapped(1)
    assert [queue.pop() for _ in range(5)] == [3, 2, 5, 1, 4]
    assert len(queue) == 0


def test_room_is_made_among_cached_pages() -> None:
    """The one that was used longest ago; none, where none is cached."""
    ledger = PagePool([range(1, 4)], make_empty_pages=EmptyPageQueue)
    pages = [ledger.allocate_one(0) for _ in range(3)]
    for page in pages[:2]:
        ledger.publish(0, page, bytes([page]))
        ledger.decref(0, [page])
    ledger.make_room(0)
    assert list(ledger.size_class_of[0].empty) == pages[:1]
    assert ledger.find(0, bytes([pages[0]])) is None
    ledger.make_room(0)
    ledger.make_room(0)
    assert (list(ledger.size_class_of[0].empty), ledger.evictions) == (pages[:2], 2)
    ledger.check([{pages[2]: 1}])
