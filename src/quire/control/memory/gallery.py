"""The pictures of a memory's sequences: which pages hold what they were encoded to, what is still to be encoded, and
what may be found again. It knows neither pixels nor how a picture is encoded: a journal's Encode says when and where.

A picture is found by its key, whatever the text around it, and always as a whole: its pages are cached together and
evicted together. Who needs one that another sequence has just got shares its pages, and waits until it is encoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from quire.control.memory.pages import SCRATCH
from quire.control.memory.policies import HostPolicy, MediaPolicy, Span
from quire.control.request import Sequence
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import Encode, Table

if TYPE_CHECKING:
    from quire.control.memory.tables import PageTables, Resident, Tables

Place = tuple[int, int]
"""A group, and which picture of a sequence."""


class Encoding:
    """A picture on its way: `done` of its `parts`, by the sequence in slot `by[0]`, whose picture `by[1]` it is. The
    sequences that need it, `holders` of them, all name its `pages`; with them it is forgotten, unless it was kept."""

    __slots__ = ("by", "done", "holders", "kept", "pages", "parts")

    def __init__(self, parts: int, pages: Seq[int] = ()) -> None:
        self.parts, self.pages = parts, pages
        self.done = self.holders = 0
        self.by: Place | None = None
        self.kept = False

    @property
    def complete(self) -> bool:
        """All of it is encoded by the time of the next step's rows."""
        return self.done == self.parts


class Asked(NamedTuple):
    """What pictures would take: pages of each group to be filled; and the pages that are found, as (group, page)."""

    fresh: list[int]
    found: list[tuple[int, int]]


def one_of(g: int, medium: Medium, count: int) -> tuple[int, bytes]:
    """A picture that is coming, in so many pages of a group: one of another size is another, whatever its key."""
    return g, medium.key + count.to_bytes(4) + medium.parts.to_bytes(4)


def names(key: bytes, count: int) -> list[bytes]:
    """The names of a picture's pages."""
    return [key + i.to_bytes(4) for i in range(count)]


