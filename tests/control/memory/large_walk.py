"""Random calls of the two-level ledger, audited after each one."""

from __future__ import annotations

from itertools import product
from random import Random

from quire.control.memory.large import ASSOCIATIONS, LargePages

SIZES = ([84, 1], [6, 10, 15], [8, 12, 1, 3], [384, 256], [1, 1], [3, 1], [1, 4], [5, 7])
"""Bytes of small pages, up to a factor: large pages are their least common multiple."""

OPS = ("begin", "begin", "begin", "grow", "grow", "publish", "publish", "window", "hit", "fork", "end", "end", "room")


def ratios_of(sizes: list[int]) -> list[int]:
    large = 1
    while any(large % size for size in sizes):
        large += 1
    return [large // size for size in sizes]


class Walk:
    """Sequences with a table a group; some belong to the same request. Some keys are those of other pages."""

    def __init__(self, rng: Random, ratios: list[int] | None = None) -> None:
        self.ratios = ratios if ratios is not None else ratios_of(rng.choice(SIZES))
        self.groups = range(len(self.ratios))
        self.pages = LargePages(self.ratios, rng.randint(2, 8), rng.choice(ASSOCIATIONS))
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
            for home in range(1, pages.count + 1):
                used = sum(count > 0 for count in refs[home * ratio : (home + 1) * ratio])
                if used:
                    home_of[home] = g
                    spare[g] += ratio - used
        free = pages.count - len(home_of)
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
                got = self.pages.take_all(g, count, owner)
                assert len(set(got)) == count == len(got), "other pages were given out than asked for"
                assert all(self.pages.names(g, page) == 1 for page in got), "a page isn't private"
                tables[g] += got
                left -= count

    def begin(self, rng: Random) -> None:
        """A sequence comes in with what it finds, or nothing changes."""
        pages, needs = self.pages, self.needs(rng)
        found: list[list[int]] = []
        for index in pages.index:
            keys = sorted(index)
            found.append([index[key] for key in rng.sample(keys, min(len(keys), rng.choice((0, 1, 4))))])
        resting = pages.resting([(g, page) for g, table in enumerate(found) for page in table])
        all_needs = [need + rest for need, rest in zip(needs, resting.pages)]
        there = pages.reserve(all_needs, resting)
        assert pages.affords(all_needs, resting) is there
        if not there:
            self.refused += 1
            return
        for g, table in enumerate(found):
            for page in table:
                pages.share(g, page)
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
        self.pages.release(g, table[:gone])
        table[:gone] = [0] * gone

    def hit(self, rng: Random) -> None:
        """A cached page, the same in all groups' eyes or not, is used for a moment: it is the youngest."""
        for g, cached in enumerate(self.pages.cached):
            if cached:
                page = rng.choice(list(cached))
                self.pages.share(g, page)
                self.pages.release(g, [page])
                assert next(reversed(cached)) == page

    def fork(self, rng: Random) -> None:
        parent = self.pick(rng)
        self.born += 1
        self.tables[self.born] = [list(table) for table in self.tables[parent]]
        self.owners[self.born] = self.owners[parent]
        for g, table in enumerate(self.tables[parent]):
            self.pages.share_all(g, table)

    def end(self, rng: Random) -> None:
        self.leave(self.pick(rng))

    def leave(self, seq: int) -> None:
        self.pages.release_all(self.tables.pop(seq))
        self.pages.leave(self.owners.pop(seq))

    def room(self, rng: Random) -> None:
        if rng.random() < 0.3:
            cached = sum(map(len, self.pages.cached))
            assert self.pages.drop_cached() == cached
            assert not any(self.pages.index) or any(self.pages.used)
        else:
            self.pages.make_room(rng.choice(self.groups))

    def drained(self) -> None:
        for seq in list(self.tables):
            self.leave(seq)
        self.pages.check(self.named())
        free, active, idle, *_ = self.pages.counts()
        assert (self.pages.used, active) == ([0] * len(self.ratios),) * 2
        assert free + sum(idle) == self.pages.count
        assert not any(partial.living for partial in self.pages.partial), "a request that left is still known"
