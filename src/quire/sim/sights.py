"""Pictures in an EchoRunner: rows that are hashes of a picture's key and of their number, kept where a journal's Encode
says, and what a token sees of them; and the same without a memory, as the oracle has it."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq

import numpy as np

from quire.sim.cells import WORD, Bytes, Pages, digest
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import Encode
from quire.vocabulary.specs import Geometry, Group


def row_state(key: bytes, row: int) -> int:
    """What a picture's row is."""
    return digest(key + struct.pack("<q", row))


def rows_of(media: Seq[Medium], position: int, cross: bool) -> tuple[int, range] | None:
    """Which picture the token at a position sees, and which rows of it: with cross attention all of the latest one that
    begins before it or with it, else the one that takes its place. None if it sees none."""
    for i in reversed(range(len(media))):
        if media[i].start <= position:
            row = position - media[i].start
            if cross:
                return i, range(media[i].rows)
            return (i, range(row, row + 1)) if row < media[i].rows else None
    return None


def sight(media: Seq[Medium], position: int, groups: Seq[Group]) -> bytes:
    """What the token at a position sees of pictures."""
    found = rows_of(media, position, any(group.kind == "cross" for group in groups))
    if found is None:
        return b""
    states = [row_state(media[found[0]].key, row) for row in found[1]]
    return struct.pack(f"<{len(states)}q", *states)


class Sights:
    """What is kept of pictures in the pages of all groups, those of a geometry."""

    def __init__(self, geometry: Geometry, groups: list[Pages]) -> None:
        self.geometry, self.groups = geometry, groups
        self.number = next((g for g, one in enumerate(geometry.groups) if one.kind in ("cross", "vision")), -1)
        self.cross = any(group.kind == "cross" for group in geometry.groups)
        if geometry.sight == "inside":
            self.number = geometry.host
        self.media: dict[int, tuple[Medium, ...]] = {}  # by slot
        self.parts: dict[tuple[int, int], int] = {}  # of slot and picture: how many are encoded
        self.passing: dict[tuple[int, int], list[int]] = {}  # rows that are gone after the step
        self.runs = 0  # pictures that were encoded

    def encode(self, entry: Encode) -> None:
        """Do what a journal says. Parts come in order."""
        medium, place = self.media[entry.slot][entry.medium], (entry.slot, entry.medium)
        done = self.parts.get(place, 0) if entry.first else 0
        assert done == entry.first, f"slot {entry.slot} has {done} parts of picture {entry.medium}, not {entry.first}"
        assert 0 < entry.parts <= medium.parts - done, f"picture {entry.medium} has {medium.parts} parts"
        self.parts[place] = done + entry.parts
        if self.parts[place] < medium.parts:
            return
        del self.parts[place]
        self.runs += 1
        states = [row_state(medium.key, row) for row in range(medium.rows)]
        if entry.group < 0:
            self.passing[place] = states
        elif self.geometry.sight == "inside":
            for row in range(entry.skip, medium.rows):
                cell = np.frombuffer(struct.pack("<q", states[row]), np.uint8)
                self._inside(entry.slot, medium.start + row)[:] = np.resize(cell, self.geometry.row_bytes)
        else:
            pages = self.groups[entry.group]
            for row, state in enumerate(states):
                pages.put(entry.slot, entry.at * pages.group.run_tokens + row, state)

    def _inside(self, slot: int, position: int) -> Bytes:
        """Where the row of a position lies among keys and values to come."""
        pages, size = self.groups[self.number], self.geometry.row_bytes
        page, place = divmod(position, pages.group.run_tokens)
        return pages.pages[pages.page(slot, page + 1), place * size : (place + 1) * size]

    def seen(self, slot: int, position: int) -> bytes:
        """What the token at a position of a slot sees of pictures."""
        media = self.media[slot]
        found = rows_of(media, position, self.cross)
        if found is None:
            return b""
        i, rows = found
        if self.geometry.sight == "off":
            return struct.pack("<q", self.passing[slot, i][rows.start])
        pages = self.groups[self.number]
        if self.geometry.sight == "inside":
            return self._inside(slot, position)[:WORD].tobytes()
        first = sum(pages.group.pages(medium.rows) for medium in media[:i]) * pages.group.run_tokens
        return pages.read(slot, first + rows.start, first + rows.stop).tobytes()
