"""The two-level ledger of one memory's pages (Jenga §4, §5.4): large pages, any of which may be cut into the small
pages of any group. The interface is Ledger's; it knows neither tables nor what a group keeps.

A small page is empty, cached (the paper's "evictable") or used. A large page is free, active while one of its small
pages is used, or reclaimable: none is used and some are cached. The paper calls it evictable only if all are, which
would lose those that are in part empty for good. A page of group g with id i lies in large page i // ratios[g]; large
page 0 is scratch.

A need is feasible exactly if there are large pages for what the groups' small pages in active large pages can't serve.
The paper's five steps alone don't find every such assignment: a step that takes a large page may starve another group.
So `reserve` counts the large pages that no group needs, and only those are taken where small ones would do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from quire.memory.answers import LargePageStats
from quire.memory.jenga.partial_pages import PartialPages
from quire.memory.page_pool import NO_CACHED_HITS, SCRATCH, WATERMARK_DIVISOR, CachedHits, UnusedBytes

if TYPE_CHECKING:
    pass

EMPTY, CACHED = 0, -1
"""References of small pages that aren't used."""


def count_unused_bytes(pool: TwoLevelPagePool, sizes: Sequence[int]) -> UnusedBytes:
    """As Ledger.space. What is empty in active large pages can be had by their group alone: that is external."""
    empty = [0] * len(sizes)  # bytes of empty pages of reclaimable large pages
    for home in pool.reclaimable:
        empty[pool.bound_group[home]] += pool.empty_small[home] * sizes[pool.bound_group[home]]
    cached = [len(found) * size for found, size in zip(pool.cached, sizes)]
    bound = [
        size * ratio * (active + idle)
        for size, ratio, active, idle in zip(sizes, pool.small_pages_per_large, pool.num_active, pool.num_reclaimable)
    ]
    unused = sum(bound) - sum(used * size for used, size in zip(pool.used, sizes))
    large = sizes[0] * pool.small_pages_per_large[0]
    return UnusedBytes(sum(cached), unused - sum(cached) - sum(empty), large * len(pool.free_large) + sum(empty))


def iter_coldest(pool: TwoLevelPagePool) -> Iterator[tuple[int, int]]:
    """The large pages that could leave the device, the one used longest ago first, and their groups (§8: one size to
    offload, and an order)."""
    return ((home, pool.bound_group[home]) for home in pool.reclaimable)


def iter_cached(pool: TwoLevelPagePool, group: int) -> Iterator[int]:
    """As Ledger.cached_of."""
    return iter(pool.cached[group])


def get_stats(pool: TwoLevelPagePool) -> LargePageStats:
    """For an allocator's statistics."""
    evicted = pool.evicted_large, pool.evicted_small
    return LargePageStats(
        len(pool.free_large), list(pool.num_active), list(pool.num_reclaimable), *evicted, pool.rebound
    )


def drop_cached(pool: TwoLevelPagePool) -> int:
    """Empty every cached page. Returns how many there were."""
    count = sum(map(len, pool.cached))
    for group, cached in enumerate(pool.cached):
        for page in list(cached):
            pool.evict(group, page)
    return count


def check(pool: TwoLevelPagePool, expected_refs: Sequence[dict[int, int]]) -> None:
    """As Ledger.check: every small page is in one state, what is kept about large pages is what their small ones say,
    and each group's pages have as many references as `expected_refs` says."""
    kinds = dict(pool.reclaimable)
    assert len(set(pool.free_large)) == len(pool.free_large), "a large page is free twice"
    assert not kinds.keys() & set(pool.free_large), "a large page is free and reclaimable"
    assert not any(pool.used_small[home] or pool.empty_small[home] for home in pool.free_large), (
        "a free large page isn't free"
    )
    owned: dict[int, int] = dict.fromkeys([*pool.free_large, *kinds], 0)
    for group, (refs, keys, ratio) in enumerate(zip(pool.refs, pool.keys, pool.small_pages_per_large)):
        held = {page: count for page, count in enumerate(refs) if count > 0}
        assert held == expected_refs[group], "reference counts differ from the tables that name the pages"
        assert all(page >= ratio for page in held), f"group {group} holds a page of the scratch"
        assert pool.used[group] == len(held), "the count of a group's pages is wrong"
        found = {page for page, count in enumerate(refs) if count == CACHED}
        assert found == set(pool.cached[group]), "a page is cached or isn't, as one looks at it"
        assert min(refs) >= CACHED, "a page has fewer references than none"
        for page, key in enumerate(keys):
            assert key is not None or refs[page] != CACHED, f"page {page} is cached without a key"
            assert key is None or refs[page] != EMPTY, f"page {page} is empty and has a key"
        keyed = {key: page for page, key in enumerate(keys) if key is not None}
        assert keyed == pool.index[group], "the index differs from the pages' keys"
        assert len(keyed) == sum(key is not None for key in keys), "two pages have the same key"
        _check_large_pages(pool, group, held.keys() | found, owned)
    assert len(owned) == pool.num_large, "large pages are lost"
    assert sum(pool.num_reclaimable) == len(pool.reclaimable), "a large page is reclaimable without a cached page"


