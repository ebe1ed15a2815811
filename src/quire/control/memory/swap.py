"""Swapping: sequences whose pages were copied to host memory, to come back later (PagedAttention §4.5)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.control.memory.pages import SCRATCH
from quire.control.memory.tables import PageTables, Resident
from quire.control.request import Sequence
from quire.vocabulary.plan import In, Out, Poison
from quire.vocabulary.specs import Geometry


class SwappedTables(PageTables):
    """Page tables that can leave: those of a swapped sequence name host pages."""

    def __init__(self, geometry: Geometry, order: Iterable[int] | None = None, debug: bool = False) -> None:
        super().__init__(geometry, order, debug)
        # Never more host pages than the device has (§4.5).
        assert geometry.host_pages < geometry.pages, "more host pages than pages"
        self.host_pages = list(range(geometry.host_pages, 0, -1))
        self.host_total = len(self.host_pages)
        self.host_keys: dict[int, tuple[int, bytes] | None] = {}
        self.swapped: dict[int, Resident] = {}  # with host pages in its tables
        self.swapped_out_pages = self.swapped_in_pages = 0

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Copy every page of these sequences to host pages, a shared one once, and let go of pages and slots."""
        assert all(seq.quiet for seq in seqs), "a sequence is swapped out while in flight"
        residents = [self.residents[seq.id] for seq in seqs]
        groups = {page: g for resident in residents for g, table in enumerate(resident.tables) for page in table}
        groups.pop(SCRATCH, None)
        if len(groups) > len(self.host_pages):
            return False
        hosts = {SCRATCH: SCRATCH}
        for page, group in groups.items():
            hosts[page] = self.host_pages.pop()
            self.host_keys[hosts[page]] = self.pages.keys[page]
            self.entries.append(Out(group, page, hosts[page]))
        for seq, resident in zip(seqs, residents):
            away = [[hosts[page] for page in table] for table in resident.tables]
            self.free(seq)
            resident.tables = away
            self.swapped[seq.id] = resident
        if self.debug:
            self.entries += [Poison(g, page) for page, g in groups.items() if self.pages.is_empty(page)]
        self.swapped_out_pages += len(groups)
        return True

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Bring sequences that were swapped out together back into pages: copied, or shared with cached ones that are
        still there."""
        away = [self.swapped[seq.id] for seq in seqs]
        groups = {host: g for resident in away for g, table in enumerate(resident.tables) for host in table}
        groups.pop(SCRATCH, None)
        back = {SCRATCH: SCRATCH}  # host page -> page, SCRATCH while it is to be taken
        for host in groups:
            key = self.host_keys[host]
            back[host] = (self.pages.find(*key) if key is not None else None) or SCRATCH
        cached = [page for page in back.values() if page != SCRATCH]
        need = len(groups) - len(cached)
        if self.residents:
            need += len(seqs) * len(self.policies)  # a page more for each, to go on; alone they fit
        if len(seqs) > len(self.slots) or need > self.pages.available - sum(not self.pages.refs[p] for p in cached):
            return False
        for page in cached:
            self.pages.share(page)
        for host, g in groups.items():
            if back[host] == SCRATCH:
                back[host] = self._take(g, seqs[0])
                self.entries.append(In(g, host, back[host]))
                self.swapped_in_pages += 1
                if (key := self.host_keys[host]) is not None:
                    self.pages.publish(key[0], back[host], key[1])
        self._seat(seqs, back)
        self.host_pages += groups
        return True

    def _seat(self, seqs: Seq[Sequence], back: dict[int, int]) -> None:
        """Make swapped sequences resident again, in the pages that `back` gives for their host pages; each page was
        counted once."""
        counted = set(back) - {SCRATCH}
        for seq in seqs:
            old = self.swapped.pop(seq.id)
            tables = [[back[host] for host in table] for table in old.tables]
            for table in old.tables:
                for host in table:
                    if host in counted:
                        counted.discard(host)
                    elif host != SCRATCH:
                        self.pages.share(back[host])
            resident = self._reside(seq, tables)
            resident.first = old.first
            resident.committed, resident.capacity = old.committed, old.capacity
            resident.held, resident.forked = old.held, old.forked

    def drop_swapped(self, seq: Sequence) -> None:
        """A swapped sequence ended: forget its host pages, but for those that a sibling still has."""
        resident = self.swapped.pop(seq.id)
        kept = {host for other in self.swapped.values() for table in other.tables for host in table}
        self.host_pages += {host for table in resident.tables for host in table} - kept - {SCRATCH}

    def check_host_pages(self) -> None:
        """Assert that every host page is free or named by a swapped sequence."""
        away = {host for resident in self.swapped.values() for table in resident.tables for host in table} - {SCRATCH}
        assert len(away) + len(self.host_pages) == self.host_total, "a host page is lost"
        assert not away & set(self.host_pages), "a host page is free and used"
