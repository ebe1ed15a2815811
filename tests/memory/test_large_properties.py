"""Any calls of the two-level ledger: audited, against brute force, and with bugs planted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
from test_planted import REFERENCES, found_by, instead_of

from quire.memory.jenga.two_level_pool import ASSOCIATIONS, PartialPages, TwoLevelPagePool

SIZES = ([84, 1], [6, 10, 15], [8, 12, 1, 3], [384, 256], [1, 1], [3, 1], [1, 4], [5, 7])
"""Bytes of small pages, up to a factor: large pages are their least common multiple."""

OPS = ("begin", "begin", "begin", "grow", "grow", "publish", "publish", "window", "hit", "fork", "end", "end", "room")


class Walk:
    """Sequences with a table a group; some belong to the same request. Some keys are those of other pages."""

    def __init__(self, rng: Random, sizes: list[int]) -> None:
        self.ratios = [math.lcm(*sizes) // size for size in sizes]
        self.groups = range(len(self.ratios))
        self.pages = TwoLevelPagePool(self.ratios, rng.randint(2, 8), rng.choice(ASSOCIATIONS))
        self.tables: dict[int, list[list[int]]] = {}
        self.owners: dict[int, int] = {}
        self.born = self.keys = self.served = self.refused = 0

    def act(self, op: str, rng: Random) -> None:
        if op == "begin" or self.tables:
            getattr(self, op)(rng)
        self.pages.check(self.named())

    def named(self) -> list[dict[int, int]]:
        counts: list[dict[int, int]] = [{} for _ in self.groups]
        for tables in self.tables.values():
            for count, table in zip(counts, tables):
                for page in filter(None, table):
                    count[page] = count.get(page, 0) + 1
        return counts

    def pick(self, rng: Random) -> int:
        return rng.choice(list(self.tables))

    def needs(self, rng: Random) -> list[int]:
        return [rng.randint(0, 2 * ratio + 1) if rng.random() < 0.8 else 0 for ratio in self.ratios]

    def feasible(self, needs: list[int]) -> bool:
        """Whether some way to deal out the large pages of which nothing is used serves all groups."""
        pages, spare, home_of = self.pages, [0] * len(self.ratios), {}
        for g, (refs, ratio) in enumerate(zip(pages.refs, self.ratios)):
            for home in range(1, pages.num_large + 1):
                used = sum(count > 0 for count in refs[home * ratio : (home + 1) * ratio])
                if used:
                    home_of[home] = g
                    spare[g] += ratio - used
        free = pages.num_large - len(home_of)
        lacks = [need - there for need, there in zip(needs, spare)]
        most = [range(min(free, max(-(-lack // ratio), 0)) + 1) for lack, ratio in zip(lacks, self.ratios)]
        return any(
            sum(deal) <= free and all(lack <= large * ratio for lack, large, ratio in zip(lacks, deal, self.ratios))
            for deal in product(*most)
        )

    def take(self, rng: Random, needs: list[int], tables: list[list[int]], owner: int) -> None:
        """In any order of groups, and in any pieces."""
        for g in rng.sample(self.groups, len(self.groups)):
            left = needs[g]
            while left:
                count = rng.randint(1, left) if rng.random() < 0.4 else left
                got = self.pages.allocate(g, count, owner)
                assert len(set(got)) == count == len(got), "other pages were given out than asked for"
                assert all(self.pages.ref_count(g, page) == 1 for page in got), "a page isn't private"
                tables[g] += got
                left -= count

    def begin(self, rng: Random) -> None:
        """A sequence comes in with what it finds, or nothing changes."""
        pages, needs = self.pages, self.needs(rng)
        found: list[list[int]] = []
        for index in pages.index:
            keys = sorted(index)
            found.append([index[key] for key in rng.sample(keys, min(len(keys), rng.choice((0, 1, 4))))])
        resting = pages.find_cached_hits([(g, page) for g, table in enumerate(found) for page in table])
        all_needs = [need + rest for need, rest in zip(needs, resting.num_pages)]
        there = pages.reserve(all_needs, resting)
        assert pages.can_allocate(all_needs, resting) is there
        if not there:
            self.refused += 1
            return
        for g, table in enumerate(found):
            for page in table:
                pages.incref(g, page)
        self.born += 1
        together = self.tables and rng.random() < 0.2
        self.owners[self.born] = self.owners[self.pick(rng)] if together else self.born
        self.tables[self.born] = found
        assert self.feasible(needs), "what was found took more than was counted"
        self.take(rng, needs, found, self.owners[self.born])
        self.served += 1

    def grow(self, rng: Random) -> None:
        """A sequence takes more exactly if there is a way."""
        needs, seq = self.needs(rng), self.pick(rng)
        there = self.pages.reserve(needs)
        assert there is self.feasible(needs), "what is reserved isn't what can be taken"
        if there:
            self.take(rng, needs, self.tables[seq], self.owners[seq])

    def publish(self, rng: Random) -> None:
        for g, table in enumerate(self.tables[self.pick(rng)]):
            for page in filter(None, table):
                if rng.random() < 0.5:
                    self.keys += 1
                    key = rng.randint(0, 20) if rng.random() < 0.3 else self.keys
                    self.pages.publish(g, page, key.to_bytes(4, "big"))

    def window(self, rng: Random) -> None:
        """The first pages of a group are dropped."""
        g = rng.choice(self.groups)
        table = self.tables[self.pick(rng)][g]
        gone = rng.randint(0, len(table))
        self.pages.decref(g, table[:gone])
        table[:gone] = [0] * gone

    def hit(self, rng: Random) -> None:
        """A cached page, the same in all groups' eyes or not, is used for a moment: it is the youngest."""
        for g, cached in enumerate(self.pages.cached):
            if cached:
                page = rng.choice(list(cached))
                self.pages.incref(g, page)
                self.pages.decref(g, [page])
                assert next(reversed(cached)) == page

    def fork(self, rng: Random) -> None:
        parent = self.pick(rng)
        self.born += 1
        self.tables[self.born] = [list(table) for table in self.tables[parent]]
        self.owners[self.born] = self.owners[parent]
        for g, table in enumerate(self.tables[parent]):
            self.pages.incref_used(g, table)

    def end(self, rng: Random) -> None:
        self.leave(self.pick(rng))

    def leave(self, seq: int) -> None:
        self.pages.decref_tables(self.tables.pop(seq))
        self.pages.remove_owner(self.owners.pop(seq))

    def room(self, rng: Random) -> None:
        if rng.random() < 0.3:
            cached = sum(map(len, self.pages.cached))
            assert self.pages.drop_cached() == cached
            assert not any(self.pages.index) or any(self.pages.used)
        elif self.pages.cached[g := rng.choice(self.groups)]:
            self.pages.evict(g, next(iter(self.pages.cached[g])))

    def drained(self) -> None:
        for seq in list(self.tables):
            self.leave(seq)
        self.pages.check(self.named())
        assert (self.pages.used, self.pages.num_active) == ([0] * len(self.ratios),) * 2
        assert len(self.pages.free_large) + len(self.pages.reclaimable) == self.pages.num_large
        assert not any(partial.live_owners for partial in self.pages.partial), "a request that left is still known"


