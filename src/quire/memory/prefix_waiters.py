"""Branches of one request that come back together where pages are dropped as a sequence computes. What they have in
common is computed by one of them. It never holds all of it at once, so each of the others gets what it needs of it when
that one comes by: before it drops any of these pages, or when the other one's turn is, whichever is first."""

from __future__ import annotations

from quire.memory.page_pool import SCRATCH
from quire.memory.page_tables import PageTables
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import TableWrite


class PrefixWaiters:
    """The sequences in memory that have no pages yet."""

    def __init__(self, page_tables: PageTables) -> None:
        self.page_tables = page_tables
        self.leaders: dict[int, tuple[Sequence, int]] = {}  # a follower, whom it follows, and for how many tokens
        self.waiters: dict[int, list[Sequence]] = {}  # whom they follow, and its followers

    def add(self, seq: Sequence, leader: Sequence, tokens: int) -> None:
        """`seq` is in memory without pages; it will have the first `tokens` tokens, whole pages, of `leader`."""
        self.leaders[seq.id] = leader, tokens
        self.waiters.setdefault(leader.id, []).append(seq)

    def serve_waiters(self, leader: Sequence, tokens: int) -> None:
        """So many tokens of `leader` are there, and pages are about to be dropped."""
        for seq in list(self.waiters.get(leader.id, ())):
            if self.leaders[seq.id][1] <= tokens:
                self.attach_prefix(seq)

    def attach_prefix(self, seq: Sequence) -> None:
        """The follower shares what it needs to go on after the tokens that it has in common; it follows no more."""
        owner, tokens = self.leaders[seq.id]
        self._remove(seq)
        tables, resident = self.page_tables, self.page_tables.seq_pages[seq.id]
        for g, (policy, table) in enumerate(zip(tables.policies, tables.seq_pages[owner.id].tables)):
            need = policy.required(seq, tokens)
            pages = table[need.start : need.stop]
            assert len(pages) == len(need), f"sequence {owner.id} hasn't come so far"
            assert all(pages), f"sequence {owner.id} has dropped what sequence {seq.id} needs"
            tables.page_pool.incref_used(g, pages)
            resident.tables[g] = [SCRATCH] * need.start + pages
            resident.first_page[g] = need.start
            if resident.tables[g]:
                tables.page_ops.append(TableWrite(resident.slot, g, 0, tuple(resident.tables[g])))
        resident.published_tokens = resident.requested_tokens = tokens
        resident.capacity = tables.capacity_of(seq, resident)

    def remove(self, seq: Sequence) -> None:
        """A sequence leaves memory. Who follows it gets what there is of it, or has left or will leave with it."""
        if seq.id in self.leaders:
            self._remove(seq)
        if seq.id in self.waiters:
            self.serve_waiters(seq, seq.computed)

    def _remove(self, seq: Sequence) -> None:
        owner, _ = self.leaders.pop(seq.id)
        self.waiters[owner.id].remove(seq)
        if not self.waiters[owner.id]:
            del self.waiters[owner.id]

    def check(self) -> None:
        """Assert that who follows is in memory without pages."""
        for id, (owner, _) in self.leaders.items():
            assert not any(self.page_tables.seq_pages[id].tables), "a follower has pages"
            assert id in [seq.id for seq in self.waiters[owner.id]], "a follower is forgotten"
