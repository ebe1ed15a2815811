"""One ledger for the memories of several models (Jenga §8: "serve multiple models"): each has some of its groups, and
sees these as if they were all; what is empty, or cached and evicted first, is any model's.

A memory's calls are for whole plans of pages, `reserve` and then `take`; so the models take turns, in one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from quire.control.memory.answers import LargeCounts
from quire.control.memory.large import LargePages
from quire.control.memory.pages import NONE_RESTING, Ledger, Resting, Space
from quire.vocabulary.specs import Geometry


class Holder(Protocol):
    """The memory whose pages a part's are."""

    def references(self) -> list[dict[int, int]]:
        """How many tables name each page, a group."""
        ...


class Common:
    """`ledger` has the pages of all groups of these geometries, one after another; `prefix_tokens` of each model are
    kept for registered prefixes."""

    def __init__(
        self, ledger: Ledger | LargePages, geometries: Sequence[Geometry], prefix_tokens: Sequence[int]
    ) -> None:
        self.ledger = ledger
        self.sizes = [group.page_bytes for geometry in geometries for group in geometry.groups]
        self.aside = [
            group.pages(tokens) for geometry, tokens in zip(geometries, prefix_tokens) for group in geometry.groups
        ]
        self.parts: list[Part] = []
        for geometry in geometries:
            self.parts.append(Part(self, sum(len(part) for part in self.parts), geometry))


