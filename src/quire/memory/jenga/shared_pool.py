"""One pool of pages for the memories of several models (Jenga §8: "serve multiple models").

Each model has some of the pool's groups, and sees them as if they were all. Empty pages, and cached pages that are
evicted first, are available to any model. A memory calls `reserve` and then `allocate` for a whole plan of pages; so
the models take turns, in one thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from quire.memory.expected_pages import Demand
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import NO_CACHED_HITS, CachedHits, PagePool, UnusedBytes
from quire.protocol.kv_cache_config import KVCacheConfig


class Holder(Protocol):
    """The memory that holds the pages of a view."""

    def count_refs(self) -> list[dict[int, int]]:
        """Return for each group the number of tables that name each page."""
        ...


class SharedPool:
    """A pool with the pages of all groups of these layouts, one after another.

    Pages for prefix_tokens[i] tokens of model i are set aside for registered prefixes."""

    def __init__(
        self, page_pool: PagePool | TwoLevelPagePool, kv_configs: Sequence[KVCacheConfig], prefix_tokens: Sequence[int]
    ) -> None:
        self.page_pool = page_pool
        self.page_bytes = [group.page_bytes for kv_config in kv_configs for group in kv_config.groups]
        self.pinned_capacity = [
            group.num_pages(tokens)
            for kv_config, tokens in zip(kv_configs, prefix_tokens)
            for group in kv_config.groups
        ]
        self.views: list[PoolView] = []
        for kv_config in kv_configs:
            self.views.append(PoolView(self, sum(len(view) for view in self.views), kv_config))


class PoolView:
    """The groups of one model in a shared pool, numbered from 0, with the interface of PagePool."""

    def __init__(self, shared_pool: SharedPool, first: int, kv_config: KVCacheConfig) -> None:
        self.shared_pool, self.page_pool, self.kv_config = shared_pool, shared_pool.page_pool, kv_config
        self.group_range = range(first, first + len(kv_config.groups))
        self.model_index = len(shared_pool.views)
        self.index = self.page_pool.index[first : self.group_range.stop]
        self.holder: Holder | None = None  # None before `bind` and after `close`
        self.demand: Demand | None = None

    def __len__(self) -> int:
        return len(self.group_range)

    def _widen(self, counts: Sequence[int]) -> list[int]:
        """Return counts of its groups as counts of all groups."""
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
        """Return an owner id that no other model uses: request ids are unique only within a model."""
        return None if owner is None else owner * len(self.shared_pool.views) + self.model_index

    # Queries

    def can_allocate(
        self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False,
        assume_empty: bool = False,
    ) -> bool:  # fmt: skip
        """As PagePool.can_allocate. With `assume_empty` other models' registered prefixes keep their capacity."""
        wide = self._widen(needs)
        if assume_empty:
            wide = [
                need if g in self.group_range else capacity
                for g, (need, capacity) in enumerate(zip(wide, self.shared_pool.pinned_capacity))
            ]
        return self.page_pool.can_allocate(
            wide, self._widen_hits(cached_hits), margin=margin, assume_empty=assume_empty
        )

    def reserve(self, needs: Sequence[int], cached_hits: CachedHits = NO_CACHED_HITS, *, margin: bool = False) -> bool:
        return self.page_pool.reserve(self._widen(needs), self._widen_hits(cached_hits), margin=margin)

    def find_cached_hits(self, pages: Iterable[tuple[int, int]]) -> CachedHits:
        first = self.group_range.start
        hits = self.page_pool.find_cached_hits([(first + group, page) for group, page in pages])
        return CachedHits(hits.num_pages[first : self.group_range.stop], hits.num_large[first : self.group_range.stop])

    def fits_within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        return self.page_pool.fits_within(self._widen(needs), self._widen(limits))

    def fragmentation_pages(self, group: int) -> int:
        return self.page_pool.fragmentation_pages(self.group_range[group])

    def find(self, group: int, key: bytes) -> int | None:
        return self.index[group].get(key)

    def ref_count(self, group: int, page: int) -> int:
        return self.page_pool.ref_count(self.group_range[group], page)

    def is_empty(self, group: int, page: int) -> bool:
        return self.page_pool.is_empty(self.group_range[group], page)

    @property
    def used(self) -> list[int]:
        """For each of its groups the number of pages that tables name."""
        return self.page_pool.used[self.group_range.start : self.group_range.stop]

    @property
    def releases(self) -> int:
        """The number of releases by any model: what one releases another may allocate."""
        return self.page_pool.releases

    @property
    def evictions(self) -> int:
        """The number of evicted pages of any model."""
        return self.page_pool.evictions

    @property
    def num_cached(self) -> list[int]:
        """As PagePool.num_cached, of its groups."""
        return self.page_pool.num_cached[self.group_range.start : self.group_range.stop]

    @property
    def total(self) -> int:
        return self.page_pool.total

    @property
    def used_bytes(self) -> int:
        """The bytes of its pages that tables name."""
        return sum(used * self.shared_pool.page_bytes[g] for g, used in zip(self.group_range, self.used))

    @property
    def other_used_bytes(self) -> int:
        """The bytes of pages that the other models' tables name."""
        return sum(view.used_bytes for view in self.shared_pool.views if view is not self)

    def iter_cached(self, group: int) -> Iterator[int]:
        return self.page_pool.iter_cached(self.group_range.start + group)

    def count_unused_bytes(self, sizes: Sequence[int]) -> UnusedBytes:
        """As PagePool.count_unused_bytes. Cached and free pages are those of all models, as any may get them; the pages
        that other models use are external."""
        space = self.page_pool.count_unused_bytes(self.shared_pool.page_bytes)
        return space._replace(external=space.external + self.other_used_bytes)

    # Changes

    def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
        return self.page_pool.allocate(self.group_range[group], count, self._unique_owner(owner))

    def incref(self, group: int, page: int, count: int = 1) -> None:
        self.page_pool.incref(self.group_range[group], page, count)

    def incref_used(self, group: int, pages: Sequence[int]) -> None:
        self.page_pool.incref_used(self.group_range[group], pages)

    def decref(self, group: int, pages: Sequence[int]) -> None:
        self.page_pool.decref(self.group_range[group], pages)

    def decref_tables(self, tables: Sequence[Sequence[int]]) -> None:
        wide: list[Sequence[int]] = [()] * len(self.shared_pool.page_bytes)
        wide[self.group_range.start : self.group_range.stop] = tables
        self.page_pool.decref_tables(wide)

    def remove_owner(self, owner: int) -> None:
        unique_owner = self._unique_owner(owner)
        assert unique_owner is not None, "a request has a number"
        self.page_pool.remove_owner(unique_owner)

    def publish(self, group: int, page: int, key: bytes) -> None:
        self.page_pool.publish(self.group_range[group], page, key)

    def add_demand(self, demand: Demand) -> None:
        self.demand = demand
        self.page_pool.add_demand(demand)

    def expect(self, keys: Iterable[tuple[int, bytes]]) -> None:
        first = self.group_range.start
        self.page_pool.expect((first + group, key) for group, key in keys)

    def forget(self, keys: Iterable[tuple[int, bytes]]) -> None:
        first = self.group_range.start
        self.page_pool.forget((first + group, key) for group, key in keys)

    def is_expected(self, group: int, key: bytes) -> bool:
        return self.page_pool.is_expected(self.group_range.start + group, key)

    def count_spared_bytes(self, sizes: Sequence[int]) -> int:
        """As PagePool.count_spared_bytes, of all models."""
        return self.page_pool.count_spared_bytes(self.shared_pool.page_bytes)

    def count_lost_bytes(self, needs: Sequence[int], cached_hits: CachedHits, sizes: Sequence[int]) -> int:
        """As PagePool.count_lost_bytes, of all models."""
        hits = self._widen_hits(cached_hits)
        return self.page_pool.count_lost_bytes(self._widen(needs), hits, self.shared_pool.page_bytes)

    def track_evictions(self, group: int) -> list[bytes]:
        return self.page_pool.track_evictions(self.group_range[group])

    def unpublish(self, group: int, page: int) -> None:
        self.page_pool.unpublish(self.group_range[group], page)

    def evict(self, group: int, page: int) -> None:
        self.page_pool.evict(self.group_range[group], page)

    def drop_cached(self) -> int:
        """Empty every cached page of its own groups, and return their number."""
        cached = [
            (g, page)
            for g, index in enumerate(self.index)
            for page in list(index.values())
            if not self.ref_count(g, page)
        ]
        for g, page in cached:
            self.evict(g, page)
        return len(cached)

    def bind(self, holder: Holder) -> None:
        """Record the memory that holds pages of this view."""
        self.holder = holder

    def close(self) -> None:
        """Release all pages of a model that is removed: others may use them."""
        if self.holder is not None:
            for group, counts in enumerate(self.holder.count_refs()):
                for page, count in counts.items():
                    self.decref(group, [page] * count)
            self.holder = None
            self.drop_cached()
        if self.demand is not None:
            while self.demand.give_up_one():
                pass
            self.page_pool.demands.remove(self.demand)
            self.demand = None

    def check(self, expected_refs: Sequence[dict[int, int]]) -> None:
        """As PagePool.check, for all models: `expected_refs` has the references of its own tables."""
        joint: list[dict[int, int]] = []
        for view in self.shared_pool.views:
            if view is self:
                joint += expected_refs
            else:
                joint += [{} for _ in view.group_range] if view.holder is None else view.holder.count_refs()
        self.page_pool.check(joint)