def _check_large_pages(pool: TwoLevelPagePool, group: int, live: set[int], owned: dict[int, int]) -> None:
    refs, ratio = pool.refs[group], pool.small_pages_per_large[group]
    active = idle = 0
    holed = set()
    for home in {page // ratio for page in live}:
        states = refs[home * ratio : (home + 1) * ratio]
        assert pool.bound_group[home] == group, f"large page {home} is held by two groups"
        assert pool.used_small[home] == sum(count > 0 for count in states), f"used pages of {home} are miscounted"
        assert pool.empty_small[home] == states.count(EMPTY), f"empty pages of {home} are miscounted"
        if pool.used_small[home]:
            assert home not in owned, f"large page {home} is active, and free or another group's"
            owned[home], active = 1, active + 1
            if pool.empty_small[home]:
                holed.add(home)
        else:
            assert home in pool.reclaimable, f"large page {home} is reclaimable and not in the queue"
            idle += 1
    assert (pool.num_active[group], pool.num_reclaimable[group]) == (active, idle), (
        f"large pages of group {group} are miscounted"
    )
    partial = pool.partial[group]
    assert sorted(home for _, home in partial) == sorted(holed), "empty pages aren't found, or are where there are none"
    for owner, home in partial:
        assert owner is None or owner in partial.live_owners, "what a request left empty is lost"
        assert partial.owner_of[home] == owner, f"large page {home} is found under another owner"


LARGE_ID_BITS = 32  # bits of a large page's number
LARGE_ID_MASK = (1 << LARGE_ID_BITS) - 1
ASSOCIATIONS = ("paper", "bulk", "none")
"""Whose small pages share a large page. "paper": one request's, as far as possible (§4.3). "bulk": of what a request
takes at once, as much as fills large pages; the rest of all requests goes together. "none": all go together."""


class TwoLevelPagePool:
    """`num_large` large pages; one of them is `small_pages_per_large[g]` pages of group g, whose pages hold
    `page_tokens[g]` tokens (default: all equally many). `association` says whose pages lie together, see
    ASSOCIATIONS."""

    def __init__(
        self,
        small_pages_per_large: Sequence[int],
        num_large: int,
        association: str = "bulk",
        page_tokens: Sequence[int] | None = None,
    ) -> None:
        assert association in ASSOCIATIONS, f"association is {association!r}, not one of {ASSOCIATIONS}"
        self.small_pages_per_large, self.num_large, self.association = (
            list(small_pages_per_large),
            num_large,
            association,
        )
        self.page_tokens = list(page_tokens or [1] * len(small_pages_per_large))
        groups = range(len(small_pages_per_large))
        self.free_large = list(range(num_large, 0, -1))  # a stack
        self.bound_group = [-1] * (num_large + 1)  # by large page: the group that it is or was bound to
        self.used_small = [0] * (num_large + 1)  # its used small pages
        self.empty_small = [0] * (num_large + 1)  # its empty ones; 0 of a free one
        self.reclaimable: OrderedDict[int, None] = OrderedDict()  # of all groups, oldest use first
        self.refs = [
            [EMPTY] * ((num_large + 1) * ratio) for ratio in small_pages_per_large
        ]  # by small page: references, or EMPTY, CACHED
        self.keys: list[list[bytes | None]] = [[None] * len(refs) for refs in self.refs]
        # Oldest use first; where a page is a large page, those tell the order, and a dict is faster.
        self.cached: list[dict[int, None]] = [OrderedDict() if ratio > 1 else {} for ratio in small_pages_per_large]
        self.index: list[dict[bytes, int]] = [{} for _ in groups]  # content -> small page
        self.evicted_keys: dict[int, list[bytes]] = {}  # as in Ledger
        self.partial = [PartialPages(num_large + 1) for _ in groups]  # active large pages with empty small ones
        self.used = [0] * len(small_pages_per_large)
        self.num_active, self.num_reclaimable = (
            [0] * len(small_pages_per_large),
            [0] * len(small_pages_per_large),
        )  # large pages a group; idle: reclaimable
        self.spare_large = 0  # large pages that may be taken where small ones would do
        self.releases = self.evictions = 0
        self.evicted_large = self.evicted_small = self.rebound = 0

    def can_allocate(
        self,
        needs: Sequence[int],
        cached_hits: CachedHits = NO_CACHED_HITS,
        *,
        margin: bool = False,
        assume_empty: bool = False,
    ) -> bool:
        """As Ledger.affords. `cached_hits` are those among the needs that are cached now."""
        return self._count_spare_large(needs, cached_hits, margin, assume_empty) >= 0

    def reserve(self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False) -> bool:
        """Whether that is so; if it is, taking this much, in any order, will succeed."""
        left = self._count_spare_large(needs, cached_hits, margin, assume_empty=False)
        self.spare_large = max(left, 0)
        return left >= 0

    def _count_spare_large(
        self, needs: Sequence[int], cached_hits: CachedHits, margin: bool, assume_empty: bool
    ) -> int:
        """Large pages that are left over; negative: that are missing."""
        left = self.num_large if assume_empty else len(self.free_large) + len(self.reclaimable)
        if margin:
            left -= self.num_large // WATERMARK_DIVISOR
        for group, (need, ratio) in enumerate(zip(needs, self.small_pages_per_large)):
            if not assume_empty:
                need -= ratio * self.num_active[group] - self.used[group]
            if cached_hits.num_large:  # their large pages become active, with all that is in them
                left -= cached_hits.num_large[group]
                need -= ratio * cached_hits.num_large[group]
            if need > 0:
                left -= -(-need // ratio)
        return left

    def find_cached_hits(self, pages: Iterable[tuple[int, int]]) -> CachedHits:
        """Of these pages (group, page), each named once, those that are cached."""
        counts = [0] * len(self.small_pages_per_large)
        large: list[set[int]] = [set() for _ in self.small_pages_per_large]
        for group, page in pages:
            if self.refs[group][page] == CACHED:
                counts[group] += 1
                home = page // self.small_pages_per_large[group]
                if not self.used_small[home]:
                    large[group].add(home)
        return CachedHits(counts, list(map(len, large)))

    def fits_within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        """Whether pages for `needs` take no more large pages than pages for `limits`, whatever else they share with."""
        return (
            sum([(limit - need) // ratio for ratio, need, limit in zip(self.small_pages_per_large, needs, limits)]) >= 0
        )

    def fragmentation_pages(self, group: int) -> int:
        """As Ledger.edges: the rest of the first large page, and that of the last."""
        return 2 * (self.small_pages_per_large[group] - 1)

    def find(self, group: int, key: bytes) -> int | None:
        """The page that holds the content `key`, used or cached."""
        return self.index[group].get(key)

    def ref_count(self, group: int, page: int) -> int:
        """How many tables name the page."""
        return max(self.refs[group][page], 0)

    def is_shared(self, group: int, page: int) -> bool:
        """Several tables name the page."""
        return self.refs[group][page] > 1

    def is_empty(self, group: int, page: int) -> bool:
        """Nothing names the page and its content isn't kept."""
        return self.refs[group][page] == EMPTY

    # Taking

    def allocate_one(self, group: int, owner: int | None = None) -> int:
        """A private page. The caller has reserved it."""
        return self.allocate(group, 1, owner)[0]

    def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
        """Private pages, for a request `owner`. The caller has reserved them. By the steps of §5.4: empty pages that
        are associated with the request, free large pages, reclaimable ones, any empty pages, cached ones one by one."""
        ratio, partial, alone = self.small_pages_per_large[group], self.partial[group], self.association == "paper"
        if owner is not None:
            partial.live_owners.add(owner)
        lacking = count - ratio * self.num_active[group] + self.used[group]
        least = -(-lacking // ratio) if lacking > 0 else 0
        budget = most = least + self.spare_large  # large pages
        pages: list[int] = []
        if self.association == "bulk" and count >= ratio:
            whole = min(count // ratio, budget)
            pages = self._allocate_large(group, whole, whole * ratio, owner)
            budget -= whole
        if len(pages) < count:
            for whose in (owner, None) if not alone else (owner,):
                while len(pages) < count and (home := partial.first_of(whose)):
                    self._fill_partial(group, home, pages, count)
        if len(pages) < count and budget:
            large = min(-(-(count - len(pages)) // ratio), budget)
            small = min(large * ratio, count - len(pages))
            pages += self._allocate_large(group, large, small, owner if alone else None)
            budget -= large
        while len(pages) < count and (home := partial.first_of_any()):
            self._fill_partial(group, home, pages, count)
        self.spare_large -= max(most - budget - least, 0)
        if len(pages) < count:
            self._evict_small(group, count - len(pages), pages)
        return pages

    def _allocate_large(self, group: int, large: int, small: int, owner: int | None) -> list[int]:
        """Cut so many free or reclaimable large pages into pages of a group, and take so many of these."""
        lacking = large - len(self.free_large)
        assert lacking <= len(self.reclaimable), f"no large page is left for group {group}: what is taken is reserved"
        for _ in range(lacking):
            self._evict_large()
        ratio, refs, busy, kind = self.small_pages_per_large[group], self.refs[group], self.used_small, self.bound_group
        homes = self.free_large[: -large - 1 : -1]
        del self.free_large[len(self.free_large) - large :]
        self.num_active[group] += large
        self.used[group] += small
        for home in homes:
            busy[home] = ratio
            if kind[home] != group:
                self.rebound += kind[home] >= 0
                kind[home] = group
        if ratio == 1:
            for home in homes:
                refs[home] = 1
            return homes
        pages: list[int] = []
        ones, owners = [1] * ratio, self.partial[group].owner_of
        for home in homes:
            owners[home] = owner
            first = home * ratio
            refs[first : first + ratio] = ones
            pages += range(first, first + ratio)
        if len(pages) > small:  # the last one in part
            over = len(pages) - small
            refs[pages[small] : pages[small] + over] = [EMPTY] * over
            busy[home], self.empty_small[home] = ratio - over, over
            self.partial[group].add(home)
            del pages[small:]
        return pages

    def _fill_partial(self, group: int, large_page: int, pages: list[int], count: int) -> None:
        """Take empty pages of an active large page, until there are `num_large`."""
        refs, page = self.refs[group], large_page * self.small_pages_per_large[group]
        taken = min(self.empty_small[large_page], count - len(pages))
        for _ in range(taken):
            page = refs.index(EMPTY, page)
            refs[page] = 1
            pages.append(page)
        self.used[group] += taken
        self.used_small[large_page] += taken
        self.empty_small[large_page] -= taken
        if not self.empty_small[large_page]:
            self.partial[group].remove(large_page)

    def _evict_small(self, group: int, count: int, pages: list[int]) -> None:
        """Take the cached pages of active large pages that were used longest ago. Others are passed over: their large
        pages are for another group. No more of those are left then than that group is about to take."""
        ratio, busy = self.small_pages_per_large[group], self.used_small
        victims: list[int] = []
        for page in self.cached[group]:
            if busy[page // ratio]:
                victims.append(page)
                if len(victims) == count:
                    break
        assert len(victims) == count, f"no page is left for group {group}: what is taken is reserved"
        for page in victims:
            self._drop_content(group, page)
            self.refs[group][page] = 1
            busy[page // ratio] += 1
        self.used[group] += count
        self.evicted_small += count
        self.evictions += count
        pages += victims

    def _evict_large(self) -> None:
        """Free the reclaimable large page that was used longest ago."""
        home, _ = self.reclaimable.popitem(last=False)
        group = self.bound_group[home]
        ratio, refs = self.small_pages_per_large[group], self.refs[group]
        for page in range(home * ratio, home * ratio + ratio):
            if refs[page] == CACHED:
                self._drop_content(group, page)
                refs[page] = EMPTY
                self.evictions += 1
        self.num_reclaimable[group] -= 1
        self._free_large(home)
        self.evicted_large += 1

    def _drop_content(self, group: int, page: int) -> None:
        """A cached page's content is given up."""
        key = self.keys[group][page]
        assert key is not None, f"page {page} is cached without a key"
        del self.cached[group][page]
        self.unpublish(group, page)
        if group in self.evicted_keys:
            self.evicted_keys[group].append(key)

    # Sharing and releasing

    def incref(self, group: int, page: int, count: int = 1) -> None:
        """So many more tables name the page."""
        refs = self.refs[group]
        if refs[page] > 0:
            refs[page] += count
            return
        assert refs[page] == CACHED, f"page {page} is shared but empty"
        del self.cached[group][page]
        refs[page] = count
        self.used[group] += 1
        home = page // self.small_pages_per_large[group]
        self.used_small[home] += 1
        if self.used_small[home] == 1:
            del self.reclaimable[home]
            self.num_reclaimable[group] -= 1
            self.num_active[group] += 1
            if self.empty_small[home]:
                self.partial[group].add(home)

    def incref_used(self, group: int, pages: Sequence[int]) -> None:
        """One more table names these pages, all of them used (scratch is passed over)."""
        refs = self.refs[group]
        for page in pages:
            refs[page] += 1
        refs[SCRATCH] = EMPTY

    def decref(self, group: int, pages: Sequence[int]) -> None:
        """As Ledger.release. A large page of which nothing is used any more is free or reclaimable."""
        for code in self._decref(group, pages):
            self.reclaimable[code & LARGE_ID_MASK] = None

    def decref_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """One sequence fewer names the pages of its tables, one a group. Of what was used equally long ago, the deeper
        is evicted first, whatever its group (§5.1, aligned)."""
        found = [self._decref(group, pages) for group, pages in enumerate(tables)]
        reclaimable = self.reclaimable
        for code in sorted([code for codes in found for code in codes], reverse=True):
            reclaimable[code & LARGE_ID_MASK] = None

    def _decref(self, group: int, pages: Sequence[int]) -> list[int]:
        """Release them. Returns the large pages that are to become reclaimable, as numbers: of the tokens before their
        first page, and which ones."""
        refs, keys, cached, ratio = (
            self.refs[group],
            self.keys[group],
            self.cached[group],
            self.small_pages_per_large[group],
        )
        busy, holes, before, empty = self.used_small, self.empty_small, len(cached), 0
        touched: dict[int, int] = {}
        for at, page in zip(range(len(pages) - 1, -1, -1), reversed(pages)):
            left = refs[page] = refs[page] - 1
            if left:
                assert left > 0 or page == SCRATCH, f"page {page} is released but has no references"
                if page == SCRATCH:
                    refs[SCRATCH] = EMPTY
                continue
            home = page // ratio
            touched[home] = at
            busy[home] -= 1
            if keys[page] is None:
                holes[home] += 1
                empty += 1
            else:
                refs[page] = CACHED
                cached[page] = None
        self.used[group] -= len(cached) - before + empty
        self.releases += len(touched) > 0
        resting: list[int] = []
        emptied, partial, span = 0, self.partial[group], self.page_tokens[group]
        for home, first in touched.items():
            if busy[home]:
                if holes[home]:
                    partial.add(home)
                continue
            emptied += 1
            if ratio > 1:
                partial.remove(home)
            if holes[home] == ratio:
                holes[home] = 0
                self.free_large.append(home)
            else:
                resting.append(first * span << LARGE_ID_BITS | home)
        self.num_active[group] -= emptied
        self.num_reclaimable[group] += len(resting)
        return resting

    def _free_large(self, large_page: int) -> None:
        self.empty_small[large_page] = 0
        self.free_large.append(large_page)

    def remove_owner(self, owner: int) -> None:
        """A request has left: what it leaves empty in its large pages is everybody's."""
        for partial in self.partial:
            partial.remove_owner(owner)

    def publish(self, group: int, page: int, key: bytes) -> None:
        """The page's content is complete and may be found by `key`. A second page of the same content stays private,
        unless nobody uses the first one: that would be evicted first, and take the name with it."""
        known = self.index[group].get(key)
        if self.keys[group][page] is not None or (known is not None and self.refs[group][known] > 0):
            return
        if known is not None:
            self.evict(group, known)
        self.keys[group][page] = key
        self.index[group][key] = page

    def track_evictions(self, group: int) -> list[bytes]:
        """As Ledger.watch."""
        return self.evicted_keys.setdefault(group, [])

    def unpublish(self, group: int, page: int) -> None:
        """As Ledger.withdraw."""
        del self.index[group][self.keys[group][page] or b""]
        self.keys[group][page] = None

    def evict(self, group: int, page: int) -> None:
        """Empty a cached page."""
        self._drop_content(group, page)
        self.refs[group][page] = EMPTY
        home = page // self.small_pages_per_large[group]
        self.empty_small[home] += 1
        if self.used_small[home]:
            self.partial[group].add(home)
        elif self.empty_small[home] == self.small_pages_per_large[group]:
            del self.reclaimable[home]
            self.num_reclaimable[group] -= 1
            self._free_large(home)

    def make_room(self, group: int) -> None:
        """One empty page more, if a cached one can be had for it."""
        if self.reclaimable:
            self._evict_large()
        elif self.cached[group]:
            self.evict(group, next(iter(self.cached[group])))
            self.evictions += 1

    @property
    def total(self) -> int:
        """The most pages that it can hold."""
        return self.num_large * max(self.small_pages_per_large)

    @property
    def num_cached(self) -> list[int]:
        """As in Ledger."""
        return list(map(len, self.cached))

    count_unused_bytes = count_unused_bytes
    get_stats = get_stats
    iter_cached = iter_cached
    iter_coldest = iter_coldest
    drop_cached = drop_cached
    check = check