class Part:
    """The groups of one model in a common ledger, with a ledger's interface (see Ledger) and groups counted from 0."""

    def __init__(self, common: Common, first: int, geometry: Geometry) -> None:
        self.common, self.ledger, self.geometry = common, common.ledger, geometry
        self.own = range(first, first + len(geometry.groups))
        self.number = len(common.parts)
        self.index = self.ledger.index[first : self.own.stop]
        self.holder: Holder | None = None  # None: nothing is held, yet or any more

    def __len__(self) -> int:
        return len(self.own)

    def _wide(self, counts: Sequence[int]) -> list[int]:
        """Counts of its groups as counts of all."""
        wide = [0] * len(self.common.sizes)
        wide[self.own.start : self.own.stop] = counts
        return wide

    def _resting(self, resting: Resting) -> Resting:
        if resting is NONE_RESTING:
            return resting
        return Resting(self._wide(resting.pages), self._wide(resting.large) if resting.large else ())

    def _owner(self, owner: int | None) -> int | None:
        """Requests of several models have the same numbers."""
        return None if owner is None else owner * len(self.common.parts) + self.number

    # Questions

    def affords(
        self, needs: Sequence[int], resting: Resting = NONE_RESTING, *, margin: bool = False, idle: bool = False
    ) -> bool:
        """As Ledger.affords. An idle memory still has what is kept for the other models' registered prefixes."""
        wide = self._wide(needs)
        if idle:
            wide = [need if g in self.own else kept for g, (need, kept) in enumerate(zip(wide, self.common.aside))]
        return self.ledger.affords(wide, self._resting(resting), margin=margin, idle=idle)

    def reserve(self, needs: Sequence[int], resting: Resting = NONE_RESTING, *, margin: bool = False) -> bool:
        """As Ledger.reserve."""
        return self.ledger.reserve(self._wide(needs), self._resting(resting), margin=margin)

    def resting(self, pages: Iterable[tuple[int, int]]) -> Resting:
        """As Ledger.resting."""
        first = self.own.start
        found = self.ledger.resting([(first + group, page) for group, page in pages])
        return Resting(found.pages[first : self.own.stop], found.large[first : self.own.stop])

    def within(self, needs: Sequence[int], limits: Sequence[int]) -> bool:
        """As Ledger.within."""
        return self.ledger.within(self._wide(needs), self._wide(limits))

    def edges(self, group: int) -> int:
        """As Ledger.edges."""
        return self.ledger.edges(self.own[group])

    def find(self, group: int, key: bytes) -> int | None:
        """As Ledger.find."""
        return self.index[group].get(key)

    def names(self, group: int, page: int) -> int:
        """As Ledger.names."""
        return self.ledger.names(self.own[group], page)

    def is_shared(self, group: int, page: int) -> bool:
        """As Ledger.is_shared."""
        return self.ledger.is_shared(self.own[group], page)

    def is_empty(self, group: int, page: int) -> bool:
        """As Ledger.is_empty."""
        return self.ledger.is_empty(self.own[group], page)

    @property
    def used(self) -> list[int]:
        """Pages of each of its groups that tables name."""
        return self.ledger.used[self.own.start : self.own.stop]

    @property
    def releases(self) -> int:
        """The times that something came back, from any model: what one releases another may take."""
        return self.ledger.releases

    @releases.setter
    def releases(self, times: int) -> None:
        self.ledger.releases = times

    @property
    def evictions(self) -> int:
        """Cached pages given out anew, of any model."""
        return self.ledger.evictions

    @property
    def cached_pages(self) -> list[int]:
        """As Ledger.cached_pages, of its groups."""
        return self.ledger.cached_pages[self.own.start : self.own.stop]

    @property
    def total(self) -> int:
        """As Ledger.total."""
        return self.ledger.total

    @property
    def held(self) -> int:
        """Bytes of its pages that tables name."""
        return sum(used * self.common.sizes[g] for g, used in zip(self.own, self.used))

    @property
    def elsewhere(self) -> int:
        """Bytes of pages that the other models' tables name."""
        return sum(part.held for part in self.common.parts if part is not self)

    def cached_of(self, group: int) -> Iterator[int]:
        """As Ledger.cached_of."""
        return self.ledger.cached_of(self.own.start + group)

    def space(self, sizes: Sequence[int]) -> Space:
        """As Ledger.space: cached pages and free ones are those of all models, as any may get them. What the others use
        can't be had: that is external."""
        space = self.ledger.space(self.common.sizes)
        return space._replace(external=space.external + self.elsewhere)

    def counts(self) -> LargeCounts:
        """As LargePages.counts, with its own groups' large pages."""
        assert isinstance(self.ledger, LargePages), "there are no large pages"
        counts, own = self.ledger.counts(), slice(self.own.start, self.own.stop)
        return counts._replace(active=counts.active[own], reclaimable=counts.reclaimable[own])

    # Changes

    def take(self, group: int, owner: int | None = None) -> int:
        """As Ledger.take."""
        return self.ledger.take(self.own[group], self._owner(owner))

    def take_all(self, group: int, count: int, owner: int | None = None) -> list[int]:
        """As Ledger.take_all."""
        return self.ledger.take_all(self.own[group], count, self._owner(owner))

    def share(self, group: int, page: int, times: int = 1) -> None:
        """As Ledger.share."""
        self.ledger.share(self.own[group], page, times)

    def share_all(self, group: int, pages: Sequence[int]) -> None:
        """As Ledger.share_all."""
        self.ledger.share_all(self.own[group], pages)

    def release(self, group: int, pages: Sequence[int]) -> None:
        """As Ledger.release."""
        self.ledger.release(self.own[group], pages)

    def release_all(self, tables: Sequence[Sequence[int]]) -> None:
        """As Ledger.release_all."""
        wide: list[Sequence[int]] = [()] * len(self.common.sizes)
        wide[self.own.start : self.own.stop] = tables
        self.ledger.release_all(wide)

    def leave(self, owner: int) -> None:
        """As Ledger.leave."""
        mine = self._owner(owner)
        assert mine is not None, "a request has a number"
        self.ledger.leave(mine)

    def publish(self, group: int, page: int, key: bytes) -> None:
        """As Ledger.publish."""
        self.ledger.publish(self.own[group], page, key)

    def watch(self, group: int) -> list[bytes]:
        """As Ledger.watch."""
        return self.ledger.watch(self.own[group])

    def withdraw(self, group: int, page: int) -> None:
        """As Ledger.withdraw."""
        self.ledger.withdraw(self.own[group], page)

    def evict(self, group: int, page: int) -> None:
        """As Ledger.evict."""
        self.ledger.evict(self.own[group], page)

    def make_room(self, group: int) -> None:
        """As Ledger.make_room."""
        self.ledger.make_room(self.own[group])

    def drop_cached(self) -> int:
        """Empty every cached page of its own groups. Returns how many there were."""
        cached = [
            (g, page) for g, index in enumerate(self.index) for page in list(index.values()) if not self.names(g, page)
        ]
        for g, page in cached:
            self.evict(g, page)
        return len(cached)

    def close(self) -> None:
        """Its model is gone: what it held is the others'."""
        if self.holder is not None:
            for group, counts in enumerate(self.holder.references()):
                for page, count in counts.items():
                    self.release(group, [page] * count)
            self.holder = None
            self.drop_cached()

    def check(self, named: Sequence[dict[int, int]]) -> None:
        """As Ledger.check, of all models: `named` is what its own tables name."""
        joint: list[dict[int, int]] = []
        for part in self.common.parts:
            if part is self:
                joint += named
            else:
                joint += [{} for _ in part.own] if part.holder is None else part.holder.references()
        self.ledger.check(joint)
