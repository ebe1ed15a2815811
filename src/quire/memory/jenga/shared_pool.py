"""One ledger for the memories of several models (Jenga §8: "serve multiple models"): each has some of its groups, and
sees these as if they were all; what is empty, or cached and evicted first, is any model's.

A memory's calls are for whole plans of pages, `reserve` and then `take`; so the models take turns, in one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from quire.memory.answers import LargePageStats
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import NO_CACHED_HITS, CachedHits, PagePool, UnusedBytes
from quire.protocol.kv_cache_config import KVCacheConfig


class Holder(Protocol):
    """The memory whose pages a part's are."""

    def count_refs(self) -> list[dict[int, int]]:
        """How many tables name each page, a group."""
        ...


class SharedPool:
    """`page_pool` has the pages of all groups of these geometries, one after another; `prefix_tokens` of each model are
    kept for registered prefixes."""

    def __init__(
        self, page_pool: PagePool | TwoLevelPagePool, kv_configs: Sequence[KVCacheConfig], prefix_tokens: Sequence[int]
    ) -> None:
        self.page_pool = page_pool
        self.page_bytes = [group.page_bytes for geometry in kv_configs for group in geometry.groups]
        self.pinned_capacity = [
            group.num_pages(tokens) for geometry, tokens in zip(kv_configs, prefix_tokens) for group in geometry.groups
        ]
        self.views: list[PoolView] = []
        for geometry in kv_configs:
            self.views.append(PoolView(self, sum(len(part) for part in self.views), geometry))


