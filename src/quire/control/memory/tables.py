"""Page tables: which pages hold the tokens of each resident sequence (PagedAttention §4.2-4.4).

Pages are reference-counted; a fork shares all of them and the first write to a shared one copies it. Every change is
written to a journal, which the runner replays.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.control.memory.pages import SCRATCH, Pages
from quire.control.memory.policies import FullPolicy, LayerPolicy, WindowPolicy
from quire.control.request import Sequence
from quire.vocabulary.plan import Copy, Entry, Poison, Table
from quire.vocabulary.specs import Geometry


class Resident:
    """A sequence in memory: its slot, its tables, and cursors over them."""

    __slots__ = ("capacity", "coming", "committed", "first", "forked", "held", "slot", "tables")

    def __init__(self, slot: int, groups: int) -> None:
        self.slot = slot
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # the first logical page still held, a group
        self.committed = 0  # pages published or looked at by `commit`
        self.capacity = 0  # tokens that the tables have room for
        self.held = 0  # tokens that are or will be written, as far as asked for
        self.coming = (0, 0)  # prompt pages that others may wait for
        self.forked = False  # the page under `planned` may be shared


class PageTables:
    """The slots and page tables of resident sequences. See KVMemory for the methods that it has too; `order` and
    `debug` as in PagedMemory."""

    def __init__(self, geometry: Geometry, order: Iterable[int] | None = None, debug: bool = False) -> None:
        self.geometry, self.debug = geometry, debug
        self.page_tokens = geometry.groups[0].page_tokens
        self.policies: list[LayerPolicy] = [
            FullPolicy(g.page_tokens) if g.window is None else WindowPolicy(g.page_tokens, g.window)
            for g in geometry.groups
        ]
        self.windowed = any(g.window is not None for g in geometry.groups)
        self.pages = Pages(geometry.pages - 1, len(geometry.groups), order)
        self.slots = list(range(geometry.slots - 1, 0, -1))
        self.residents: dict[int, Resident] = {}
        self.entries: list[Entry] = []
        self.releases = 0  # times that pages or slots came back
        self.copies = 0  # pages copied on write

    def _reside(self, seq: Sequence, tables: list[list[int]]) -> Resident:
        """Give a slot and page tables; the pages' references are counted by the caller."""
        resident = Resident(self.slots.pop(), len(self.policies))
        self.residents[seq.id] = resident
        for g, pages in enumerate(tables):
            resident.tables[g] = pages
            if pages:
                if pages[0] == SCRATCH:
                    resident.first[g] = next((i for i, page in enumerate(pages) if page != SCRATCH), len(pages))
                self.entries.append(Table(resident.slot, g, 0, tuple(pages)))
        return resident

    def grow(self, seq: Sequence, length: int) -> bool:
        resident = self.residents[seq.id]
        if length <= resident.capacity and not resident.forked:
            if length > resident.held:
                resident.held = length
            return True
        return self._extend(seq, resident, length, seq.planned)

    def _extend(self, seq: Sequence, resident: Resident, length: int, start: int) -> bool:
        """Room for tokens [start, length) in every group, or no change at all."""
        size = self.page_tokens
        logical = -(-length // size)
        at, copies = start // size, []
        if resident.forked and length > start:
            refs = self.pages.refs
            copies = [g for g, table in enumerate(resident.tables) if at < len(table) and refs[table[at]] > 1]
        if length > resident.capacity or copies:
            need = len(copies) + sum([max(logical - len(table), 0) for table in resident.tables])
            if need > self.pages.available:
                return False
            for g in copies:
                self._copy_on_write(seq, resident, g, at)
            for g, table in enumerate(resident.tables):
                if logical > len(table):
                    fresh = tuple([self._take(g, seq) for _ in range(logical - len(table))])
                    self.entries.append(Table(resident.slot, g, len(table), fresh))
                    table.extend(fresh)
            resident.capacity = max(resident.capacity, logical * size)
        if length > start:
            resident.forked = False
        resident.held = max(resident.held, length)
        return True

    def _take(self, group: int, seq: Sequence) -> int:
        page = self.pages.take(group, seq.id)
        if self.debug:
            self.entries.append(Poison(group, page))
        return page

    def _copy_on_write(self, seq: Sequence, resident: Resident, group: int, at: int) -> None:
        """Replace the shared page at logical page `at` by a private copy (§4.4, Figure 8)."""
        old = resident.tables[group][at]
        new = self._take(group, seq)
        self.copies += 1
        self.entries.append(Copy(group, old, new))
        self.entries.append(Table(resident.slot, group, at, (new,)))
        resident.tables[group][at] = new
        self.pages.refs[old] -= 1  # it is shared: others keep it

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        assert parent.quiet, f"sequence {parent.id} is forked while in flight"
        if not self.slots:
            return False
        source = self.residents[parent.id]
        count = -(-parent.computed // self.page_tokens)
        tables = [table[:count] for table in source.tables]
        for table in tables:
            self.pages.share_all(table)
        resident = self._reside(child, tables)
        resident.committed = min(source.committed, parent.computed // self.page_tokens)
        resident.capacity = count * self.page_tokens
        resident.held = parent.computed
        source.forked = resident.forked = True
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.quiet, f"sequence {seq.id} is freed while in flight"
        resident = self.residents.pop(seq.id)
        for table in resident.tables:
            self._release(table)
        self.slots.append(resident.slot)
        self.releases += 1

    def _drop(self, seq: Sequence, resident: Resident) -> None:
        """Release the pages that no token to come can see."""
        for g, policy in enumerate(self.policies):
            first = min(policy.live(seq.computed, seq.computed + 1).start, len(resident.tables[g]))
            if first > resident.first[g]:
                gone = resident.tables[g][resident.first[g] : first]
                resident.tables[g][resident.first[g] : first] = [SCRATCH] * len(gone)
                self.entries.append(Table(resident.slot, g, resident.first[g], (SCRATCH,) * len(gone)))
                resident.first[g] = first
                self._release(gone)

    def _release(self, pages: Seq[int]) -> None:
        self.pages.release_all(pages)
        self.releases += 1

    def slot(self, seq: Sequence) -> int:
        return self.residents[seq.id].slot

    def held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        pages = [{page for seq in seqs for page in self.residents[seq.id].tables[g]} for g in range(len(self.policies))]
        count = sum(len(group - {SCRATCH}) for group in pages)
        return count * self.geometry.page_bytes, max(len(group) for group in pages) * self.page_tokens

    def references(self) -> list[int]:
        """How many tables of resident sequences name each page. Asserts what must hold of the tables themselves."""
        counts = [0] * (self.pages.total + 1)
        slots = set(self.slots)
        for resident in self.residents.values():
            assert resident.slot not in slots, f"slot {resident.slot} is used twice"
            slots.add(resident.slot)
            for g, table in enumerate(resident.tables):
                assert all(page == SCRATCH for page in table[: resident.first[g]]), "a dropped page is still held"
                assert all(page != SCRATCH for page in table[resident.first[g] :]), "a live page is missing"
                assert len(table) * self.page_tokens >= resident.held, "a table is shorter than its sequence"
                for page in table:
                    counts[page] += page != SCRATCH
        assert slots == set(range(1, self.geometry.slots)), "a slot is lost"
        return counts
