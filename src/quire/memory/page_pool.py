"""The ledger of one memory's pages, on the device or on the host: empty, used (referenced by tables) or cached
(unreferenced, but content worth keeping).

The interface is that of Jenga's two-level allocator (§4, §5.4): pages have ids of their group, and shortage is one
question over all groups. Here groups with pages of one size share a pool, the case that PagedAttention treats, and
groups of other sizes have pools of their own; so of the five steps two remain: an empty page, else the pool's least
recently used cached one. No page is ever searched for: empty pages are a stack, cached ones a queue in the order of
their last use.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import mul
from typing import NamedTuple, Protocol

SCRATCH = 0
WATERMARK_DIVISOR = 100  # a hundredth of a pool stays free when a sequence joins others
ALIGNED_PAGES = 16  # pages that are released of each group at a time


class EmptyPages(Protocol):
    """The empty pages of a pool, in the order in which they are given out."""

    def append(self, page: int, /) -> None: ...
    def pop(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class CachedHits(NamedTuple):
    """Cached pages that are about to be used again: how many of each group, and, of two levels, in how many large pages
    of which nothing is used now."""

    num_pages: list[int]
    num_large: Sequence[int] = ()


NO_CACHED_HITS = CachedHits([])


class UnusedBytes(NamedTuple):
    """Bytes of pages that aren't used: as in Usage."""

    cached: int
    external: int
    free: int


TablePosition = tuple[int, int, int]
"""A group, a slot, and which of its logical pages."""


class EmptyPageQueue:
    """Empty pages, of which the one that came back first is given out first: so what another place still remembers of a
    page lasts as long as it can. Pages that are `premapped` to a place are given out elsewhere only when no other one
    is left."""

    def __init__(self, pages: Iterable[int]) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(list(pages)))
        self.premapped: OrderedDict[int, TablePosition] = OrderedDict()

    def append(self, page: int) -> None:
        self.free[page] = None

    def pop(self) -> int:
        return self.free.popitem(last=False)[0] if self.free else self.premapped.popitem(last=False)[0]

    def set_premapped(self, page: int, position: TablePosition) -> None:
        """An empty page, promised or not, is for this place."""
        self.free.pop(page, None)
        self.premapped[page] = position

    def clear_premapped(self, page: int) -> None:
        """A promise is no more: the page is like all others, the last of them."""
        del self.premapped[page]
        self.free[page] = None

    def put_first(self, page: int) -> None:
        """This page of them is given out next."""
        self.premapped.pop(page, None)
        self.free[page] = None
        self.free.move_to_end(page, last=False)

    def __len__(self) -> int:
        return len(self.free) + len(self.premapped)

    def __iter__(self) -> Iterator[int]:
        yield from self.free
        yield from self.premapped


class SizeClass:
    """Pages `ids` of one size, for some groups. `order` gives the empty pages in the order of first use;
    `make_empty_pages` makes what keeps them, of the last one first."""

    __slots__ = ("cached", "empty", "groups", "ids", "keys", "refs")

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

    @property
    def available(self) -> int:
        """Pages that can be given out."""
        return len(self.empty) + len(self.cached)