def compact(page_pool: PagePool | TwoLevelPagePool | PoolView, group: int, used: Iterable[int]) -> dict[int, int]:
    """Move these pages, all used pages of a group, into as few large pages as they fill: the fullest ones. Registered
    prefixes stay where they were computed, beside pages of finished requests, and so may take more large pages.

    Return old page -> new page; the content must be copied. The new pages were empty, or cached and are evicted."""
    if isinstance(page_pool, PoolView):
        # While other models hold pages, this one may have no step soon, and they would take the freed pages.
        return {} if page_pool.other_used_bytes else compact(page_pool.page_pool, page_pool.group_range[group], used)
    if isinstance(page_pool, PagePool):
        return {}
    ratio = page_pool.small_pages_per_large[group]
    by_large_page: dict[int, list[int]] = {}
    for page in used:
        by_large_page.setdefault(page // ratio, []).append(page)
    fullest = sorted(by_large_page, key=lambda large_page: -len(by_large_page[large_page]))
    num_kept = -(-sum(map(len, by_large_page.values())) // ratio)
    to_move = [page for large_page in fullest[num_kept:] for page in by_large_page[large_page]]
    targets: list[int] = []
    for large_page in fullest[:num_kept]:
        for page in range(large_page * ratio, large_page * ratio + ratio):
            if len(targets) < len(to_move) and not page_pool.ref_count(group, page):
                if not page_pool.is_empty(group, page):
                    page_pool.evict(group, page)
                targets.append(page)
    for old, new in zip(to_move, targets):
        page_pool.move_page(group, old, new)
    return dict(zip(to_move, targets))
