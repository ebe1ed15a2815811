"""Swapping: sequences whose pages were copied to host memory, to come back later (PagedAttention §4.5).

Host memory has the same ledger as the device; the tables of a swapped sequence name pages there. What a page holds is
said by its sequence's keys, so one that is still cached on the device is shared, not copied back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import groupby
from operator import add, itemgetter

from quire.control.memory.large import LargePages
from quire.control.memory.pages import SCRATCH, Ledger
from quire.control.memory.part import Part
from quire.control.memory.prefix import Prefixes
from quire.control.memory.tables import PageTables, Resident, Tables, ledger_of
from quire.control.request import Sequence
from quire.vocabulary.plan import In, Out, Poison

Moves = dict[tuple[int, int], int]
"""Pages, as (group, page), and where the content of each goes; SCRATCH while that isn't known."""


class Swap:
    """The host pages of a memory of these tables, whose sequences compute up to `chunk` tokens in a step."""

    def __init__(self, tables: PageTables, prefixes: Prefixes, chunk: int) -> None:
        self.tables, self.prefixes, self.chunk = tables, prefixes, chunk
        host_ids = [group.host_ids for group in tables.groups]
        self.host = ledger_of(tables.geometry, host_ids, tables.association)
        # The ledger of large pages has a scratch one too, and host memory none: its pages are numbered from 1 on.
        large = tables.geometry.large_bytes
        self.shift = [large // group.page_bytes - 1 if large else 0 for group in tables.groups]
        self.residents: dict[int, Resident] = {}  # with host pages in their tables
        self.out_bytes = self.in_bytes = 0

    def out(self, seqs: Seq[Sequence]) -> bool:
        """Copy every page of these sequences to host pages, a shared one once, and let go of pages and slots."""
        assert all(seq.quiet for seq in seqs), "a sequence is swapped out while in flight"
        tables = self.tables
        residents = [tables.residents[seq.id] for seq in seqs]
        moves = {move: to for move, to in _pages(residents).items() if not tables.policies[move[0]].media}
        if not self.host.reserve(self._counts(moves)):
            return False
        owner = residents[0].owner
        for g, run in groupby(list(moves), itemgetter(0)):
            pages = [page for _, page in run]
            for page, to in zip(pages, self.host.take_all(g, len(pages), owner)):
                moves[g, page] = to
                tables.entries.append(Out(g, page, to - self.shift[g]))
            self.out_bytes += len(pages) * tables.groups[g].page_bytes
        for seq, resident in zip(seqs, residents):
            tables.free(seq)
            resident.tables = _renamed(tables.gallery.without(seq, resident.tables, seq.computed), moves)
            self.residents[seq.id] = resident
        _count(self.host, residents)
        if tables.debug:
            tables.entries += [Poison(g, page) for g, page in moves if tables.pages.is_empty(g, page)]
        return True

    def back(self, seqs: Seq[Sequence]) -> bool:
        """Bring sequences that were swapped out together back into pages: copied, or shared with cached ones that are
        still there."""
        tables, ledger = self.tables, self.tables.pages
        away = [self.residents[seq.id] for seq in seqs]
        moves, names = _pages(away), self._names(seqs, away)
        for (g, host), name in names.items():
            moves[g, host] = ledger.find(g, name) or SCRATCH
        if len(seqs) > len(tables.slots):
            return False
        if not self._reserve(moves, self._to_go_on(seqs, away)):
            if tables.residents:
                return False
            # What is found may lie in more large pages than it would fill: without it they fit, alone.
            self.prefixes.gather()
            moves = dict.fromkeys(moves, SCRATCH)
            if not self._reserve(moves, [0] * len(tables.groups)):
                return False
        for g, page in dict.fromkeys((g, page) for (g, _), page in moves.items() if page):
            ledger.share(g, page)
        owner = away[0].owner
        for g, run in groupby([move for move, page in moves.items() if not page], itemgetter(0)):
            hosts = list(run)
            for (_, host), page in zip(hosts, tables.take(g, len(hosts), owner)):
                moves[g, host] = page
                tables.entries.append(In(g, host - self.shift[g], page))
                if (g, host) in names:
                    ledger.publish(g, page, names[g, host])
            self.in_bytes += len(hosts) * tables.groups[g].page_bytes
        for seq, old in zip(seqs, away):
            self.free(seq)
            resident = tables.reside(seq, _renamed(old.tables, moves), owner=owner)
            resident.room, resident.held, resident.gone = old.room, old.held, old.gone
            resident.committed, resident.forked, resident.drops_at = old.committed, old.forked, old.drops_at
            resident.marks, resident.stale = old.marks, old.stale
            if seq.media:  # its pictures are missing
                resident.forked, resident.room = True, max(tables.room_of(seq, resident), seq.computed)
                resident.held = min(resident.held, resident.room)
        _count(ledger, [tables.residents[seq.id] for seq in seqs])
        return True

    def _to_go_on(self, seqs: Seq[Sequence], away: list[Resident]) -> list[int]:
        """Pages of each group: one more for each of them; alone, those of their next step."""
        tables = self.tables
        if tables.residents:
            return [len(seqs)] * len(tables.groups)
        needs = [0] * len(tables.groups)
        known: set[tuple[int, bytes]] = set()
        for seq, resident in zip(seqs, away):
            end = max(min(len(seq.tokens), seq.computed + self.chunk), seq.computed + 1)
            firsts, stops = [len(table) for table in resident.tables], [0] * len(tables.groups)
            for g, (policy, table) in enumerate(zip(tables.policies, resident.tables)):
                if policy.media:
                    stops[g] = policy.reads(seq, seq.computed, end).stop
                else:
                    needs[g] += max(policy.reads(seq, seq.computed, end).stop - len(table), 0) + resident.forked
            asked = tables.gallery.asked(seq, firsts, stops, known)
            needs = list(map(add, needs, asked.fresh))
            for g, _ in asked.found:
                needs[g] += 1
        return needs

    def _reserve(self, moves: Moves, spare: list[int]) -> bool:
        """Whether there are pages for all that has no page yet, `spare` more of each group, and those that are
        cached."""
        ledger = self.tables.pages
        # Of sequences that drew the same tokens several host pages may come back to one.
        resting = ledger.resting(dict.fromkeys((g, page) for (g, _), page in moves.items() if page))
        missing = self._counts(move for move, page in moves.items() if not page)
        return ledger.reserve([sum(counts) for counts in zip(missing, resting.pages, spare)], resting)

    def _names(self, seqs: Seq[Sequence], away: list[Resident]) -> dict[tuple[int, int], bytes]:
        """What host pages hold, where it may be found on the device."""
        found: dict[tuple[int, int], bytes] = {}
        for seq, resident in zip(seqs, away) if self.prefixes.caching else ():
            if resident.stale:
                continue
            for g, policy in enumerate(self.tables.policies):
                table, first = resident.tables[g], resident.first[g]
                last = min(policy.group.whole(resident.committed), len(table))
                if policy.unit:
                    names = self.prefixes.names(g, seq.keys, first, last)
                    found |= {(g, page): name for page, name in zip(table[first:last], names)}
        return found

    def _counts(self, pages: Iterable[tuple[int, int]]) -> list[int]:
        counts = [0] * len(self.tables.groups)
        for g, _ in pages:
            counts[g] += 1
        return counts

    def free(self, seq: Sequence) -> None:
        """A swapped sequence ended, or came back: let go of its host pages."""
        resident = self.residents.pop(seq.id)
        self.host.release_all(resident.tables)
        self.host.leave(resident.owner)

    def check(self) -> None:
        """Assert that every host page is free or named by a swapped sequence."""
        named: list[dict[int, int]] = [{} for _ in self.tables.groups]
        for resident in self.residents.values():
            for g, table in enumerate(resident.tables):
                for page in filter(None, table):
                    named[g][page] = named[g].get(page, 0) + 1
        self.host.check(named)


def _pages(residents: list[Resident]) -> Moves:
    """All pages of these tables, each once."""
    named = ((g, page) for resident in residents for g, table in enumerate(resident.tables) for page in table)
    return {move: SCRATCH for move in named if move[1]}


def _renamed(tables: Tables, moves: Moves) -> Tables:
    return [[moves[g, page] if page else SCRATCH for page in table] for g, table in enumerate(tables)]


def _count(ledger: Ledger | LargePages | Part, residents: list[Resident]) -> None:
    """Count the references of these tables, of whose pages each was counted once."""
    counted: set[tuple[int, int]] = set()
    for resident in residents:
        for g, table in enumerate(resident.tables):
            ledger.share_all(g, [page for page in table if (g, page) in counted])
            counted.update((g, page) for page in table if page)
