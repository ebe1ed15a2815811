"""How many tokens each state has seen, as the journal and the rows left it: debug mode's proof that a row goes on from
the state in front of its first token, and from no other. Numbers on the host; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from numpy import ndarray

from quire.vocabulary.plan import Copy, In, Journal, Out, Poison, Row
from quire.vocabulary.specs import Geometry


class Place(NamedTuple):
    """A page of a group, on the device or on the host."""

    group: int
    page: int
    host: bool = False


class SeenTokens:
    """Of the pages of groups whose kind is "state". A page of which nothing is known was never written, or not since it
    was given out."""

    def __init__(self, geometry: Geometry) -> None:
        self.runs = {g: group.run_tokens for g, group in enumerate(geometry.groups) if group.kind == "state"}
        self.seen: dict[Place, int] = {}

    def replay(self, journal: Journal) -> None:
        """What a journal does to them."""
        for entry in journal:
            match entry:
                case Copy(group, src, dst):
                    self._move(Place(group, src), Place(group, dst))
                case Out(group, page, host):
                    self._move(Place(group, page), Place(group, host, True))
                case In(group, host, page):
                    self._move(Place(group, host, True), Place(group, page))
                case Poison(group, page):
                    self.seen.pop(Place(group, page), None)

    def advance(self, rows: Iterable[Row], tables: list[ndarray]) -> None:
        """Rows read and write their states, by their groups' tables. AssertionError names the row that reads another's,
        or one before or behind its own."""
        for group, run in self.runs.items():
            for row in rows:
                start, end, table = row.start, row.start + len(row.tokens), tables[group][row.slot]
                if start and row.slot:  # slot 0 is padding
                    page = int(table[(start - 1) // run])
                    found = self.seen.get(Place(group, page))
                    assert found == start, (
                        f"slot {row.slot} goes on behind {start} tokens from page {page} of group {group}, whose state "
                        f"has seen {found}"
                    )
                for at in range(start // run, (end - 1) // run + 1):
                    self.seen[Place(group, int(table[at]))] = min((at + 1) * run, end)

    def _move(self, src: Place, dst: Place) -> None:
        if src.group in self.runs:
            if src in self.seen:
                self.seen[dst] = self.seen[src]
            else:
                self.seen.pop(dst, None)
