"""The pool of one memory's pages, on the device or on the host.

A page is empty, used (referenced by tables) or cached (unreferenced, but its content can be found by a key). The
interface is that of Jenga's two-level allocator (§4, §5.4): page ids are per group, and one question over all groups
asks for room. Here groups with pages of one size share a size class, as in PagedAttention, and groups of other sizes
have size classes of their own. So two of Jenga's five steps remain: an empty page, else the least recently used cached
page of the size class. No page is searched for: empty pages are a stack, and cached ones a queue in the order of their
last use."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import mul
from typing import NamedTuple, Protocol

from quire.memory.expected_pages import ExpectedPages

SCRATCH = 0  # page 0 is never allocated; in a table it stands where a page was dropped
WATERMARK_DIVISOR = 100  # 1 / 100 of a size class stays free when a sequence is admitted beside others
# Jenga's aligned eviction takes the end of a window first, and a window is all or nothing, so it can cost hits under
# heavy overload: 54.6 % instead of 59.9 % of prompts in a simulation. It is the default as in the paper.
ALIGNED_PAGES = 16  # pages of each group that are released at a time


class EmptyPages(Protocol):
    """The empty pages of a size class, in the order of allocation."""

    def append(self, page: int, /) -> None: ...
    def pop(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class CachedHits(NamedTuple):
    """Cached pages that are about to be used again: their number in each group, and, in a two-level pool, the number of
    large pages without used pages that they lie in."""

    num_pages: list[int]
    num_large: Sequence[int] = ()


NO_CACHED_HITS = CachedHits([])


class UnusedBytes(NamedTuple):
    """Bytes of pages that are not used, by the categories of Usage."""

    cached: int
    external: int
    free: int


TablePosition = tuple[int, int, int]
"""(group, slot, logical page)."""


class EmptyPageQueue:
    """Empty pages, of which the one that was released first is allocated first.

    So a page stays mapped where it was last used for as long as possible. Pages that are `premapped` at a position are
    allocated for another one only when no other page is left."""

    def __init__(self, pages: Iterable[int]) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(list(pages)))
        self.premapped: OrderedDict[int, TablePosition] = OrderedDict()

    def append(self, page: int) -> None:
        self.free[page] = None

    def pop(self) -> int:
        return self.free.popitem(last=False)[0] if self.free else self.premapped.popitem(last=False)[0]

    def set_premapped(self, page: int, position: TablePosition) -> None:
        """Record that an empty page, premapped or not, is mapped for this position."""
        self.free.pop(page, None)
        self.premapped[page] = position

    def clear_premapped(self, page: int) -> None:
        """Return a premapped page to the end of the other empty pages."""
        del self.premapped[page]
        self.free[page] = None

    def put_first(self, page: int) -> None:
        """Make this page the next one to be allocated."""
        self.premapped.pop(page, None)
        self.free[page] = None
        self.free.move_to_end(page, last=False)

    def __len__(self) -> int:
        return len(self.free) + len(self.premapped)

    def __iter__(self) -> Iterator[int]:
        yield from self.free
        yield from self.premapped


class SizeClass:
    """Pages `ids` of one size, for one or more groups.

    `order` lists the empty pages in the order of first use. `make_empty_pages` makes their container from the list in
    reverse order. The cached pages that are expected to be used again are in `spared`, and evicted last."""

    __slots__ = ("cached", "empty", "groups", "ids", "keys", "refs", "spared")

    def __init__(
        self,
        ids: range,
        order: Iterable[int] | None = None,
        make_empty_pages: Callable[[Iterable[int]], EmptyPages] = list,
    ) -> None:
        self.ids = ids
        self.groups: list[int] = []
        self.empty = make_empty_pages(list(order if order is not None else ids)[::-1])
        self.refs = [0] * max(ids.stop, 1)  # by page id
        self.keys: list[tuple[int, bytes] | None] = [None] * max(ids.stop, 1)
        self.cached: OrderedDict[int, None] = OrderedDict()  # oldest use first
        self.spared: OrderedDict[int, None] = OrderedDict()  # oldest use first

    @property
    def available(self) -> int:
        """The number of pages that can be allocated."""
        return len(self.empty) + len(self.cached) + len(self.spared)

    def remove_cached(self, page: int) -> None:
        """Remove a cached page from its queue."""
        if page in self.spared:
            del self.spared[page]
        else:
            del self.cached[page]


class PagePool(ExpectedPages):
    """The pages of groups whose ids are `ids`, one range for each group; groups with the same range share them.

    `order` and `make_empty_pages` are as in SizeClass; `order` is for pools with one size class. The pages of a group
    hold `page_tokens` tokens. `releases` counts the times that pages or slots were released: a request that was refused
    need not be tried before it changes.

    All pages of a size class are in one order of use. Of pages that were used at the same time those with the last
    tokens are evicted first, whatever their group (Jenga §5.1, balanced and aligned eviction). For experiments: without
    `balanced` a group evicts pages of its own while it has any, however old the others are; `aligned_pages` is the
    number of pages of one group that count as equally deep, and 0 means all of them."""

    def __init__(
        self, ids: Sequence[range], order: Iterable[int] | None = None,
        make_empty_pages: Callable[[Iterable[int]], EmptyPages] = list, page_tokens: Sequence[int] = (1,), *,
        balanced: bool = True,
        aligned_pages: int = ALIGNED_PAGES,
    ) -> None:  # fmt: skip
        super().__init__()
        self.page_tokens, self.balanced, self.aligned_pages = page_tokens, balanced, aligned_pages
        self.size_classes = [SizeClass(group_ids, order, make_empty_pages) for group_ids in dict.fromkeys(ids)]
        # Of each group
        self.size_class_of = [next(pool for pool in self.size_classes if pool.ids == group_ids) for group_ids in ids]
        for group, pool in enumerate(self.size_class_of):
            pool.groups.append(group)
        self.index: list[dict[bytes, int]] = [{} for _ in ids]  # key of the content -> page
        self.evicted_keys: dict[int, list[bytes]] = {}  # see `track_evictions`
        self.used = [0] * len(ids)  # pages of each group that tables name
        self.num_cached = [0] * len(ids)  # pages of each group
        self.releases = self.evictions = 0

    def can_allocate(
        self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False,
        assume_empty: bool = False,
    ) -> bool:  # fmt: skip
        """Return True if needs[g] pages of each group g can be allocated, or, where cached, used again (`cached_hits`).

        With `margin` a small part of each size class (WATERMARK_DIVISOR) must stay free. With `assume_empty` the
        question is asked of an empty pool."""
        for pool in self.size_classes:
            room = len(pool.ids) if assume_empty else pool.available
            if margin:
                room -= len(pool.ids) // WATERMARK_DIVISOR
            if sum([needs[group] for group in pool.groups]) > room:
                return False
        return True

    def reserve(self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False) -> bool:
        """Return True if `can_allocate` holds; then the allocations, in any order, cannot fail."""
        return self.can_allocate(needs, cached_hits, margin=margin)

    def find_cached_hits(self, pages: Iterable[tuple[int, int]]) -> CachedHits:
        """Return the numbers of cached pages among these (group, page), each given once."""
        counts = [0] * len(self.size_class_of)
        for group, page in pages:
            counts[group] += not self.size_class_of[group].refs[page]
        return CachedHits(counts)

    def fits_within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        """Return True if pages for `needs` take no more room than pages for `limits`."""
        return all(sum(needs[g] - limits[g] for g in pool.groups) <= 0 for pool in self.size_classes)

    def fragmentation_pages(self, group: int) -> int:
        """Return the most empty pages that a sequence which drops pages holds before and after its needed ones."""
        return 0

    def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
        """Return new private pages, which the caller has reserved. `owner`, a request, is not used here."""
        pool = self.size_class_of[group]
        empty = pool.empty
        if count == 1 or not isinstance(empty, list) or len(empty) < count:
            return [self.allocate_one(group) for _ in range(count)]
        pages: list[int] = empty[: -count - 1 : -1]
        del empty[len(empty) - count :]
        refs = pool.refs
        for page in pages:
            assert refs[page] == 0, f"page {page} is allocated but has {refs[page]} references"
            refs[page] = 1
        self.used[group] += count
        return pages

    def allocate_one(self, group: int) -> int:
        """Return a new private page, which the caller has reserved."""
        pool = self.size_class_of[group]
        if pool.empty:
            page = pool.empty.pop()
        else:
            page = self._oldest_cached(pool, group)
            pool.remove_cached(page)
            self._drop_content(pool, page)
            self.evictions += 1
        assert pool.refs[page] == 0, f"page {page} is allocated but has {pool.refs[page]} references"
        pool.refs[page] = 1
        self.used[group] += 1
        return page

    def _oldest_cached(self, size_class: SizeClass, group: int) -> int:
        """Return the cached page to evict for a group."""
        while not size_class.cached:
            self.give_up_some()
        oldest = next(iter(size_class.cached))
        if self.balanced:
            return oldest
        return next((page for page in size_class.cached if (size_class.keys[page] or (-1,))[0] == group), oldest)

    def find(self, group: int, key: bytes) -> int | None:
        """Return the page, used or cached, with the content `key`, or None."""
        return self.index[group].get(key)

    def incref(self, group: int, page: int, count: int = 1) -> None:
        """Add `count` references to a used or cached page."""
        pool = self.size_class_of[group]
        if pool.refs[page] == 0:
            pool.remove_cached(page)
            self.num_cached[group] -= 1
            self.used[group] += 1
        pool.refs[page] += count

    def incref_used(self, group: int, pages: Sequence[int]) -> None:
        """Add a reference to each of these used pages: all that a fork costs. Scratch pages are skipped."""
        refs = self.size_class_of[group].refs
        for page in pages:
            refs[page] += 1
        refs[SCRATCH] = 0

    def decref(self, group: int, pages: Sequence[int]) -> None:
        """Remove a reference from each of these pages; scratch pages are skipped.

        A page without references becomes cached if it was published, else empty. Pages are released from the last to
        the first: of pages that were used at the same time the deeper ones are evicted first."""
        pool = self.size_class_of[group]
        refs, expected, freed = pool.refs, self.expected, 0
        for page in reversed(pages):
            left = refs[page] = refs[page] - 1
            if left > 0:
                continue
            if page == SCRATCH:
                refs[SCRATCH] = 0
                continue
            assert left == 0, f"page {page} is released but has no references"
            freed += 1
            key = pool.keys[page]
            if key is None:
                pool.empty.append(page)
            else:
                (pool.spared if key in expected else pool.cached)[page] = None
                self.num_cached[group] += 1
        self.used[group] -= freed
        self.releases += freed > 0

    def decref_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Remove a reference from the pages of a sequence's tables, one for each group.

        Release them from the last tokens to the first, in turn `aligned_pages` pages of every group."""
        stops = [len(table) for table in tables]
        if len(tables) > 1 and self.aligned_pages:
            piece = self.aligned_pages * math.lcm(*self.page_tokens)
            longest = max(map(mul, stops, self.page_tokens))
            for start in range(longest // piece * piece, 0, -piece):
                for group, (stop, span) in enumerate(zip(stops, self.page_tokens)):
                    if start // span < stop:
                        self.decref(group, tables[group][start // span : stop])
                        stops[group] = start // span
        for group, stop in enumerate(stops):
            self.decref(group, tables[group][:stop])

    def remove_owner(self, owner: int) -> None:
        """Record that a request released its slot: an admission that was refused for want of it may succeed now."""
        self.releases += 1

    def ref_count(self, group: int, page: int) -> int:
        """Return the number of tables that name the page."""
        return self.size_class_of[group].refs[page]

    def is_empty(self, group: int, page: int) -> bool:
        """Return True if no table names the page and it has no key."""
        pool = self.size_class_of[group]
        return pool.refs[page] == 0 and pool.keys[page] is None

    def publish(self, group: int, page: int, key: bytes) -> None:
        """Make a complete page findable by `key`. A second page with the same content stays private."""
        keys = self.size_class_of[group].keys
        if keys[page] is None and key not in self.index[group]:
            keys[page] = (group, key)
            self.index[group][key] = page

    def _requeue(self, group: int, key: bytes) -> None:
        page, pool = self.index[group].get(key), self.size_class_of[group]
        if page is not None and not pool.refs[page]:
            pool.remove_cached(page)
            (pool.spared if (group, key) in self.expected else pool.cached)[page] = None

    def count_spared_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of spared pages; pages of group g have sizes[g] bytes."""
        return sum(len(pool.spared) * sizes[pool.groups[0]] for pool in self.size_classes)

    def count_lost_bytes(self, needs: Sequence[int], cached_hits: CachedHits, sizes: Sequence[int]) -> int:
        """Return the bytes of spared pages that are evicted if `needs` are allocated, about: `cached_hits` count as
        spared."""
        lost = 0
        for pool in self.size_classes:
            need = sum([needs[group] - cached_hits.num_pages[group] for group in pool.groups])
            lost += max(need - len(pool.empty) - len(pool.cached), 0) * sizes[pool.groups[0]]
        return lost

    def track_evictions(self, group: int) -> list[bytes]:
        """Return a list to which the keys of evicted pages of a group are appended from now on."""
        return self.evicted_keys.setdefault(group, [])

    def unpublish(self, group: int, page: int) -> None:
        """Remove the key of a used page: its content is not found any more."""
        _, key = self.size_class_of[group].keys[page] or (group, b"")
        del self.index[group][key]
        self.size_class_of[group].keys[page] = None

    def evict(self, group: int, page: int) -> None:
        """Empty a cached page."""
        pool = self.size_class_of[group]
        pool.remove_cached(page)
        self._drop_content(pool, page)
        pool.empty.append(page)

    def make_room(self, group: int) -> None:
        """Evict the cached page that would be allocated next, if there is one."""
        pool = self.size_class_of[group]
        if pool.cached or pool.spared:
            self.evict(group, self._oldest_cached(pool, group))
            self.evictions += 1

    def iter_cached(self, group: int) -> Iterator[int]:
        """Iterate over the cached pages of a group."""
        pool = self.size_class_of[group]
        return (page for page in chain(pool.cached, pool.spared) if (pool.keys[page] or (-1,))[0] == group)

    def drop_cached(self) -> int:
        """Empty every cached page, and return their number."""
        count = 0
        for pool in self.size_classes:
            count += len(pool.cached) + len(pool.spared)
            for page in chain(pool.cached, pool.spared):
                self._drop_content(pool, page)
                pool.empty.append(page)
            pool.cached.clear()
            pool.spared.clear()
        return count

    def _drop_content(self, size_class: SizeClass, page: int) -> None:
        entry = size_class.keys[page]
        assert entry is not None, f"page {page} is cached without a key"
        del self.index[entry[0]][entry[1]]
        self.num_cached[entry[0]] -= 1
        size_class.keys[page] = None
        if entry[0] in self.evicted_keys:
            self.evicted_keys[entry[0]].append(entry[1])

    @property
    def total(self) -> int:
        """The number of all pages."""
        return sum(len(pool.ids) for pool in self.size_classes)

    def count_unused_bytes(self, sizes: Sequence[int]) -> UnusedBytes:
        """Return the bytes of pages that are not used; pages of group g have sizes[g] bytes."""
        cached = sum((len(pool.cached) + len(pool.spared)) * sizes[pool.groups[0]] for pool in self.size_classes)
        return UnusedBytes(cached, 0, sum(len(pool.empty) * sizes[pool.groups[0]] for pool in self.size_classes))

    def check(self, expected_refs: Sequence[dict[int, int]]) -> None:
        """Assert that each page is in one state, that empty + cached + used = total, and that pages of group g have the
        reference counts expected_refs[g]."""
        for pool in self.size_classes:
            counts: dict[int, int] = {}
            for group in pool.groups:
                for page, count in expected_refs[group].items():
                    assert page in pool.ids, f"group {group} holds page {page}, which is not its own"
                    counts[page] = counts.get(page, 0) + count
            held = {page: refs for page, refs in enumerate(pool.refs) if refs}
            assert held == counts, "reference counts differ from the tables that name the pages"
            used = [len(expected_refs[group]) for group in pool.groups]
            assert [self.used[group] for group in pool.groups] == used, "the count of a group's pages is wrong"
            assert sum(used) == len(held), "a page is named by two groups"
            assert len(pool.empty) + len(pool.cached) + len(pool.spared) + len(held) == len(pool.ids), "pages are lost"
            assert len(set(pool.empty)) == len(pool.empty), "a page is empty twice"
            for page in pool.empty:
                assert pool.refs[page] == 0, f"page {page} is empty and used"
                assert pool.keys[page] is None, f"page {page} is empty and has a key"
            assert not pool.cached.keys() & pool.spared.keys(), "a page is cached twice"
            for page in chain(pool.cached, pool.spared):
                assert (page in pool.spared) == (pool.keys[page] in self.expected), f"page {page} is in the wrong queue"
                assert pool.refs[page] == 0, f"page {page} is cached and used"
                assert pool.keys[page] is not None, f"page {page} is cached without a key"
        for group, index in enumerate(self.index):
            for key, page in index.items():
                assert self.size_class_of[group].keys[page] == (group, key), f"page {page} is indexed under another key"
        keyed = sum(key is not None for pool in self.size_classes for key in pool.keys)
        assert sum(map(len, self.index)) == keyed, "a keyed page is not indexed"
        num_cached = [
            sum(not self.size_class_of[group].refs[page] for page in pages.values())
            for group, pages in enumerate(self.index)
        ]
        assert self.num_cached == num_cached, "the count of a group's cached pages is wrong"
