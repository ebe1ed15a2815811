"""Page tables: which pages hold the tokens of each resident sequence (PagedAttention §4.2-4.4), a table a layer group.

Pages are reference-counted; a fork shares all of them and the first write to a shared one copies it. Every change is
written to a journal, which the runner replays.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from quire.control.memory.gallery import Encoding, Gallery
from quire.control.memory.large import LargePages
from quire.control.memory.pages import ALIGNED, SCRATCH, Empty, Ledger
from quire.control.memory.part import Part
from quire.control.memory.policies import (
    FAR,
    POLICIES,
    HostPolicy,
    LayerPolicy,
    MediaPolicy,
    Policies,
    forgets,
    grows,
)
from quire.control.request import Sequence
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import Copy, Entry, Poison, Table
from quire.vocabulary.specs import Geometry

Tables = list[list[int]]
"""Page ids, a list a group; SCRATCH where a page was dropped or is not needed."""


class Resident:
    """A sequence in memory: its slot, its tables, and cursors over them."""

    __slots__ = (
        "committed", "drops_at", "expected", "first", "forked", "gone", "held", "marks", "media", "owner", "pictures",
        "room", "slot", "stale", "tables", "trails",
    )  # fmt: skip

    def __init__(self, slot: int, tables: Tables, owner: int) -> None:
        self.slot, self.tables = slot, tables
        self.media: tuple[Medium, ...] = ()
        self.owner = owner  # whose pages these are, for the ledger: a sequence of its request
        # The first logical page still held, a group
        self.first = [next((i for i, page in enumerate(table) if page), len(table)) for table in tables]
        self.room = 0  # tokens that all tables have pages for
        self.held = 0  # tokens that are or will be written, as far as asked for
        self.committed = 0  # tokens whose pages were published
        self.drops_at = 0  # computed tokens from which on a page more is of no use
        self.gone = [0] * len(tables)  # tokens of its prompt that have no place any more, a group
        self.expected = (0, 0)  # keys of its prompt that others may wait for
        self.forked = False  # a page that will be written may be shared, or a picture's be missing
        self.stale = False  # prefixes were forgotten since it came: nobody else finds what it holds
        self.pictures: dict[tuple[int, int], Encoding] = {}  # by group and which one it is: those that aren't confirmed
        # See quire.control.memory.retention
        self.marks: tuple[int, ...] = ()
        self.trails: dict[int, deque[tuple[int, int, bytes]]] = {}


class PageTables:
    """The slots and page tables of resident sequences. See KVMemory for the methods that it has too; `order`,
    `balanced` and `aligned` as in Ledger, `association` as in LargePages. With `debug` pages are poisoned when they are
    given out. `part` is that of the model in a ledger which it has in common with others."""

    stack: Callable[[Iterable[int]], Empty] = list

    def __init__(
        self, geometry: Geometry, policies: Policies = POLICIES, order: Iterable[int] | None = None,
        debug: bool = False, association: str = "bulk", part: Part | None = None, *, aligned: int = ALIGNED,
        balanced: bool = True,
    ) -> None:  # fmt: skip
        self.geometry, self.debug, self.association = geometry, debug, association
        self.groups = geometry.groups
        self.policies: list[LayerPolicy] = [policies[group.kind](group) for group in geometry.groups]
        if geometry.sight == "inside":
            self.policies[geometry.host] = HostPolicy(geometry.groups[geometry.host])
        self.keeping = {policy for policy in self.policies if not forgets(policy)}  # that need all pages to the end
        self.dropping = [(g, p) for g, p in enumerate(self.policies) if p.media or p not in self.keeping]  # the others
        self.back = [0] * len(self.policies)  # tokens that pages are held longer than they are read, a group
        self.growing = [grows(policy) for policy in self.policies]
        self.shrinking = any(policy.shrinks for policy in self.policies)
        ids = [group.ids for group in geometry.groups]
        self.pages: Ledger | LargePages | Part
        if part is None:
            self.pages = ledger_of(geometry, ids, association, order, self.stack, balanced=balanced, aligned=aligned)
        else:
            self.pages = part
        self.slots = list(range(geometry.slots - 1, 0, -1))
        self.residents: dict[int, Resident] = {}
        self.entries: list[Entry] = []
        self.gallery = Gallery(self)
        self.copies = 0  # pages copied on write

    def reside(self, seq: Sequence, tables: Tables, length: int = 0, owner: int | None = None) -> Resident:
        """Give a slot and page tables; the pages' references are counted by the caller. It will have `length` tokens
        soon. `owner` as in Resident, where it isn't the sequence itself."""
        resident = Resident(self.take_slot(tables, length), tables, seq.id if owner is None else owner)
        resident.media = seq.media
        self.residents[seq.id] = resident
        for g, pages in enumerate(tables):
            if pages:
                self.entries.append(Table(resident.slot, g, 0, tuple(pages)))
        return resident

    def grow(self, seq: Sequence, length: int) -> bool:
        resident = self.residents[seq.id]
        if length <= resident.room and not resident.forked:
            if length > resident.held:
                resident.held = length
            return True
        return self._extend(seq, resident, length, seq.planned)

    def _extend(self, seq: Sequence, resident: Resident, length: int, start: int, reserved: bool = False) -> bool:
        """What computing tokens [start, length) reads or writes is there, and what it writes is private; or no change
        at all. `reserved`: pages for this and more were reserved before."""
        tables = resident.tables
        if length > start:
            copies = self._shared(seq, resident, start, length) if resident.forked else []
            more = [policy.reads(seq, start, length).stop - len(table) for policy, table in zip(self.policies, tables)]
            if copies or max(more) > 0:
                needs = [count if count > 0 else 0 for count in more]
                for g, _ in copies:
                    needs[g] += 1
                held = None
                if not reserved and seq.media:
                    held = self.gallery.reserve(seq, tables, needs)
                    if held is None:
                        return False
                elif not reserved and not self.pages.reserve(needs):
                    return False
                for g, at in copies:
                    self._copy_on_write(resident, g, at)
                for g, count in enumerate(more):
                    if count > 0 and self.policies[g].media:
                        self.gallery.extend(seq, resident, g, len(tables[g]) + count)
                    elif count > 0:
                        at, slot = len(tables[g]), resident.slot
                        fresh = tuple(self.take(g, count, resident.owner, slot, at))
                        self.entries.append(Table(slot, g, at, fresh))
                        tables[g].extend(fresh)
                if held:
                    self.gallery.let_go(held)
                resident.room = self.room_of(seq, resident)
            resident.forked = False
        resident.room, resident.held = max(resident.room, length), max(resident.held, length)
        return True

    def _shared(self, seq: Sequence, resident: Resident, start: int, length: int) -> list[tuple[int, int]]:
        """The pages, as (group, logical page), that will be written and that others name too."""
        found = []
        for g, (policy, table) in enumerate(zip(self.policies, resident.tables)):
            writes = policy.writes(seq, start, length)
            there = range(writes.start, min(writes.stop, len(table)))
            found += [(g, i) for i in there if self.pages.is_shared(g, table[i])]
        return found

    def room_of(self, seq: Sequence, resident: Resident) -> int:
        """Tokens that can be computed in these pages."""
        room = FAR
        for policy, table, gone, growing in zip(self.policies, resident.tables, resident.gone, self.growing):
            if growing or len(table) < policy.reads(seq, FAR, FAR + 1).stop:
                room = min(room, policy.room(seq, len(table)) + gone)
        return room

    def take_slot(self, tables: Tables, length: int) -> int:
        """A free slot, for a sequence with these tables that will have `length` tokens soon."""
        return self.slots.pop()

    def take(self, group: int, count: int, owner: int, slot: int = 0, at: int = 0) -> list[int]:
        """Pages of its own for logical pages `at`, `at` + 1, ... of a slot (0: of one that isn't known yet)."""
        pages = self.pick(group, count, owner, slot, at)
        if self.gallery.policies:
            self.gallery.tear()
        if self.debug:
            self.entries += [Poison(group, page) for page in pages]
        return pages

    def pick(self, group: int, count: int, owner: int, slot: int, at: int) -> list[int]:
        """Which pages these are. The caller has reserved them."""
        return self.pages.take_all(group, count, owner)

    def _copy_on_write(self, resident: Resident, group: int, at: int) -> None:
        """Replace the shared page at logical page `at` by a private copy (§4.4, Figure 8)."""
        old = resident.tables[group][at]
        [new] = self.take(group, 1, resident.owner, resident.slot, at)
        self.copies += 1
        self.entries.append(Copy(group, old, new))
        self.entries.append(Table(resident.slot, group, at, (new,)))
        resident.tables[group][at] = new
        self.pages.release(group, (old,))  # others keep it

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        assert parent.quiet, f"sequence {parent.id} is forked while in flight"
        if not self.slots:
            return False
        source, computed = self.residents[parent.id], parent.computed
        tables = []
        for g, (policy, table) in enumerate(zip(self.policies, source.tables)):
            pages = table[: policy.reads(parent, computed, computed).stop]
            self.pages.share_all(g, pages)
            tables.append(pages)
        resident = self.reside(child, tables, owner=source.owner)
        resident.committed, resident.held, resident.drops_at = source.committed, computed, source.drops_at
        resident.marks, resident.gone, resident.stale = source.marks, list(source.gone), source.stale
        if source.pictures:
            self.gallery.follow(resident, source)
        resident.room = min(source.room, self.room_of(child, resident))
        source.forked = resident.forked = True
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.quiet, f"sequence {seq.id} is freed while in flight"
        self._leave(self.residents.pop(seq.id))

    def _leave(self, resident: Resident) -> None:
        tables = self._last_used(resident)
        if resident.media:
            self.gallery.leave(resident)
            tables = self.gallery.release(tables, resident.media)
        self.pages.release_all(tables)
        self.pages.leave(resident.owner)
        self.slots.append(resident.slot)
        self.pages.releases += 1

    def _last_used(self, resident: Resident) -> Tables:
        """The pages that a sequence in memory has a part in as it leaves."""
        return resident.tables

    def _drop(self, seq: Sequence, resident: Resident) -> None:
        """Release the pages that no token to come can see, nor any of the last few (`back`)."""
        resident.drops_at = FAR
        for g, policy in self.dropping:
            table, held = resident.tables[g], resident.first[g]
            start = max(seq.computed - self.back[g], 0)
            first = min(policy.reads(seq, start, start + 1).start, len(table))
            if first > held:
                gone = table[held:first]
                table[held:first] = [SCRATCH] * len(gone)
                self.entries.append(Table(resident.slot, g, held, (SCRATCH,) * len(gone)))
                resident.first[g] = first
                self.pages.release(g, gone)
                self._dropped(seq, resident, g, gone)
            if policy.shrinks and seq.computed >= seq.prompt_len:
                resident.gone[g] = policy.gone(seq)
                stop = policy.reads(seq, seq.prompt_len, resident.held).stop
                self.pages.release(g, table[stop:])
                del table[stop:]
            resident.drops_at = min(resident.drops_at, self._next_drop(g, seq, first))
        if self.shrinking:
            resident.room = max(self.room_of(seq, resident), resident.held)  # steps in flight may be behind a prompt

    def _dropped(self, seq: Sequence, resident: Resident, group: int, pages: list[int]) -> None:
        """These pages, the last before the first one held, were dropped."""

    def _next_drop(self, group: int, seq: Sequence, first: int) -> int:
        """Computed tokens from which on a group needs page `first` no more; no later than that is a page full."""
        policy, back = self.policies[group], self.back[group]
        if policy.shrinks and seq.computed < seq.prompt_len:
            return seq.prompt_len
        if isinstance(policy, MediaPolicy):
            return policy.next_drop(seq)
        if policy.shrinks:
            return FAR
        start = max(seq.computed + 1 - back, 0)
        ends = range(start, start + policy.group.run_tokens)
        if policy.reads(seq, ends.stop - 2, ends.stop - 1).start <= first:  # so it is where pages are left one by one
            return ends.stop - 1 + back
        return start + bisect(ends, False, key=lambda end: policy.reads(seq, end, end + 1).start > first) + back

    def slot(self, seq: Sequence) -> int:
        return self.residents[seq.id].slot

    def everybody(self) -> Iterable[Resident]:
        """Of sequences in memory, and of those that were swapped out."""
        return self.residents.values()

    def held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        size = tokens = 0
        for g, (group, policy) in enumerate(zip(self.groups, self.policies)):
            if policy.media:
                continue
            pages = {page for seq in seqs for page in self.residents[seq.id].tables[g]} - {SCRATCH}
            size += len(pages) * group.page_bytes
            tokens = max(tokens, group.until(len(pages)))
        return size, tokens

    def named(self) -> list[dict[int, int]]:
        """How many tables of resident sequences name each page, a group. Asserts what must hold of the tables."""
        counts: list[dict[int, int]] = [{} for _ in self.groups]
        slots = set(self.slots)
        for resident in self.residents.values():
            assert resident.slot not in slots, f"slot {resident.slot} is used twice"
            slots.add(resident.slot)
            assert resident.room >= resident.held, "the tables are shorter than their sequence"
            for g, table in enumerate(resident.tables):
                first = resident.first[g]
                assert not any(table[:first]), "a dropped page is still held"
                assert all(table[first:]), "a live page is missing"
                assert len(table) <= self.groups[g].table_width, "a table is wider than the runner's"
                for page in table[first:]:
                    counts[g][page] = counts[g].get(page, 0) + 1
        assert slots == set(range(1, self.geometry.slots)), "a slot is lost"
        return counts


def ledger_of(
    geometry: Geometry, ids: Seq[range], association: str = "bulk", order: Iterable[int] | None = None,
    stack: Callable[[Iterable[int]], Empty] = list, *, balanced: bool = True, aligned: int = ALIGNED,
) -> Ledger | LargePages:  # fmt: skip
    """The ledger of a memory's pages, whose ids are those, a range a group; of two levels where there are large pages.
    `order`, `stack`, `balanced` and `aligned` as in Ledger."""
    spans = [group.run_tokens // group.run_pages or 1 for group in geometry.groups]
    if not geometry.large_bytes:
        return Ledger(ids, order, stack, spans, balanced=balanced, aligned=aligned)
    assert (balanced, aligned > 0) == (True, True), "of two levels the pages of all groups have one order"
    ratios = [geometry.large_bytes // group.page_bytes for group in geometry.groups]
    return LargePages(ratios, len(ids[0]) // ratios[0], association, spans)