def walked(rng: Random, sizes: list[int]) -> Walk:
    walk = Walk(rng, sizes)
    for _ in range(150):
        walk.act(rng.choice(OPS), rng)
    walk.drained()
    return walk


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_calls(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They evict large pages and small ones, give large pages to other groups, and run short."""
    happened = Counter[str]()

    def counted(sound: Any, pages: TwoLevelPagePool, *args: Any) -> Any:
        before, result = list(pages.bound_group), sound(pages, *args)
        happened[sound.__name__] += 1
        happened["rebound"] += any(0 <= was != now for was, now in zip(before, pages.bound_group))
        return result

    for name in ("_evict_large", "_evict_small", "_allocate_large"):
        instead_of(TwoLevelPagePool, name)(counted)(monkeypatch)
    walks = [walked(rng, sizes) for rng in map(Random, range(12))]
    assert sum(walk.served for walk in walks) > 50
    assert sum(walk.refused for walk in walks) > 0
    assert happened["_evict_large"] > 0
    assert happened["rebound"] > 0
    assert (happened["_evict_small"] > 0) is (max(walks[0].ratios) > 1)


def a_second_page_takes_a_key(publish: Any, pages: TwoLevelPagePool, group: int, page: int, key: bytes) -> None:
    if pages.keys[group][page] is None:
        pages.keys[group][page], pages.index[group][key] = key, page


def a_key_stays(forget: Any, pages: TwoLevelPagePool, group: int, page: int) -> None:
    key = pages.keys[group][page]
    forget(pages, group, page)
    pages.keys[group][page] = key


def more_than_is_to_spare(reserve: Any, pages: TwoLevelPagePool, *args: Any, **kwargs: Any) -> bool:
    there: bool = reserve(pages, *args, **kwargs)
    pages.spare_large += there
    return there


def an_owner_that_left_is_offered_to(add: Any, partial: PartialPages, home: int) -> None:
    """Pages that become empty after their request left are everybody's too."""
    found: Any = partial.by_owner.setdefault(partial.owner_of[home], type(partial.by_owner)())
    found[home] = None


LOST, COUNTED = "empty pages of a finished request are not available", "what was found took more than was counted"
PLANTED: dict[str, tuple[type, str, Callable[..., Any], str]] = {  # a method, a bug, and what the check says of it
    "a second page takes a key that is there":
        (TwoLevelPagePool, "publish", a_second_page_takes_a_key, "two pages have the same key"),
    "what a request leaves empty is lost":
        (TwoLevelPagePool, "remove_owner", lambda leave, pages,
        owner: [one.live_owners.discard(owner) for one in pages.partial], LOST),
    "an owner that left is offered to": (PartialPages, "add", an_owner_that_left_is_offered_to, LOST),
    "a key stays on a page that goes to another group":
        (TwoLevelPagePool, "_drop_content", a_key_stays, r"page \d+ is empty and has a key"),
    "one group gets pages when another fails":
        (TwoLevelPagePool, "_count_spare_large", lambda left, pages, needs, *rest, **how: left(pages, [*needs[:-1],
        0], *rest, **how),
         COUNTED),
    "a large page more may be taken than is to spare":
        (TwoLevelPagePool, "reserve", more_than_is_to_spare, r"no large page is left for group \d+: allocations must"),
    "what is found counts as pages, not as large pages":
        (TwoLevelPagePool, "find_cached_hits", lambda resting, pages, found: resting(pages,
        found)._replace(num_large=()), COUNTED),
    "a reclaimable large page is lost":
        (TwoLevelPagePool, "_decref", lambda release, *args: release(*args)[1:],
         r"large page \d+ is reclaimable and not in the queue"),
    "a fork is not counted": (TwoLevelPagePool, "incref_used", lambda *args: None, REFERENCES),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, bug, message = PLANTED[name]
    instead_of(owner, method)(bug)(monkeypatch)
    with found_by(message):
        for rng in map(Random, range(40)):
            walked(rng, rng.choice(SIZES))
