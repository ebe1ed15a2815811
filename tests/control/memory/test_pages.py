"""The page pool: a stack of empty pages, a queue of cached ones, and what `check` finds."""

from __future__ import annotations

import pytest

from quire.control.memory.pages import Pages


def cached(pages: Pages, page: int, key: bytes) -> None:
    pages.publish(0, page, key)
    pages.release(page)


def test_empty_pages_come_in_the_order_given() -> None:
    pages = Pages(4, 1, order=[3, 1, 4, 2])
    assert [pages.take(0, 1) for _ in range(4)] == [3, 1, 4, 2]
    assert pages.available == 0


def test_empty_pages_go_before_cached_ones_and_those_by_age() -> None:
    pages = Pages(3, 1)
    first, second, third = (pages.take(0, 1) for _ in range(3))
    cached(pages, second, b"b")
    cached(pages, first, b"a")
    pages.release(third)
    assert pages.take(0, 2) == third
    assert pages.evictions == 0
    assert [pages.take(0, 2), pages.take(0, 2)] == [second, first]
    assert pages.evictions == 2
    assert pages.find(0, b"a") is pages.find(0, b"b") is None


def test_a_cached_page_that_is_used_again_is_not_evicted() -> None:
    pages = Pages(2, 1)
    old, new = pages.take(0, 1), pages.take(0, 1)
    cached(pages, old, b"old")
    cached(pages, new, b"new")
    pages.share(old)
    pages.release(old)  # now the latest
    assert pages.take(0, 2) == new
    assert pages.find(0, b"old") == old


def test_a_second_page_of_the_same_content_stays_private() -> None:
    pages = Pages(2, 1)
    first, second = pages.take(0, 1), pages.take(0, 2)
    pages.publish(0, first, b"k")
    pages.publish(0, second, b"k")
    assert pages.find(0, b"k") == first
    pages.release(second)
    assert pages.empty == [second]
    pages.check()


def test_groups_do_not_find_each_others_pages() -> None:
    pages = Pages(2, 2)
    pages.publish(0, pages.take(0, 1), b"k")
    assert pages.find(1, b"k") is None


def test_dropping_the_cache_empties_unused_pages_only() -> None:
    pages = Pages(3, 1)
    used, unused = pages.take(0, 1), pages.take(0, 1)
    pages.publish(0, used, b"used")
    cached(pages, unused, b"unused")
    assert pages.drop_cached() == 1
    assert pages.find(0, b"unused") is None
    assert pages.find(0, b"used") == used
    pages.check()


def test_a_page_released_too_often() -> None:
    pages = Pages(1, 1)
    page = pages.take(0, 1)
    pages.release(page)
    with pytest.raises(AssertionError, match="no references"):
        pages.release(page)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pages: pages.empty.pop(), "lost"),
        (lambda pages: pages.empty.__setitem__(0, pages.empty[1]), "empty twice"),
        (lambda pages: pages.cached.pop(2), "lost"),
        (lambda pages: pages.keys.__setitem__(2, None), "without a key"),
        (lambda pages: pages.index[0].clear(), "not indexed"),
        (lambda pages: pages.index[0].__setitem__(b"x", 2), "under another key"),
        (lambda pages: pages.refs.__setitem__(0, 1), "scratch"),
        (lambda pages: pages.refs.__setitem__(1, 0), "lost"),
    ],
)
def test_check_finds_what_is_broken(harm: object, message: str) -> None:
    pages = Pages(5, 1)
    pages.take(0, 1)
    cached(pages, pages.take(0, 1), b"k")
    pages.check()
    assert callable(harm)
    harm(pages)
    with pytest.raises(AssertionError, match=message):
        pages.check()
