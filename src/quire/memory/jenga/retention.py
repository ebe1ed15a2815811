"""Retention: how long pages that a window has passed stay cached.

No later token of their own sequence reads them, but a prefix of another sequence that ends there does. The paper leaves
such pages cached, as old as their last use (Jenga §5.1; mode "paper"). But then the pages that a long prompt passes
through are younger than all that other prefixes need, and each of these loses its window. So with mode "slack" a page
is emptied after `slack` more tokens were computed: what stays is the windows of the prefixes that end in the last
`slack` tokens. With mode "boundary" the windows of prefixes that are likely to return stay too, however long the
sequence grows: those that end with the prompt, with the part of it that was found in the cache, and where full
attention found more than could be used, since prompts diverge there.

Checkpoints of a running state are retained in the same way. Mode "paper" has one for every page of a prompt, which
takes as much memory as all keys and values of Jamba; mode "boundary" has those at the ends of prompts and where prompts
diverge."""

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
MAX_CACHED_WINDOWS = 4096  # results of `_window` that are cached for each group
DROP_DELAY_DIVISOR = 64  # pages are held for at most this fraction of a window longer than they are read


class Retention:
    """Decide which dropped pages of a memory with these policies stay cached."""

    def __init__(
        self,
        page_pool: PagePool | TwoLevelPagePool | PoolView,
        policies: Seq[LayerPolicy],
        mode: str = "paper",
        slack: int = DEFAULT_SLACK,
    ) -> None:
        self.page_pool, self.policies = page_pool, policies
        self.tracks_drops, self.keeps_prefix_ends = mode != "paper", mode == "boundary"
        self.slack = slack
        # Of each group: end of a prefix -> (slack, its window), since every drop asks for them
        self.windows: list[dict[int, tuple[int, range]]] = [{} for _ in policies]

    def drop_delay(self, policy: LayerPolicy) -> int:
        """Return the tokens for which a sequence itself holds its pages longer than it reads them.

        A page that a window passes while its sequence runs would otherwise be evicted before all that the sequence
        still holds, and with it the prefix that other sequences share: a document, for example, that precedes the
        question. The delay is a small fraction of a window, since it takes memory from sequences."""
        window = policy.group.window
        return min(self.slack, window // DROP_DELAY_DIVISOR) if window is not None and self.tracks_drops else 0

    def after_drop(
        self, seq: Sequence, seq_pages: SeqPages, group: int, first: int, pages: Seq[int], page_keys: Seq[bytes]
    ) -> None:
        """Handle the drop of `pages`, logical pages `first` and on of a sequence, with these keys.

        A cached page is emptied once no prefix that ends in the last `slack` computed tokens needs it, unless it lies
        in the window of a kept prefix end, or a waiting sequence will use it."""
        drops = seq_pages.recent_drops.get(group)
        if drops is None:
            drops = seq_pages.recent_drops[group] = deque()
        drops.extend(zip(range(first, first + len(pages)), pages, page_keys))
        policy = self.policies[group]
        computed = seq.drafted if policy.group.is_draft else seq.computed
        first_needed = policy.needed(max(computed - self.slack, 0), computed).start
        if not drops or drops[0][0] >= first_needed:
            return
        ends = (seq.prompt_len, *seq_pages.prefix_ends) if self.keeps_prefix_ends else ()
        kept = [self._window(group, end) for end in ends]
        while drops and drops[0][0] < first_needed:
            at, page, key = drops.popleft()
            if (
                not any(at in window for window in kept)
                and self._is_cached(group, page, key)
                and not self.page_pool.is_expected(group, key)
            ):
                self.page_pool.evict(group, page)

    def _window(self, group: int, mark: int) -> range:
        """Return the pages needed by the prefixes that end at most `slack` tokens before `mark`."""
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
        """Return True if the page still has this content and is unused."""
        return self.page_pool.find(group, page_key) == page and not self.page_pool.ref_count(group, page)

    def include_recent_drops(self, seq_pages: SeqPages) -> Tables:
        """Return the tables to release of a sequence, with its recently dropped pages that are still cached.

        Those are the windows of prefixes of nearly its length. So all of them count as used now (Jenga §5.1, balanced
        eviction)."""
        tables = [list(table) for table in seq_pages.tables] if seq_pages.recent_drops else seq_pages.tables
        for group, drops in seq_pages.recent_drops.items():
            for at, page, key in drops:
                if self._is_cached(group, page, key):
                    self.page_pool.incref(group, page)
                    tables[group][at] = page
        seq_pages.recent_drops = {}
        return tables
