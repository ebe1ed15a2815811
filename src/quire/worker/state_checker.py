"""Debug mode's check of running states: it counts the tokens of each state, on the host, and asserts that each slice
continues the state before its first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from numpy import ndarray

from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import PageCopy, PageOps, Poison, SeqSlice, SwapIn, SwapOut

UNKNOWN = -1  # another engine has computed the state (quire.protocol.shared_host)


class PageKey(NamedTuple):
    """A page of a group, on the device or on the host."""

    group: int
    page: int
    on_host: bool = False


class StateChecker:
    """Tokens seen by each page of groups of kind "state". A page without an entry was not written since its
    allocation."""

    def __init__(self, kv_config: KVCacheConfig) -> None:
        self.state_intervals = {
            g: group.run_tokens for g, group in enumerate(kv_config.groups) if group.kind == "state"
        }
        self.tokens_seen: dict[PageKey, int] = {}

    def apply_page_ops(self, page_ops: PageOps) -> None:
        """Apply the effect of page operations on the counts."""
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
        """Check and update the states that slices read and write by their groups' tables. Raise AssertionError if a
        slice reads a state of another number of tokens than its start. Slices with draft tokens write none yet: see
        `advance`."""
        for row in slices:
            start, slot = row.start, row.slot
            for group, run in self.state_intervals.items() if start and slot else ():  # slot 0 is padding
                page = int(tables[group][slot][(start - 1) // run])
                seen = self.tokens_seen.get(PageKey(group, page))
                assert seen in (start, UNKNOWN), (
                    f"slot {slot} goes on after {start} tokens from page {page} of group {group}, whose state has seen "
                    f"{seen}"
                )
            if not row.draft_tokens:
                self.advance(slot, start, start + len(row.tokens), tables)

    def advance(self, slot: int, start: int, end: int, tables: list[ndarray]) -> None:
        """Update the states that the tokens [start, end) of a slot have advanced."""
        for group, run in self.state_intervals.items():
            for at in range(start // run, (end - 1) // run + 1):
                self.tokens_seen[PageKey(group, int(tables[group][slot][at]))] = min((at + 1) * run, end)

    def _move(self, src: PageKey, dst: PageKey) -> None:
        if src.group in self.state_intervals:
            if src in self.tokens_seen:
                self.tokens_seen[dst] = self.tokens_seen[src]
            elif src.on_host:
                self.tokens_seen[dst] = UNKNOWN
            else:
                self.tokens_seen.pop(dst, None)
