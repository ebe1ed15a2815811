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

from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import PagePool
from quire.memory.policies import LayerPolicy
from quire.memory.seq_pages import SeqPages, Tables
from quire.protocol.sequence import Sequence

DEFAULT_SLACK = 512  # tokens
MAX_CACHED_WINDOWS = 4096  # windows that are remembered, a group
DROP_DELAY_DIVISOR = 64  # the share of a window, at most, that is held longer than it is read

RecentDrops = deque[tuple[int, int, bytes]]
"""Pages of a group that left a window less than `slack` tokens ago: (logical page, page, name), the oldest first."""


class Retention:
    """What a memory of these policies keeps of the pages that its sequences drop. `every_tokens` so many tokens, which
    should be twice a window or more, the window of a prefix stays too; 0: only where `mode` says."""

    def __init__(
        self,
        page_pool: PagePool | TwoLevelPagePool | PoolView,
        policies: Seq[LayerPolicy],
        mode: str = "paper",
        slack: int = DEFAULT_SLACK,
        every_tokens: int = 0,
    ) -> None:
        self.page_pool, self.policies = page_pool, policies
        self.tracks_drops, self.keeps_prefix_ends = mode != "paper", mode == "boundary"
        self.slack, self.every_tokens = slack, every_tokens
        self.windows: list[dict[int, tuple[int, range]]] = [{} for _ in policies]  # by mark: asked at every drop

    def drop_delay(self, policy: LayerPolicy) -> int:
        """Tokens that a resident itself holds its pages longer than it reads them. A page that leaves a window while
        its sequence runs would else be evicted before all that the sequence still holds, and with it the prefix that
        others came for: the document, say, behind whose question the sequence is. It is a small part of a window, for
        it takes room from sequences."""
        window = policy.group.window
        return min(self.slack, window // DROP_DELAY_DIVISOR) if window is not None and self.tracks_drops else 0

    def after_drop(
        self, seq: Sequence, seq_pages: SeqPages, group: int, first: int, pages: Seq[int], page_keys: Seq[bytes]
    ) -> None:
        """Logical pages `first` and on of a resident, called so, were released: it reads them no more. Those that left
        `slack` tokens earlier are emptied, or stay for good."""
        trail = seq_pages.recent_drops.get(group)
        if trail is None:
            trail = seq_pages.recent_drops[group] = deque()
        trail.extend(zip(range(first, first + len(pages)), pages, page_keys))
        near = self.policies[group].needed(max(seq.computed - self.slack, 0), seq.computed).start
        if not trail or trail[0][0] >= near:
            return
        kept = [self._window(group, mark) for mark in self._kept_prefix_ends(seq, seq_pages)]
        while trail and trail[0][0] < near:
            at, page, name = trail.popleft()
            if not any(at in window for window in kept) and self._is_cached(group, page, name):
                self.page_pool.evict(group, page)

    def _kept_prefix_ends(self, seq: Sequence, seq_pages: SeqPages) -> list[int]:
        """Where prefixes end whose windows stay, in tokens."""
        marks = [seq.prompt_len, *seq_pages.prefix_ends] if self.keeps_prefix_ends else []
        if self.every_tokens:
            marks += range(self.every_tokens, seq.computed + self.every_tokens, self.every_tokens)
        return marks

    def _window(self, group: int, mark: int) -> range:
        """The pages that a prefix needs which ends at most `slack` tokens before a mark."""
        known = self.windows[group].get(mark)
        if known is not None and known[0] == self.slack:
            return known[1]
        policy, start = self.policies[group], max(mark - self.slack, 0)
        window = policy.needed(start, mark)
        if len(self.windows[group]) >= MAX_CACHED_WINDOWS:
            self.windows[group].clear()
        self.windows[group][mark] = self.slack, window
        return window

    def _is_cached(self, group: int, page: int, page_key: bytes) -> bool:
        """The page holds what it did, and nobody uses it."""
        return self.page_pool.find(group, page_key) == page and not self.page_pool.ref_count(group, page)

    def include_recent_drops(self, seq_pages: SeqPages) -> Tables:
        """The tables of a resident that is about to be released, and with them what left its windows a short while ago:
        the windows of prefixes of nearly its length. All of that was last used now (Jenga §5.1, balanced eviction)."""
        tables = [list(table) for table in seq_pages.tables] if seq_pages.recent_drops else seq_pages.tables
        for group, trail in seq_pages.recent_drops.items():
            for at, page, name in trail:
                if self._is_cached(group, page, name):
                    self.page_pool.incref(group, page)
                    tables[group][at] = page
        seq_pages.recent_drops = {}
        return tables