class Gallery:
    """The pictures in a memory of these tables; with `caching` they are kept for others. `seed` says which one is
    evicted first where nothing else does."""

    caching = True

    def __init__(self, tables: PageTables, seed: int = 0) -> None:
        self.tables, self.pages = tables, tables.pages
        self.seed = seed.to_bytes(8, "little", signed=True)
        self.sight = tables.geometry.sight
        self.policies = {g: one for g, one in enumerate(tables.policies) if isinstance(one, MediaPolicy)}
        self.hosts = {g: one for g, one in enumerate(tables.policies) if isinstance(one, HostPolicy)}
        self.coming: dict[tuple[int, bytes], Encoding] = {}
        self.begun: Encoding | None = None  # the last one that a step left in parts
        self.counts: dict[tuple[int, bytes], int] = {}  # pages of each picture that can be found
        self.torn = {g: self.pages.watch(g) for g in self.policies}  # keys of its pages that were evicted
        self.untold: list[tuple[Encode, Encoding]] = []  # since the last journal was taken
        self.runs = self.parts = self.hits = 0  # pictures and parts that were encoded; pictures that needn't be

    # What is there, and what is missing

    def _found(self, g: int, key: bytes, count: int) -> list[int] | None:
        """A picture's pages, if all of them are there."""
        index = self.pages.index[g]
        found = [index[name] for name in names(key, count) if name in index]
        return found if len(found) == count else None

    def _between(self, g: int, seq: Sequence, first: int, stop: int) -> Iterator[tuple[int, Span]]:
        """The pictures whose pages are first .. stop of a table, and which ones they are."""
        return ((i, s) for i, s in enumerate(self.policies[g].spans(seq)) if first <= s.first and s.stop <= stop)

    def asked(self, seq: Sequence, firsts: Seq[int], stops: Seq[int], known: set[tuple[int, bytes]]) -> Asked:
        """What it takes that a table has pages first .. stop of each group; what is `known` is counted already."""
        asked = Asked([0] * len(stops), [])
        for g in self.policies:
            for _, (medium, first, stop) in self._between(g, seq, firsts[g], stops[g]):
                picture = one_of(g, medium, stop - first)
                if picture in known or picture in self.coming:
                    continue
                known.add(picture)
                pages = self._found(g, medium.key, stop - first)
                if pages is None:
                    asked.fresh[g] += stop - first
                else:
                    asked.found.extend((g, page) for page in pages)
        return asked

    def peak(self, g: int, seq: Sequence, start: int, chunk: int | None = None) -> int:
        """The most pages that a sequence alone holds at once, of pictures from its token `start` on: those that two
        steps of `chunk` tokens read, as one may not be confirmed. Without a `chunk` all of them, a picture's once."""
        policy = self.policies[g]
        begin = policy.required(seq, start).start
        spans = [span for span in policy.spans(seq) if span.first >= begin]
        every = sum({medium.key: stop - first for medium, first, stop in spans}.values())
        if chunk is None:
            return every
        reach = [span.stop - policy.required(seq, max(span.medium.start + 1 - 2 * chunk, 0)).start for span in spans]
        return min(max(reach, default=0), every)

    def clear(self, seqs: Seq[Sequence]) -> None:
        """Nothing of these sequences' pictures is found, unless somebody uses it."""
        for g, policy in self.policies.items():
            for medium in (medium for seq in seqs for medium in seq.media):
                for name in names(medium.key, policy.group.pages(medium.rows)):
                    page = self.pages.find(g, name)
                    if page is not None and not self.pages.names(g, page):
                        self.pages.evict(g, page)
        self.tear()

    def reserve(self, seq: Sequence, tables: Tables, needs: list[int]) -> list[tuple[int, int]] | None:
        """Reserve pages for tables that are to be so many pages longer, and hold what is found of pictures among these:
        it is returned. None, and no change, if there is no room."""
        firsts = list(map(len, tables))
        asked = self.asked(seq, firsts, list(map(add, firsts, needs)), set())
        least = [asked.fresh[g] if g in self.policies else need for g, need in enumerate(needs)]
        resting = self.pages.resting(asked.found)
        if self.pages.reserve(list(map(add, least, resting.pages)), resting):
            self.hold(asked.found)
            return asked.found
        for g, _ in asked.found:  # what is found may lie in more large pages than it would fill
            least[g] += 1
        if not asked.found or not self.pages.affords(least):
            return None
        self.clear([seq])
        assert self.pages.reserve(least), "pages that can be had can't be reserved"
        return []

    # Into a table, and out of it

    def hold(self, found: list[tuple[int, int]]) -> None:
        """These pages are about to be used: until `let_go` they aren't evicted."""
        for g, page in found:
            self.pages.share(g, page)

    def let_go(self, found: list[tuple[int, int]]) -> None:
        """They are used by whom they were held for."""
        for g, page in found:
            self.pages.release(g, (page,))

    def extend(self, seq: Sequence, resident: Resident, g: int, stop: int) -> None:
        """The table has the pages of the next pictures too, up to `stop`. They were reserved, and what is found is held
        by somebody."""
        table = resident.tables[g]
        at, fresh = len(table), list[int]()
        for i, (medium, first, last) in self._between(g, seq, at, stop):
            picture = one_of(g, medium, last - first)
            coming, pages = self.coming.get(picture), self._found(g, medium.key, last - first)
            if coming is None and pages is not None:
                self.hits += 1
            elif coming is None:
                pages = self.tables.take(g, last - first, resident.owner, resident.slot, first)
                coming = self.coming[picture] = Encoding(medium.parts, pages)
            else:
                pages = list(coming.pages)
            if coming is not None:
                if coming.holders:
                    self.hold([(g, page) for page in pages])
                self._follow(resident, (g, i), coming)
            else:
                self.hold([(g, page) for page in pages])
            fresh += pages
        table += fresh
        self.tables.entries.append(Table(resident.slot, g, at, tuple(fresh)))

    @staticmethod
    def _follow(resident: Resident, place: Place, coming: Encoding) -> None:
        resident.pictures[place] = coming
        resident.drops_at = 0  # the next tokens that are computed are looked at
        coming.holders += 1

    def follow(self, child: Resident, parent: Resident) -> None:
        """A fork needs what its parent does."""
        for place, coming in parent.pictures.items():
            self._follow(child, place, coming)

    def release(self, tables: Tables, media: Seq[Medium]) -> Tables:
        """One sequence fewer names the pages of its pictures: one picture after the other, so that they are evicted in
        the order of a random value each (Jenga §5.3), and before what its tokens left. Returns the other tables."""
        left = list(tables)
        order = sorted(range(len(media)), key=lambda i: hashlib.sha256(media[i].key + self.seed).digest(), reverse=True)
        for g, policy in self.policies.items():
            if tables[g]:
                stops = [0]
                for medium in media:
                    stops.append(stops[-1] + policy.group.pages(medium.rows))
                for i in order:
                    self.pages.release(g, tables[g][stops[i] : stops[i + 1]])
                left[g] = []
        return left

    def leave(self, resident: Resident) -> None:
        """A sequence leaves its slot. What it was encoding another one begins anew, if one needs it; what no journal
        tells of yet isn't done."""
        self.take_back(resident.slot)
        for place, coming in resident.pictures.items():
            coming.holders -= 1
            if not coming.complete and coming.by is not None and coming.by[0] == resident.slot:
                coming.by, coming.done = None, 0
            if not coming.holders:
                self._forget(place[0], coming)
        resident.pictures = {}

    def _forget(self, g: int, coming: Encoding) -> None:
        for picture in [picture for picture, other in self.coming.items() if other is coming and picture[0] == g]:
            del self.coming[picture]

    def tear(self) -> None:
        """Of a picture of which a page was evicted nothing is found any more."""
        for g, torn in self.torn.items():
            for key in dict.fromkeys(name[:-4] for name in torn):
                for name in names(key, self.counts.pop((g, key), 0)):
                    page = self.pages.find(g, name)
                    if page is None:
                        continue
                    if self.pages.names(g, page):
                        self.pages.withdraw(g, page)
                    else:
                        self.pages.evict(g, page)
            torn.clear()

    def forget(self) -> None:
        """No page has a name any more. Who needs a picture that is on its way gets it, and nobody new does."""
        for coming in self.coming.values():
            coming.kept = True
        self.coming.clear()
        self.counts.clear()
        for torn in self.torn.values():
            torn.clear()

    # Encoding

    def encode(self, seq: Sequence, resident: Resident, end: int, most: int) -> tuple[int, int]:
        """See KVMemory."""
        if self.sight == "off":
            return self._pass(seq, resident, end, most)
        start, parts = seq.planned, 0
        for i, medium in enumerate(seq.media):
            if medium.start >= end:
                break
            needed = medium.end > start
            for g, host in self.hosts.items() if needed else ():
                if (g, i) not in resident.pictures:
                    self._follow(resident, (g, i), Encoding(medium.parts))
                at, skip = medium.start // host.group.run_tokens + 1, max(start - medium.start, 0)
                parts += self._go_on(resident, (g, i), at, most - parts, skip)
            for g in self.policies:
                if (g, i) in resident.pictures:
                    at = next(span.first for j, span in enumerate(self.policies[g].spans(seq)) if j == i)
                    parts += self._go_on(resident, (g, i), at, most - parts)
            if any(j == i and not coming.complete for (_, j), coming in resident.pictures.items()):
                return max(medium.start, start), parts
        return end, parts

    def _pass(self, seq: Sequence, resident: Resident, end: int, most: int) -> tuple[int, int]:
        """Encode pictures for this step alone: whole ones, all of a prompt's together where its tokens attend both
        ways. What comes first in a step is encoded however many parts it has, and then no more than `most`."""
        told = {entry.medium for entry, _ in self.untold if entry.slot == resident.slot}
        needed = [(i, medium) for i, medium in enumerate(seq.media) if medium.start < end and medium.end > seq.planned]
        parts = 0
        for pictures in [needed] if self.tables.geometry.both_ways and needed else [[one] for one in needed]:
            fresh = [(i, medium) for i, medium in pictures if i not in told]
            more = sum(medium.parts for _, medium in fresh)
            if self.untold and parts + more > most:
                return max(pictures[0][1].start, seq.planned), parts
            for i, medium in fresh:
                self._tell(Encode(-1, resident.slot, i, 0, 0, medium.parts), Encoding(medium.parts))
            parts += more
        return end, parts

    def _go_on(self, resident: Resident, place: Place, at: int, most: int, skip: int = 0) -> int:
        """Encode more parts of a picture, if that is this sequence's turn. Returns how many."""
        coming, (g, i) = resident.pictures[place], place
        if coming.by is None:
            coming.by = resident.slot, i
        count = min(coming.parts - coming.done, most)
        if (
            coming.by != (resident.slot, i)
            or count <= 0
            or (coming.done + count < coming.parts and self._awaits(coming))
        ):
            return 0
        self._tell(Encode(g, resident.slot, i, at, coming.done, count, skip), coming)
        if not coming.complete:
            self.begun = coming
        return count

    def _awaits(self, coming: Encoding) -> bool:
        """Another picture is encoded in part. A runner holds on to the features of such a one: of one at a time."""
        other = self.begun
        return other is not None and other is not coming and 0 < other.done < other.parts

    def _tell(self, entry: Encode, coming: Encoding) -> None:
        self.tables.entries.append(entry)
        self.untold.append((entry, coming))
        coming.done += entry.parts

    def take_back(self, slot: int | None = None) -> None:
        """What no journal tells of yet isn't done, of this slot or of all."""
        for entry, coming in [one for one in self.untold if slot in (None, one[0].slot)]:
            self.tables.entries.remove(entry)
            self.untold.remove((entry, coming))
            coming.done -= entry.parts

    def told(self) -> None:
        """The journal is taken: its pictures will be encoded."""
        for entry, coming in self.untold:
            self.parts += entry.parts
            self.runs += entry.first + entry.parts == coming.parts
        self.untold = []

    def commit(self, seq: Sequence, resident: Resident) -> None:
        """Tokens were computed: the pictures that they read are encoded, and can be found by others."""
        for (g, i), coming in list(resident.pictures.items()):
            medium = seq.media[i]
            if not coming.complete or seq.computed <= medium.start:
                continue
            if g in self.hosts:
                if seq.computed < medium.end:
                    continue
            elif not coming.kept:
                coming.kept = True
                if self.caching:
                    for page, name in zip(coming.pages, names(medium.key, len(coming.pages))):
                        self.pages.publish(g, page, name)
                    self.counts[g, medium.key] = max(len(coming.pages), self.counts.get((g, medium.key), 0))
                del self.coming[one_of(g, medium, len(coming.pages))]
            del resident.pictures[g, i]
            coming.holders -= 1

    def without(self, seq: Sequence, tables: Tables, tokens: int) -> Tables:
        """The tables of a sequence that goes on behind so many tokens, without pictures: these are looked for when it
        does. Pictures aren't swapped either."""
        return [
            [SCRATCH] * self.policies[g].required(seq, tokens).start if g in self.policies else table
            for g, table in enumerate(tables)
        ]

    def check(self) -> None:
        """Assert that what is coming is awaited by as many as it says, and that no picture is found in part. Models
        that have the memory in common may have taken pages since this one last did."""
        self.tear()
        found: dict[int, int] = {}
        for resident in self.tables.residents.values():
            for place, coming in resident.pictures.items():
                found[id(coming)] = found.get(id(coming), 0) + 1
                for page in coming.pages:
                    assert page in resident.tables[place[0]], f"a picture's page {page} is in no table"
        for coming in self.coming.values():
            assert found.get(id(coming), 0) == coming.holders > 0, "who needs a picture is miscounted"
        for g in self.policies:
            there = sum(count for (group, _), count in self.counts.items() if group == g)
            assert there == len(self.pages.index[g]), "pages of a picture are lost, or found without it"
