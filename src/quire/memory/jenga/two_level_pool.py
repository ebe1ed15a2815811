"""The two-level pool of one memory's pages (Jenga §4, §5.4).

Any large page may be divided into the small pages of any group. The interface is that of PagePool. A small page is
empty, cached (the paper's "evictable") or used. A large page is free, active while one of its small pages is used, or
reclaimable: no page is used and some are cached. The paper calls it evictable only if all are cached, which would lose
partly empty ones for good. Page i of group g lies in large page i // small_pages_per_large[g]; large page 0 is scratch.

A need is feasible exactly if there are enough large pages for what the groups' small pages in active large pages cannot
serve. The paper's five steps alone do not find every such assignment: a step that takes a large page may starve another
group. So `reserve` counts the large pages that no group needs, and only those are taken where small pages would do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from quire.memory.expected_pages import ExpectedPages
from quire.memory.page_pool import NO_CACHED_HITS, SCRATCH, WATERMARK_DIVISOR, CachedHits, UnusedBytes

EMPTY, CACHED = 0, -1
"""Reference counts of small pages that are not used."""
LARGE_ID_BITS = 32  # of a large page's number in the result of `_decref`
LARGE_ID_MASK = (1 << LARGE_ID_BITS) - 1
ASSOCIATIONS = ("paper", "bulk", "none")
"""Which small pages share a large page. "paper": those of one request, as far as possible (§4.3). "bulk": of what a
request allocates at once, as much as fills large pages; the rest of all requests is mixed. "none": all are mixed."""


class PartialPages:
    """The large pages of one group that are partly used, by the request that they are associated with: `owner_of`, by
    the number of the large page. While a request lives, the empty small pages of its large pages are found by its id.
    Afterwards, and if a large page has no request, they are found by None."""

    __slots__ = ("by_owner", "live_owners", "owner_of")

    def __init__(self, num_large: int) -> None:
        self.owner_of: list[int | None] = [None] * num_large
        self.live_owners: set[int] = set()
        self.by_owner: OrderedDict[int | None, OrderedDict[int, None]] = OrderedDict()  # without empty values

    def add(self, large_page: int) -> None:
        """Add a large page that has empty pages; it may be present already."""
        owner = self.owner_of[large_page]
        if owner is not None and owner not in self.live_owners:
            owner = self.owner_of[large_page] = None
        large_pages = self.by_owner.get(owner)
        if large_pages is None:
            large_pages = self.by_owner[owner] = OrderedDict()
        large_pages[large_page] = None

    def remove(self, large_page: int) -> None:
        """Remove a large page that has no empty pages or is not active any more; it may be absent."""
        owner = self.owner_of[large_page]
        large_pages = self.by_owner.get(owner)
        if large_pages is not None and large_page in large_pages:
            del large_pages[large_page]
            if not large_pages:
                del self.by_owner[owner]

    def first_of(self, owner: int | None) -> int:
        """Return a large page of this owner; 0 if there is none."""
        large_pages = self.by_owner.get(owner)
        return next(iter(large_pages)) if large_pages else 0

    def first_of_any(self) -> int:
        """Return a large page of any owner; 0 if there is none."""
        return next((next(iter(large_pages)) for large_pages in self.by_owner.values()), 0)

    def remove_owner(self, owner: int) -> None:
        """Make the large pages of a finished request available to all."""
        self.live_owners.discard(owner)
        for large_page in self.by_owner.pop(owner, ()):
            self.add(large_page)

    def __iter__(self) -> Iterator[tuple[int | None, int]]:
        return ((owner, large_page) for owner, large_pages in self.by_owner.items() for large_page in large_pages)


class TwoLevelPagePool(ExpectedPages):
    """A pool of `num_large` large pages, each of which holds small_pages_per_large[g] pages of group g.

    A page of group g holds page_tokens[g] tokens (default: 1 each). `association` is one of ASSOCIATIONS."""

    def __init__(
        self,
        small_pages_per_large: Sequence[int],
        num_large: int,
        association: str = "bulk",
        page_tokens: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        assert association in ASSOCIATIONS, f"association is {association!r}, not one of {ASSOCIATIONS}"
        self.small_pages_per_large = list(small_pages_per_large)
        self.num_large, self.association = num_large, association
        self.page_tokens = list(page_tokens or [1] * len(small_pages_per_large))
        groups = range(len(small_pages_per_large))
        self.free_large = list(range(num_large, 0, -1))  # a stack
        self.bound_group = [-1] * (num_large + 1)  # by large page: the group that it is or was bound to
        self.used_small = [0] * (num_large + 1)  # by large page: its used small pages
        self.empty_small = [0] * (num_large + 1)  # by large page: its empty small pages; 0 if it is free
        self.reclaimable: OrderedDict[int, None] = OrderedDict()  # of all groups, oldest use first
        self.spared: OrderedDict[int, None] = OrderedDict()  # the reclaimable ones with an expected page, evicted last
        # By group and small page: the number of references, EMPTY or CACHED
        self.refs = [[EMPTY] * ((num_large + 1) * ratio) for ratio in small_pages_per_large]
        self.keys: list[list[bytes | None]] = [[None] * len(refs) for refs in self.refs]
        # Oldest use first. If a small page is a whole large page, `reclaimable` has the order, and a dict is faster.
        self.cached: list[dict[int, None]] = [OrderedDict() if ratio > 1 else {} for ratio in small_pages_per_large]
        self.index: list[dict[bytes, int]] = [{} for _ in groups]  # key of the content -> small page
        self.evicted_keys: dict[int, list[bytes]] = {}  # see `track_evictions`
        self.partial = [PartialPages(num_large + 1) for _ in groups]  # active large pages with empty small pages
        self.used = [0 for _ in groups]  # small pages of each group
        self.num_active, self.num_reclaimable = [0 for _ in groups], [0 for _ in groups]  # large pages of each group
        self.spare_large = 0  # large pages that may be taken where small ones would do
        self.releases = self.evictions = 0

    def can_allocate(
        self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False,
        assume_empty: bool = False,
    ) -> bool:  # fmt: skip
        """As PagePool.can_allocate. `cached_hits` are the needed pages that are cached now."""
        return self._count_spare_large(needs, cached_hits, margin, assume_empty) >= 0

    def reserve(self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False) -> bool:
        left = self._count_spare_large(needs, cached_hits, margin, assume_empty=False)
        self.spare_large = max(left, 0)
        return left >= 0

    def _count_spare_large(
        self, needs: Sequence[int], cached_hits: CachedHits, margin: bool, assume_empty: bool
    ) -> int:
        """Return the number of large pages that are left over, or, if negative, missing."""
        available = len(self.free_large) + len(self.reclaimable) + len(self.spared)
        left = self.num_large if assume_empty else available
        if margin:
            left -= self.num_large // WATERMARK_DIVISOR
        for group, (need, ratio) in enumerate(zip(needs, self.small_pages_per_large)):
            if not assume_empty:
                need -= ratio * self.num_active[group] - self.used[group]
            if cached_hits.num_large:  # their large pages become active, with all small pages
                left -= cached_hits.num_large[group]
                need -= ratio * cached_hits.num_large[group]
            if need > 0:
                left -= -(-need // ratio)
        return left

    def find_cached_hits(self, pages: Iterable[tuple[int, int]]) -> CachedHits:
        counts = [0] * len(self.small_pages_per_large)
        large: list[set[int]] = [set() for _ in self.small_pages_per_large]
        for group, page in pages:
            if self.refs[group][page] == CACHED:
                counts[group] += 1
                large_page = page // self.small_pages_per_large[group]
                if not self.used_small[large_page]:
                    large[group].add(large_page)
        return CachedHits(counts, list(map(len, large)))

    def fits_within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        """Return True if pages for `needs` take no more large pages than pages for `limits`, whatever shares these."""
        return (
            sum([(limit - need) // ratio for ratio, need, limit in zip(self.small_pages_per_large, needs, limits)]) >= 0
        )

    def fragmentation_pages(self, group: int) -> int:
        """As PagePool.fragmentation_pages: the rest of the first large page, and that of the last."""
        return 2 * (self.small_pages_per_large[group] - 1)

    def find(self, group: int, key: bytes) -> int | None:
        return self.index[group].get(key)

    def ref_count(self, group: int, page: int) -> int:
        return max(self.refs[group][page], 0)

    def is_empty(self, group: int, page: int) -> bool:
        return self.refs[group][page] == EMPTY

    # Allocation

    def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
        """Return new private pages for a request `owner`; the caller has reserved them.

        In the order of §5.4: empty pages that are associated with the request, free large pages, reclaimable large
        pages, any empty pages, cached pages one by one."""
        ratio, partial, by_request = self.small_pages_per_large[group], self.partial[group], self.association == "paper"
        if owner is not None:
            partial.live_owners.add(owner)
        missing = count - ratio * self.num_active[group] + self.used[group]
        least = -(-missing // ratio) if missing > 0 else 0
        budget = most = least + self.spare_large  # large pages
        pages: list[int] = []
        if self.association == "bulk" and count >= ratio:
            whole = min(count // ratio, budget)
            pages = self._allocate_large(group, whole, whole * ratio, owner)
            budget -= whole
        if len(pages) < count:
            for candidate in (owner, None) if not by_request else (owner,):
                while len(pages) < count and (large_page := partial.first_of(candidate)):
                    self._fill_partial(group, large_page, pages, count)
        if len(pages) < count and budget:
            large = min(-(-(count - len(pages)) // ratio), budget)
            small = min(large * ratio, count - len(pages))
            pages += self._allocate_large(group, large, small, owner if by_request else None)
            budget -= large
        while len(pages) < count and (large_page := partial.first_of_any()):
            self._fill_partial(group, large_page, pages, count)
        self.spare_large -= max(most - budget - least, 0)
        if len(pages) < count:
            self._evict_small(group, count - len(pages), pages)
        return pages

    def _allocate_large(self, group: int, large: int, small: int, owner: int | None) -> list[int]:
        """Bind `large` free or reclaimable large pages to a group, and allocate `small` of their small pages."""
        missing = large - len(self.free_large)
        assert missing <= len(self.reclaimable) + len(self.spared), (
            f"no large page is left for group {group}: allocations must be reserved"
        )
        for _ in range(missing):
            self._evict_large()
        ratio, refs = self.small_pages_per_large[group], self.refs[group]
        used_small, bound_group = self.used_small, self.bound_group
        large_pages = self.free_large[: -large - 1 : -1]
        del self.free_large[len(self.free_large) - large :]
        self.num_active[group] += large
        self.used[group] += small
        for large_page in large_pages:
            used_small[large_page] = ratio
            bound_group[large_page] = group
        if ratio == 1:
            for large_page in large_pages:
                refs[large_page] = 1
            return large_pages
        pages: list[int] = []
        ones, owners = [1] * ratio, self.partial[group].owner_of
        for large_page in large_pages:
            owners[large_page] = owner
            first = large_page * ratio
            refs[first : first + ratio] = ones
            pages += range(first, first + ratio)
        if len(pages) > small:  # the last large page is partial
            over = len(pages) - small
            refs[pages[small] : pages[small] + over] = [EMPTY] * over
            used_small[large_page], self.empty_small[large_page] = ratio - over, over
            self.partial[group].add(large_page)
            del pages[small:]
        return pages

    def _fill_partial(self, group: int, large_page: int, pages: list[int], count: int) -> None:
        """Allocate empty pages of an active large page, until there are `count` pages."""
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
        """Evict and allocate the least recently used cached pages of active large pages.

        Pages of reclaimable large pages are skipped: these are for another group, and at this point no more of them are
        left than that group is about to allocate."""
        ratio, used_small = self.small_pages_per_large[group], self.used_small
        victims, spared, keys = list[int](), list[int](), self.keys[group]
        for page in self.cached[group]:
            if used_small[page // ratio]:
                (spared if (group, keys[page]) in self.expected else victims).append(page)
                if len(victims) == count:
                    break
        victims += spared[: count - len(victims)]
        assert len(victims) == count, f"no page is left for group {group}: allocations must be reserved"
        for page in victims:
            self._drop_content(group, page)
            self.refs[group][page] = 1
            used_small[page // ratio] += 1
        self.used[group] += count
        self.evictions += count
        pages += victims

    def _evict_large(self) -> None:
        """Free the least recently used reclaimable large page."""
        while not self.reclaimable:
            self.give_up_some()
        large_page, _ = self.reclaimable.popitem(last=False)
        group = self.bound_group[large_page]
        ratio, refs = self.small_pages_per_large[group], self.refs[group]
        for page in range(large_page * ratio, large_page * ratio + ratio):
            if refs[page] == CACHED:
                self._drop_content(group, page)
                refs[page] = EMPTY
                self.evictions += 1
        self.num_reclaimable[group] -= 1
        self._free_large(large_page)

    def _drop_content(self, group: int, page: int) -> None:
        """Remove the key of a cached page, and report it to `track_evictions`."""
        key = self.keys[group][page]
        assert key is not None, f"page {page} is cached without a key"
        del self.cached[group][page]
        self.unpublish(group, page)
        if group in self.evicted_keys:
            self.evicted_keys[group].append(key)

    # References

    def incref(self, group: int, page: int, count: int = 1) -> None:
        refs = self.refs[group]
        if refs[page] > 0:
            refs[page] += count
            return
        assert refs[page] == CACHED, f"page {page} is shared but empty"
        del self.cached[group][page]
        refs[page] = count
        self.used[group] += 1
        large_page = page // self.small_pages_per_large[group]
        self.used_small[large_page] += 1
        if self.used_small[large_page] == 1:
            self._remove_reclaimable(large_page)
            self.num_reclaimable[group] -= 1
            self.num_active[group] += 1
            if self.empty_small[large_page]:
                self.partial[group].add(large_page)

    def incref_used(self, group: int, pages: Sequence[int]) -> None:
        refs = self.refs[group]
        for page in pages:
            refs[page] += 1
        refs[SCRATCH] = EMPTY

    def decref(self, group: int, pages: Sequence[int]) -> None:
        """As PagePool.decref. A large page without used pages becomes free or reclaimable."""
        for code in self._decref(group, pages):
            self._add_reclaimable(code & LARGE_ID_MASK)

    def decref_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """As PagePool.decref_tables. Of large pages that were used at the same time the deeper one is evicted first,
        whatever its group (§5.1, aligned)."""
        large_pages = [self._decref(group, pages) for group, pages in enumerate(tables)]
        for code in sorted([code for codes in large_pages for code in codes], reverse=True):
            self._add_reclaimable(code & LARGE_ID_MASK)

    def _add_reclaimable(self, large_page: int) -> None:
        (self.spared if self.expected and self._has_expected(large_page) else self.reclaimable)[large_page] = None

    def _remove_reclaimable(self, large_page: int) -> None:
        if large_page in self.spared:
            del self.spared[large_page]
        else:
            del self.reclaimable[large_page]

    def _has_expected(self, large_page: int) -> bool:
        group = self.bound_group[large_page]
        ratio, keys, expected = self.small_pages_per_large[group], self.keys[group], self.expected
        return any((group, key) in expected for key in keys[large_page * ratio : (large_page + 1) * ratio])

    def _decref(self, group: int, pages: Sequence[int]) -> list[int]:
        """Remove a reference from each page, and return the large pages that become reclaimable.

        They are returned as integers that sort by depth: the tokens before their first page, and the large page in the
        low LARGE_ID_BITS bits."""
        refs, keys, cached = self.refs[group], self.keys[group], self.cached[group]
        ratio = self.small_pages_per_large[group]
        used_small, empty_small, before, empty = self.used_small, self.empty_small, len(cached), 0
        touched: dict[int, int] = {}
        for at, page in zip(range(len(pages) - 1, -1, -1), reversed(pages)):
            left = refs[page] = refs[page] - 1
            if left:
                assert left > 0 or page == SCRATCH, f"page {page} is released but has no references"
                if page == SCRATCH:
                    refs[SCRATCH] = EMPTY
                continue
            large_page = page // ratio
            touched[large_page] = at
            used_small[large_page] -= 1
            if keys[page] is None:
                empty_small[large_page] += 1
                empty += 1
            else:
                refs[page] = CACHED
                cached[page] = None
        self.used[group] -= len(cached) - before + empty
        self.releases += len(touched) > 0
        reclaimable: list[int] = []
        emptied, partial, page_tokens = 0, self.partial[group], self.page_tokens[group]
        for large_page, first in touched.items():
            if used_small[large_page]:
                if empty_small[large_page]:
                    partial.add(large_page)
                continue
            emptied += 1
            if ratio > 1:
                partial.remove(large_page)
            if empty_small[large_page] == ratio:
                empty_small[large_page] = 0
                self.free_large.append(large_page)
            else:
                reclaimable.append(first * page_tokens << LARGE_ID_BITS | large_page)
        self.num_active[group] -= emptied
        self.num_reclaimable[group] += len(reclaimable)
        return reclaimable

    def _free_large(self, large_page: int) -> None:
        self.empty_small[large_page] = 0
        self.free_large.append(large_page)

    def remove_owner(self, owner: int) -> None:
        """As PagePool.remove_owner: the empty pages in the large pages of the request are available to all requests."""
        self.releases += 1
        for partial in self.partial:
            partial.remove_owner(owner)

    def publish(self, group: int, page: int, key: bytes) -> None:
        """Make a complete page findable by `key`. A second page with the same content stays private, unless the first
        one is unused: that one would be evicted first, and its key with it."""
        known = self.index[group].get(key)
        if self.keys[group][page] is not None or (known is not None and self.refs[group][known] > 0):
            return
        if known is not None:
            self.evict(group, known)
        self.keys[group][page] = key
        self.index[group][key] = page

    def _requeue(self, group: int, key: bytes) -> None:
        page = self.index[group].get(key)
        if page is not None and self.refs[group][page] == CACHED:
            large_page = page // self.small_pages_per_large[group]
            if not self.used_small[large_page] and (large_page in self.spared) != self._has_expected(large_page):
                self._remove_reclaimable(large_page)
                self._add_reclaimable(large_page)

    def count_spared_bytes(self, sizes: Sequence[int]) -> int:
        """As PagePool.count_spared_bytes, of whole large pages."""
        return len(self.spared) * sizes[0] * self.small_pages_per_large[0]

    def count_lost_bytes(self, needs: Sequence[int], cached_hits: CachedHits, sizes: Sequence[int]) -> int:
        """As PagePool.count_lost_bytes."""
        left = len(self.free_large) + len(self.reclaimable)
        for group, (need, ratio) in enumerate(zip(needs, self.small_pages_per_large)):
            need -= ratio * (self.num_active[group] + cached_hits.num_large[group]) - self.used[group]
            left -= max(-(-need // ratio), 0)
        return max(-left, 0) * sizes[0] * self.small_pages_per_large[0]

    def track_evictions(self, group: int) -> list[bytes]:
        return self.evicted_keys.setdefault(group, [])

    def unpublish(self, group: int, page: int) -> None:
        del self.index[group][self.keys[group][page] or b""]
        self.keys[group][page] = None

    def evict(self, group: int, page: int) -> None:
        """Empty a cached page."""
        self._drop_content(group, page)
        self.refs[group][page] = EMPTY
        large_page = page // self.small_pages_per_large[group]
        self.empty_small[large_page] += 1
        if self.used_small[large_page]:
            self.partial[group].add(large_page)
        elif self.empty_small[large_page] == self.small_pages_per_large[group]:
            self._remove_reclaimable(large_page)
            self.num_reclaimable[group] -= 1
            self._free_large(large_page)
        elif large_page in self.spared and not self._has_expected(large_page):
            del self.spared[large_page]
            self.reclaimable[large_page] = None

    @property
    def total(self) -> int:
        """The most pages that the pool can hold."""
        return self.num_large * max(self.small_pages_per_large)

    @property
    def num_cached(self) -> list[int]:
        """The number of cached pages of each group."""
        return list(map(len, self.cached))

    def move_page(self, group: int, old: int, new: int) -> None:
        """Move the references and the content of a used page to an empty page of an active large page."""
        large_page = new // self.small_pages_per_large[group]
        count, key = self.ref_count(group, old), self.keys[group][old]
        self.refs[group][new] = count
        self.used[group] += 1
        self.used_small[large_page] += 1
        self.empty_small[large_page] -= 1
        if not self.empty_small[large_page]:
            self.partial[group].remove(large_page)
        if key is not None:
            self.unpublish(group, old)
            self.publish(group, new, key)
        self.decref(group, [old] * count)

    def count_unused_bytes(self, sizes: Sequence[int]) -> UnusedBytes:
        """As PagePool.count_unused_bytes. Empty pages in active large pages, bound to a group, are external."""
        empty = [0] * len(sizes)  # bytes of empty pages of reclaimable large pages
        for large_page in chain(self.reclaimable, self.spared):
            empty[self.bound_group[large_page]] += self.empty_small[large_page] * sizes[self.bound_group[large_page]]
        cached = [len(found) * size for found, size in zip(self.cached, sizes)]
        bound = [
            size * ratio * (active + reclaimable)
            for size, ratio, active, reclaimable in zip(
                sizes, self.small_pages_per_large, self.num_active, self.num_reclaimable
            )
        ]
        unused = sum(bound) - sum(used * size for used, size in zip(self.used, sizes))
        large = sizes[0] * self.small_pages_per_large[0]
        return UnusedBytes(sum(cached), unused - sum(cached) - sum(empty), large * len(self.free_large) + sum(empty))

    def iter_cached(self, group: int) -> Iterator[int]:
        return iter(self.cached[group])

    def drop_cached(self) -> int:
        """Empty every cached page, and return their number."""
        count = sum(map(len, self.cached))
        for group, cached in enumerate(self.cached):
            for page in list(cached):
                self.evict(group, page)
        return count

    def check(self, expected_refs: Sequence[dict[int, int]]) -> None:
        """As PagePool.check: assert also that the counts of each large page agree with its small pages."""
        assert not self.reclaimable.keys() & self.spared.keys(), "a large page is reclaimable twice"
        assert all(map(self._has_expected, self.spared)), "a spared large page has no expected page"
        assert not any(map(self._has_expected, self.reclaimable)), "a large page with an expected page is not spared"
        reclaimable = {**self.reclaimable, **self.spared}
        assert len(set(self.free_large)) == len(self.free_large), "a large page is free twice"
        assert not reclaimable.keys() & set(self.free_large), "a large page is free and reclaimable"
        assert not any(self.used_small[large_page] or self.empty_small[large_page] for large_page in self.free_large), (
            "a free large page has used or empty pages"
        )
        owned: dict[int, int] = dict.fromkeys([*self.free_large, *reclaimable], 0)
        for group, (refs, keys, ratio) in enumerate(zip(self.refs, self.keys, self.small_pages_per_large)):
            held = {page: count for page, count in enumerate(refs) if count > 0}
            assert held == expected_refs[group], "reference counts differ from the tables that name the pages"
            assert all(page >= ratio for page in held), f"group {group} holds a page of the scratch large page"
            assert self.used[group] == len(held), "the count of a group's pages is wrong"
            cached = {page for page, count in enumerate(refs) if count == CACHED}
            assert cached == set(self.cached[group]), "reference counts and the list of cached pages disagree"
            assert min(refs) >= CACHED, "a page has a negative number of references"
            for page, key in enumerate(keys):
                assert key is not None or refs[page] != CACHED, f"page {page} is cached without a key"
                assert key is None or refs[page] != EMPTY, f"page {page} is empty and has a key"
            keyed = {key: page for page, key in enumerate(keys) if key is not None}
            assert keyed == self.index[group], "the index differs from the pages' keys"
            assert len(keyed) == sum(key is not None for key in keys), "two pages have the same key"
            self._check_large_pages(group, held.keys() | cached, owned)
        assert len(owned) == self.num_large, "large pages are lost"
        assert sum(self.num_reclaimable) == len(reclaimable), "a large page is reclaimable without a cached page"

    def _check_large_pages(self, group: int, live: set[int], owned: dict[int, int]) -> None:
        refs, ratio = self.refs[group], self.small_pages_per_large[group]
        active = reclaimable = 0
        partly_empty = set()
        for large_page in {page // ratio for page in live}:
            states = refs[large_page * ratio : (large_page + 1) * ratio]
            assert self.bound_group[large_page] == group, f"large page {large_page} is held by two groups"
            assert self.used_small[large_page] == sum(count > 0 for count in states), (
                f"used pages of {large_page} are miscounted"
            )
            assert self.empty_small[large_page] == states.count(EMPTY), f"empty pages of {large_page} are miscounted"
            if self.used_small[large_page]:
                assert large_page not in owned, f"large page {large_page} is active, and free or another group's"
                owned[large_page], active = 1, active + 1
                if self.empty_small[large_page]:
                    partly_empty.add(large_page)
            else:
                assert large_page in self.reclaimable or large_page in self.spared, (
                    f"large page {large_page} is reclaimable and not in the queue"
                )
                reclaimable += 1
        assert (self.num_active[group], self.num_reclaimable[group]) == (active, reclaimable), (
            f"large pages of group {group} are miscounted"
        )
        partial = self.partial[group]
        assert sorted(large_page for _, large_page in partial) == sorted(partly_empty), (
            "the partial pages differ from the large pages with empty pages"
        )
        for owner, large_page in partial:
            assert owner is None or owner in partial.live_owners, "empty pages of a finished request are not available"
            assert partial.owner_of[large_page] == owner, f"large page {large_page} is found under another owner"