class PoolView:
    """The groups of one model in a common ledger, with a ledger's interface (see Ledger) and groups counted from 0."""

    def __init__(self, shared_pool: SharedPool, first: int, kv_config: KVCacheConfig) -> None:
        self.shared_pool, self.page_pool, self.kv_config = shared_pool, shared_pool.page_pool, kv_config
        self.group_range = range(first, first + len(kv_config.groups))
        self.model_index = len(shared_pool.views)
        self.index = self.page_pool.index[first : self.group_range.stop]
        self.holder: Holder | None = None  # None: nothing is held, yet or any more

    def __len__(self) -> int:
        return len(self.group_range)

    def _widen(self, counts: Sequence[int]) -> list[int]:
        """Counts of its groups as counts of all."""
        wide = [0] * len(self.shared_pool.page_bytes)
        wide[self.group_range.start : self.group_range.stop] = counts
        return wide

    def _widen_hits(self, cached_hits: CachedHits) -> CachedHits:
        if cached_hits is NO_CACHED_HITS:
            return cached_hits
        return CachedHits(
            self._widen(cached_hits.num_pages), self._widen(cached_hits.num_large) if cached_hits.num_large else ()
        )

    def _unique_owner(self, owner: int | None) -> int | None:
        """Requests of several models have the same numbers."""
        return None if owner is None else owner * len(self.shared_pool.views) + self.model_index

    # Questions

    def can_allocate(
        self,
        needs: Sequence[int],
        cached_hits: CachedHits = NO_CACHED_HITS,
        *,
        margin: bool = False,
        assume_empty: bool = False,
    ) -> bool:
        """As Ledger.affords. An idle memory still has what is kept for the other models' registered prefixes."""
        wide = self._widen(needs)
        if assume_empty:
            wide = [
                need if g in self.group_range else kept
                for g, (need, kept) in enumerate(zip(wide, self.shared_pool.pinned_capacity))
            ]
        return self.page_pool.can_allocate(
            wide, self._widen_hits(cached_hits), margin=margin, assume_empty=assume_empty
        )

    def reserve(self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False) -> bool:
        """As Ledger.reserve."""
        return self.page_pool.reserve(self._widen(needs), self._widen_hits(cached_hits), margin=margin)

    def find_cached_hits(self, pages: Iterable[tuple[int, int]]) -> CachedHits:
        """As Ledger.resting."""
        first = self.group_range.start
        found = self.page_pool.find_cached_hits([(first + group, page) for group, page in pages])
        return CachedHits(
            found.num_pages[first : self.group_range.stop], found.num_large[first : self.group_range.stop]
        )

    def fits_within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        """As Ledger.within."""
        return self.page_pool.fits_within(self._widen(needs), self._widen(limits))

    def fragmentation_pages(self, group: int) -> int:
        """As Ledger.edges."""
        return self.page_pool.fragmentation_pages(self.group_range[group])

    def find(self, group: int, key: bytes) -> int | None:
        """As Ledger.find."""
        return self.index[group].get(key)

    def ref_count(self, group: int, page: int) -> int:
        """As Ledger.names."""
        return self.page_pool.ref_count(self.group_range[group], page)

    def is_shared(self, group: int, page: int) -> bool:
        """As Ledger.is_shared."""
        return self.page_pool.is_shared(self.group_range[group], page)

    def is_empty(self, group: int, page: int) -> bool:
        """As Ledger.is_empty."""
        return self.page_pool.is_empty(self.group_range[group], page)

    @property
    def used(self) -> list[int]:
        """Pages of each of its groups that tables name."""
        return self.page_pool.used[self.group_range.start : self.group_range.stop]

    @property
    def releases(self) -> int:
        """The times that something came back, from any model: what one releases another may take."""
        return self.page_pool.releases

    @releases.setter
    def releases(self, times: int) -> None:
        self.page_pool.releases = times

    @property
    def evictions(self) -> int:
        """Cached pages given out anew, of any model."""
        return self.page_pool.evictions

    @property
    def num_cached(self) -> list[int]:
        """As Ledger.cached_pages, of its groups."""
        return self.page_pool.num_cached[self.group_range.start : self.group_range.stop]

    @property
    def total(self) -> int:
        """As Ledger.total."""
        return self.page_pool.total

    @property
    def used_bytes(self) -> int:
        """Bytes of its pages that tables name."""
        return sum(used * self.shared_pool.page_bytes[g] for g, used in zip(self.group_range, self.used))

    @property
    def other_used_bytes(self) -> int:
        """Bytes of pages that the other models' tables name."""
        return sum(part.used_bytes for part in self.shared_pool.views if part is not self)

    def iter_cached(self, group: int) -> Iterator[int]:
        """As Ledger.cached_of."""
        return self.page_pool.iter_cached(self.group_range.start + group)

    def count_unused_bytes(self, sizes: Sequence[int]) -> UnusedBytes:
        """As Ledger.space: cached pages and free ones are those of all models, as any may get them. What the others use
        can't be had: that is external."""
        space = self.page_pool.count_unused_bytes(self.shared_pool.page_bytes)
        return space._replace(external=space.external + self.other_used_bytes)

    def get_stats(self) -> LargePageStats:
        """As LargePages.counts, with its own groups' large pages."""
        assert isinstance(self.page_pool, TwoLevelPagePool), "there are no large pages"
        counts, own = self.page_pool.get_stats(), slice(self.group_range.start, self.group_range.stop)
        return counts._replace(active=counts.active[own], reclaimable=counts.reclaimable[own])

    # Changes

    def allocate_one(self, group: int, owner: int | None = None) -> int:
        """As Ledger.take."""
        return self.page_pool.allocate_one(self.group_range[group], self._unique_owner(owner))

    def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
        """As Ledger.take_all."""
        return self.page_pool.allocate(self.group_range[group], count, self._unique_owner(owner))

    def incref(self, group: int, page: int, count: int = 1) -> None:
        """As Ledger.share."""
        self.page_pool.incref(self.group_range[group], page, count)

    def incref_used(self, group: int, pages: Sequence[int]) -> None:
        """As Ledger.share_all."""
        self.page_pool.incref_used(self.group_range[group], pages)

    def decref(self, group: int, pages: Sequence[int]) -> None:
        """As Ledger.release."""
        self.page_pool.decref(self.group_range[group], pages)

    def decref_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """As Ledger.release_all."""
        wide: list[Sequence[int]] = [()] * len(self.shared_pool.page_bytes)
        wide[self.group_range.start : self.group_range.stop] = tables
        self.page_pool.decref_tables(wide)

    def remove_owner(self, owner: int) -> None:
        """As Ledger.leave."""
        mine = self._unique_owner(owner)
        assert mine is not None, "a request has a number"
        self.page_pool.remove_owner(mine)

    def publish(self, group: int, page: int, key: bytes) -> None:
        """As Ledger.publish."""
        self.page_pool.publish(self.group_range[group], page, key)

    def track_evictions(self, group: int) -> list[bytes]:
        """As Ledger.watch."""
        return self.page_pool.track_evictions(self.group_range[group])

    def unpublish(self, group: int, page: int) -> None:
        """As Ledger.withdraw."""
        self.page_pool.unpublish(self.group_range[group], page)

    def evict(self, group: int, page: int) -> None:
        """As Ledger.evict."""
        self.page_pool.evict(self.group_range[group], page)

    def make_room(self, group: int) -> None:
        """As Ledger.make_room."""
        self.page_pool.make_room(self.group_range[group])

    def drop_cached(self) -> int:
        """Empty every cached page of its own groups. Returns how many there were."""
        cached = [
            (g, page)
            for g, index in enumerate(self.index)
            for page in list(index.values())
            if not self.ref_count(g, page)
        ]
        for g, page in cached:
            self.evict(g, page)
        return len(cached)

    def close(self) -> None:
        """Its model is gone: what it held is the others'."""
        if self.holder is not None:
            for group, counts in enumerate(self.holder.count_refs()):
                for page, count in counts.items():
                    self.decref(group, [page] * count)
            self.holder = None
            self.drop_cached()

    def check(self, expected_refs: Sequence[dict[int, int]]) -> None:
        """As Ledger.check, of all models: `expected_refs` is what its own tables name."""
        joint: list[dict[int, int]] = []
        for part in self.shared_pool.views:
            if part is self:
                joint += expected_refs
            else:
                joint += [{} for _ in part.group_range] if part.holder is None else part.holder.count_refs()
        self.page_pool.check(joint)
