"""Branches of one request that are admitted together where pages are dropped while a sequence computes.

One of them, the leader, computes their common prefix. It never holds all of the prefix at once, so each other branch, a
waiter, takes the pages that it needs when the leader has computed them: before the leader drops one, or when the waiter
is scheduled, whichever is first."""

from __future__ import annotations

from quire.memory.page_pool import SCRATCH
from quire.memory.page_tables import PageTables
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import TableWrite


class PrefixWaiters:
    """The sequences in memory that have a slot and no pages yet."""

    def __init__(self, page_tables: PageTables) -> None:
        self.page_tables = page_tables
        self.leaders: dict[int, tuple[Sequence, int]] = {}  # waiter's id -> its leader, and their common tokens
        self.waiters: dict[int, list[Sequence]] = {}  # leader's id -> its waiters

    def add(self, seq: Sequence, leader: Sequence, tokens: int) -> None:
        """Let `seq`, which has no pages, wait for the first `tokens` tokens, whole pages, of `leader`."""
        self.leaders[seq.id] = leader, tokens
        self.waiters.setdefault(leader.id, []).append(seq)

    def serve_waiters(self, leader: Sequence, tokens: int) -> None:
        """Give pages to the waiters that need up to `tokens` tokens of `leader`, before it drops pages."""
        for seq in list(self.waiters.get(leader.id, ())):
            if self.leaders[seq.id][1] <= tokens:
                seq.drafted = min(seq.drafted, leader.drafted)
                self.attach_prefix(seq)

    def attach_prefix(self, seq: Sequence) -> None:
        """Let a waiter share the pages that it needs to continue after the common tokens, or, in a draft model's
        layers, after its drafted ones. It waits no more."""
        leader, tokens = self.leaders[seq.id]
        drafted = min(tokens, seq.drafted)
        self._remove(seq)
        page_tables, seq_pages = self.page_tables, self.page_tables.seq_pages[seq.id]
        for g, (policy, table) in enumerate(zip(page_tables.policies, page_tables.seq_pages[leader.id].tables)):
            need = policy.required(seq, drafted if policy.group.is_draft else tokens)
            pages = table[need.start : need.stop]
            assert len(pages) == len(need), f"sequence {leader.id} has too few pages"
            assert all(pages), f"sequence {leader.id} has dropped what sequence {seq.id} needs"
            page_tables.page_pool.incref_used(g, pages)
            seq_pages.tables[g] = [SCRATCH] * need.start + pages
            seq_pages.first_page[g] = need.start
            if seq_pages.tables[g]:
                page_tables.page_ops.append(TableWrite(seq_pages.slot, g, 0, tuple(seq_pages.tables[g])))
        seq_pages.requested_tokens = tokens
        seq_pages.published_tokens = tokens
        seq_pages.published_drafts = tokens if drafted == tokens else 0
        seq_pages.needs_cow_check = seq.uses_draft_model and drafted < tokens
        seq_pages.capacity = max(page_tables.capacity_of(seq, seq_pages), tokens)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that leaves memory, and give its waiters the pages that it has. Others leave with it."""
        if seq.id in self.leaders:
            self._remove(seq)
        if seq.id in self.waiters:
            self.serve_waiters(seq, seq.computed)

    def _remove(self, seq: Sequence) -> None:
        leader, _ = self.leaders.pop(seq.id)
        self.waiters[leader.id].remove(seq)
        if not self.waiters[leader.id]:
            del self.waiters[leader.id]

    def check(self) -> None:
        """Assert that every waiter is in memory without pages, and is listed with its leader."""
        for id, (leader, _) in self.leaders.items():
            assert not any(self.page_tables.seq_pages[id].tables), "a waiter has pages"
            assert id in [seq.id for seq in self.waiters[leader.id]], "a waiter is not listed with its leader"
