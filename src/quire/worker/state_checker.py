"""How many tokens each state has seen, as the journal and the rows left it: debug mode's proof that a row goes on from
the state in front of its first token, and from no other. Numbers on the host; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from numpy import ndarray

from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import PageCopy, PageOps, Poison, SeqSlice, SwapIn, SwapOut


class PageKey(NamedTuple):
    """A page of a group, on the device or on the host."""

    group: int
    page: int
    on_host: bool = False


class StateChecker:
    """Of the pages of groups whose kind is "state". A page of which nothing is known was never written, or not since it
    was given out."""

    def __init__(self, kv_config: KVCacheConfig) -> None:
        self.state_intervals = {
            g: group.run_tokens for g, group in enumerate(kv_config.groups) if group.kind == "state"
        }
        self.tokens_seen: dict[PageKey, int] = {}

    def apply_page_ops(self, page_ops: PageOps) -> None:
        """What a journal does to them."""
        for entry in page_ops:
            match entry:
                case PageCopy(group, src, dst):
                    self._move(PageKey(group, src), PageKey(group, dst))
                case SwapOut(group, page, host):
                    self._move(PageKey(group, page), PageKey(group, host, True))
                case SwapIn(group, host, page):
                    self._move(PageKey(group, host, True), PageKey(group, page))
                case Poison(group, page):
                    self.tokens_seen.pop(PageKey(group, page), None)

    def check_and_advance(self, slices: Iterable[SeqSlice], tables: list[ndarray]) -> None:
        """Rows read and write their states, by their groups' tables. AssertionError names the row that reads another's,
        or one before or behind its own."""
        for group, run in self.state_intervals.items():
            for row in slices:
                start, end, table = row.start, row.start + len(row.tokens), tables[group][row.slot]
                if start and row.slot:  # slot 0 is padding
                    page = int(table[(start - 1) // run])
                    found = self.tokens_seen.get(PageKey(group, page))
                    assert found == start, (
                        f"slot {row.slot} goes on behind {start} tokens from page {page} of group {group}, whose state "
                        f"has seen {found}"
                    )
                for at in range(start // run, (end - 1) // run + 1):
                    self.tokens_seen[PageKey(group, int(table[at]))] = min((at + 1) * run, end)

    def _move(self, src: PageKey, dst: PageKey) -> None:
        if src.group in self.state_intervals:
            if src in self.tokens_seen:
                self.tokens_seen[dst] = self.tokens_seen[src]
            else:
                self.tokens_seen.pop(dst, None)
