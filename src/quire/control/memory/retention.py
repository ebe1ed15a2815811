"""How long what left a window stays findable: no token to come of its own sequence reads it, but a prefix of another
sequence that ends there does.

The paper leaves such pages cached, as old as their last use (Jenga §5.1, "paper"). But the pages that a long prompt
passes through are then younger than all that other prefixes need, of which each loses its window. So here a page is
emptied once `slack` more tokens were computed ("slack"): what stays is the window of every prefix that ends in the last
`slack` tokens. With "boundary" the windows of prefixes that are known to come back stay too, however far the sequence
goes on: those that end with the prompt, with what was found of it, and where full attention found more than could be
used, so that prompts part there.

Checkpoints of a running state are kept alike: "paper" has one after every run of a prompt, which takes as much as all
keys and values of Jamba do; with "boundary" those before the ends of prompts and before where these part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from quire.control.memory.large import LargePages
from quire.control.memory.pages import Ledger
from quire.control.memory.part import Part
from quire.control.memory.policies import LayerPolicy
from quire.control.memory.tables import Resident, Tables
from quire.control.request import Sequence

SLACK = 512  # tokens
KNOWN = 4096  # windows that are remembered, a group
HELD = 64  # the share of a window, at most, that is held longer than it is read

Trail = deque[tuple[int, int, bytes]]
"""Pages of a group that left a window less than `slack` tokens ago: (logical page, page, name), the oldest first."""


class Retention:
    """What a memory of these policies keeps of the pages that its sequences drop. `every` so many tokens, which should
    be twice a window or more, the window of a prefix stays too; 0: only where `how` says."""

    def __init__(
        self,
        pages: Ledger | LargePages | Part,
        policies: Seq[LayerPolicy],
        how: str = "paper",
        slack: int = SLACK,
        every: int = 0,
    ) -> None:
        self.pages, self.policies = pages, policies
        self.trails, self.marks = how != "paper", how == "boundary"
        self.slack, self.every = slack, every
        self.windows: list[dict[int, tuple[int, range]]] = [{} for _ in policies]  # by mark: asked at every drop

    def back(self, policy: LayerPolicy) -> int:
        """Tokens that a resident itself holds its pages longer than it reads them. A page that leaves a window while
        its sequence runs would else be evicted before all that the sequence still holds, and with it the prefix that
        others came for: the document, say, behind whose question the sequence is. It is a small part of a window, for
        it takes room from sequences."""
        window = policy.group.window
        return min(self.slack, window // HELD) if window is not None and self.trails else 0

    def left(
        self, seq: Sequence, resident: Resident, group: int, first: int, pages: Seq[int], names: Seq[bytes]
    ) -> None:
        """Logical pages `first` and on of a resident, called so, were released: it reads them no more. Those that left
        `slack` tokens earlier are emptied, or stay for good."""
        trail = resident.trails.get(group)
        if trail is None:
            trail = resident.trails[group] = deque()
        trail.extend(zip(range(first, first + len(pages)), pages, names))
        near = self.policies[group].needed(max(seq.computed - self.slack, 0), seq.computed).start
        if not trail or trail[0][0] >= near:
            return
        kept = [self._window(group, mark) for mark in self._marks(seq, resident)]
        while trail and trail[0][0] < near:
            at, page, name = trail.popleft()
            if not any(at in window for window in kept) and self._is_cached(group, page, name):
                self.pages.evict(group, page)

    def _marks(self, seq: Sequence, resident: Resident) -> list[int]:
        """Where prefixes end whose windows stay, in tokens."""
        marks = [seq.prompt_len, *resident.marks] if self.marks else []
        if self.every:
            marks += range(self.every, seq.computed + self.every, self.every)
        return marks

    def _window(self, group: int, mark: int) -> range:
        """The pages that a prefix needs which ends at most `slack` tokens before a mark."""
        known = self.windows[group].get(mark)
        if known is not None and known[0] == self.slack:
            return known[1]
        policy, start = self.policies[group], max(mark - self.slack, 0)
        window = policy.needed(start, mark)
        if len(self.windows[group]) >= KNOWN:
            self.windows[group].clear()
        self.windows[group][mark] = self.slack, window
        return window

    def _is_cached(self, group: int, page: int, name: bytes) -> bool:
        """The page holds what it did, and nobody uses it."""
        return self.pages.find(group, name) == page and not self.pages.names(group, page)

    def renewed(self, resident: Resident) -> Tables:
        """The tables of a resident that is about to be released, and with them what left its windows a short while ago:
        the windows of prefixes of nearly its length. All of that was last used now (Jenga §5.1, balanced eviction)."""
        tables = [list(table) for table in resident.tables] if resident.trails else resident.tables
        for group, trail in resident.trails.items():
            for at, page, name in trail:
                if self._is_cached(group, page, name):
                    self.pages.share(group, page)
                    tables[group][at] = page
        resident.trails = {}
        return tables