class PagePool:
    """The pages of groups whose ids are `ids`, one range a group; groups with the same range share them. `order` and
    `make_empty_pages` as in Pool, the former where there is one. `releases` counts the times that something came back:
    what was refused once needn't be tried before.

    The pages of a group hold `page_tokens` tokens. All of a pool have one clock, and of pages that were used equally
    long ago those with the last tokens are evicted first, whatever their group (Jenga §5.1, balanced and aligned
    eviction). For experiments: not `balanced`, a group that is short evicts pages of its own as long as it has any,
    however old others are; `aligned_pages` pages of one group are taken to be equally deep, and with 0 all of them."""

    def __init__(
        self, ids: Sequence[range], order: Iterable[int] | None = None,
        make_empty_pages: Callable[[Iterable[int]], EmptyPages] = list, page_tokens: Sequence[int] = (1,), *,
        balanced: bool = True,
        aligned_pages: int = ALIGNED_PAGES,
    ) -> None:  # fmt: skip
        self.page_tokens, self.balanced, self.aligned_pages = page_tokens, balanced, aligned_pages
        self.size_classes = [SizeClass(own, order, make_empty_pages) for own in dict.fromkeys(ids)]
        self.size_class_of = [
            next(pool for pool in self.size_classes if pool.ids == own) for own in ids
        ]  # each group's pool
        for group, pool in enumerate(self.size_class_of):
            pool.groups.append(group)
        self.index: list[dict[bytes, int]] = [{} for _ in ids]  # content -> page
        self.evicted_keys: dict[int, list[bytes]] = {}  # content that was given up, of groups where somebody asks
        self.used = [0] * len(ids)  # pages of each group that tables name
        self.num_cached = [0] * len(ids)  # of each group
        self.releases = self.evictions = 0

    def can_allocate(
        self,
        needs: Sequence[int],
        cached_hits: CachedHits = NO_CACHED_HITS,
        *,
        margin: bool = False,
        assume_empty: bool = False,
    ) -> bool:
        """Could needs[g] pages be given to each group g, or, of cached pages, be used again (`cached_hits` of them)?
        With `margin` a little stays free. `assume_empty`: were the memory otherwise empty."""
        for pool in self.size_classes:
            room = len(pool.ids) if assume_empty else pool.available
            if margin:
                room -= len(pool.ids) // WATERMARK_DIVISOR
            if sum([needs[group] for group in pool.groups]) > room:
                return False
        return True

    def reserve(self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False) -> bool:
        """Whether that is so; if it is, taking this much, in any order, will succeed."""
        return self.can_allocate(needs, cached_hits, margin=margin)

    def find_cached_hits(self, pages: Iterable[tuple[int, int]]) -> CachedHits:
        """Of these pages (group, page), each named once, those that are cached and used by nobody."""
        counts = [0] * len(self.size_class_of)
        for group, page in pages:
            counts[group] += not self.size_class_of[group].refs[page]
        return CachedHits(counts)

    def fits_within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        """Whether pages for `needs` take no more room than pages for `limits`."""
        return all(sum(needs[g] - limits[g] for g in pool.groups) <= 0 for pool in self.size_classes)

    def fragmentation_pages(self, group: int) -> int:
        """Pages that a sequence which drops pages may hold empty, before and behind those it needs."""
        return 0

    def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
        """Private pages, for a request `owner`; who that is makes no difference here. The caller has reserved them."""
        pool = self.size_class_of[group]
        empty = pool.empty
        if count == 1 or not isinstance(empty, list) or len(empty) < count:
            return [self.allocate_one(group) for _ in range(count)]
        pages: list[int] = empty[: -count - 1 : -1]
        del empty[len(empty) - count :]
        refs = pool.refs
        for page in pages:
            assert refs[page] == 0, f"page {page} is given out but has {refs[page]} references"
            refs[page] = 1
        self.used[group] += count
        return pages

    def allocate_one(self, group: int, owner: int | None = None) -> int:
        """A private page. The caller has reserved it."""
        pool = self.size_class_of[group]
        if pool.empty:
            page = pool.empty.pop()
        else:
            page = self._oldest_cached(pool, group)
            del pool.cached[page]
            self._drop_content(pool, page)
            self.evictions += 1
        assert pool.refs[page] == 0, f"page {page} is given out but has {pool.refs[page]} references"
        pool.refs[page] = 1
        self.used[group] += 1
        return page

    def _oldest_cached(self, size_class: SizeClass, group: int) -> int:
        """The cached page that is evicted for a group."""
        oldest = next(iter(size_class.cached))
        if self.balanced:
            return oldest
        return next((page for page in size_class.cached if (size_class.keys[page] or (-1,))[0] == group), oldest)

    def find(self, group: int, key: bytes) -> int | None:
        """The page that holds the content `key`, used or cached."""
        return self.index[group].get(key)

    def incref(self, group: int, page: int, count: int = 1) -> None:
        """So many more tables name the page."""
        pool = self.size_class_of[group]
        if pool.refs[page] == 0:
            del pool.cached[page]
            self.num_cached[group] -= 1
            self.used[group] += 1
        pool.refs[page] += count

    def incref_used(self, group: int, pages: Sequence[int]) -> None:
        """One more table names these pages, all of them used; a fork's whole cost (scratch is passed over)."""
        refs = self.size_class_of[group].refs
        for page in pages:
            refs[page] += 1
        refs[SCRATCH] = 0

    def decref(self, group: int, pages: Sequence[int]) -> None:
        """One table fewer names these pages (scratch is passed over); the last one leaves a page cached if it was
        published, else empty. From the last to the first: of pages that were used equally long ago, the deeper ones are
        evicted first."""
        pool = self.size_class_of[group]
        refs, freed = pool.refs, 0
        for page in reversed(pages):
            left = refs[page] = refs[page] - 1
            if left > 0:
                continue
            if page == SCRATCH:
                refs[SCRATCH] = 0
                continue
            assert left == 0, f"page {page} is released but has no references"
            freed += 1
            if pool.keys[page] is None:
                pool.empty.append(page)
            else:
                pool.cached[page] = None
                self.num_cached[group] += 1
        self.used[group] -= freed
        self.releases += freed > 0

    def decref_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """One sequence fewer names the pages of its tables, one a group: from its last tokens to its first, a piece of
        every group after the other."""
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
        """A request has left: nothing, here."""

    def ref_count(self, group: int, page: int) -> int:
        """How many tables name the page."""
        return self.size_class_of[group].refs[page]

    def is_shared(self, group: int, page: int) -> bool:
        """Several tables name the page."""
        return self.size_class_of[group].refs[page] > 1

    def is_empty(self, group: int, page: int) -> bool:
        """Nothing names the page and its content isn't kept."""
        pool = self.size_class_of[group]
        return pool.refs[page] == 0 and pool.keys[page] is None

    def publish(self, group: int, page: int, key: bytes) -> None:
        """The page's content is complete and may be found by `key`. A second page of the same content stays private."""
        keys = self.size_class_of[group].keys
        if keys[page] is None and key not in self.index[group]:
            keys[page] = (group, key)
            self.index[group][key] = page

    def track_evictions(self, group: int) -> list[bytes]:
        """A list to which the keys of a group's pages are added from now on, when their content is given up."""
        return self.evicted_keys.setdefault(group, [])

    def unpublish(self, group: int, page: int) -> None:
        """The content of a page that is used isn't found any more."""
        _, key = self.size_class_of[group].keys[page] or (group, b"")
        del self.index[group][key]
        self.size_class_of[group].keys[page] = None

    def evict(self, group: int, page: int) -> None:
        """Empty a cached page."""
        pool = self.size_class_of[group]
        del pool.cached[page]
        self._drop_content(pool, page)
        pool.empty.append(page)

    def make_room(self, group: int) -> None:
        """One empty page more, if a cached one can be had for it: the one that would be given out next."""
        pool = self.size_class_of[group]
        if pool.cached:
            self.evict(group, self._oldest_cached(pool, group))
            self.evictions += 1

    def iter_cached(self, group: int) -> Iterator[int]:
        """The cached pages of a group."""
        pool = self.size_class_of[group]
        return (page for page in pool.cached if (pool.keys[page] or (-1,))[0] == group)

    def drop_cached(self) -> int:
        """Empty every cached page. Returns how many there were."""
        count = 0
        for pool in self.size_classes:
            count += len(pool.cached)
            for page in pool.cached:
                self._drop_content(pool, page)
                pool.empty.append(page)
            pool.cached.clear()
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
        """All pages."""
        return sum(len(pool.ids) for pool in self.size_classes)

    def count_unused_bytes(self, sizes: Sequence[int]) -> UnusedBytes:
        """The bytes of its pages that aren't used; groups' pages have `sizes`."""
        cached = sum(len(pool.cached) * sizes[pool.groups[0]] for pool in self.size_classes)
        return UnusedBytes(cached, 0, sum(len(pool.empty) * sizes[pool.groups[0]] for pool in self.size_classes))

    def check(self, expected_refs: Sequence[dict[int, int]]) -> None:
        """Assert conservation: empty + cached + used = total, each page in one state; and that each group's pages have
        as many references as `expected_refs` says that tables name them."""
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
            assert len(pool.empty) + len(pool.cached) + len(held) == len(pool.ids), "pages are lost"
            assert len(set(pool.empty)) == len(pool.empty), "a page is empty twice"
            for page in pool.empty:
                assert pool.refs[page] == 0, f"page {page} is empty and used"
                assert pool.keys[page] is None, f"page {page} is empty and has a key"
            for page in pool.cached:
                assert pool.refs[page] == 0, f"page {page} is cached and used"
                assert pool.keys[page] is not None, f"page {page} is cached without a key"
        for group, index in enumerate(self.index):
            for key, page in index.items():
                assert self.size_class_of[group].keys[page] == (group, key), f"page {page} is indexed under another key"
        keyed = sum(key is not None for pool in self.size_classes for key in pool.keys)
        assert sum(map(len, self.index)) == keyed, "a keyed page is not indexed"
        resting = [
            sum(not self.size_class_of[group].refs[page] for page in pages.values())
            for group, pages in enumerate(self.index)
        ]
        assert self.num_cached == resting, "the count of a group's cached pages is wrong"
