"""Branches of one request that come back together where pages are dropped as a sequence computes. What they have in
common is computed by one of them. It never holds all of it at once, so each of the others gets what it needs of it when
that one comes by: before it drops any of these pages, or when the other one's turn is, whichever is first."""

from __future__ import annotations

from quire.control.memory.pages import SCRATCH
from quire.control.memory.tables import PageTables
from quire.control.request import Sequence
from quire.vocabulary.plan import Table


class Followers:
    """The sequences in memory that have no pages yet."""

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self.ahead: dict[int, tuple[Sequence, int]] = {}  # a follower, whom it follows, and for how many tokens
        self.behind: dict[int, list[Sequence]] = {}  # whom they follow, and its followers

    def follow(self, seq: Sequence, owner: Sequence, tokens: int) -> None:
        """`seq` is in memory without pages; it will have the first `tokens` tokens, whole pages, of `owner`."""
        self.ahead[seq.id] = owner, tokens
        self.behind.setdefault(owner.id, []).append(seq)

    def passed(self, owner: Sequence, tokens: int) -> None:
        """So many tokens of `owner` are there, and pages are about to be dropped."""
        for seq in list(self.behind.get(owner.id, ())):
            if self.ahead[seq.id][1] <= tokens:
                self.catch_up(seq)

    def catch_up(self, seq: Sequence) -> None:
        """The follower shares what it needs to go on after the tokens that it has in common; it follows no more."""
        owner, tokens = self.ahead[seq.id]
        self._forget(seq)
        tables, resident = self.tables, self.tables.residents[seq.id]
        for g, (policy, table) in enumerate(zip(tables.policies, tables.residents[owner.id].tables)):
            need = policy.required(seq, tokens)
            pages = table[need.start : need.stop]
            assert len(pages) == len(need), f"sequence {owner.id} hasn't come so far"
            assert all(pages), f"sequence {owner.id} has dropped what sequence {seq.id} needs"
            tables.pages.share_all(g, pages)
            resident.tables[g] = [SCRATCH] * need.start + pages
            resident.first[g] = need.start
            if resident.tables[g]:
                tables.entries.append(Table(resident.slot, g, 0, tuple(resident.tables[g])))
        resident.committed = resident.held = tokens
        resident.room = tables.room_of(seq, resident)

    def leave(self, seq: Sequence) -> None:
        """A sequence leaves memory. Who follows it gets what there is of it, or has left or will leave with it."""
        if seq.id in self.ahead:
            self._forget(seq)
        if seq.id in self.behind:
            self.passed(seq, seq.computed)

    def _forget(self, seq: Sequence) -> None:
        owner, _ = self.ahead.pop(seq.id)
        self.behind[owner.id].remove(seq)
        if not self.behind[owner.id]:
            del self.behind[owner.id]

    def check(self) -> None:
        """Assert that who follows is in memory without pages."""
        for id, (owner, _) in self.ahead.items():
            assert not any(self.tables.residents[id].tables), "a follower has pages"
            assert id in [seq.id for seq in self.behind[owner.id]], "a follower is forgotten"
