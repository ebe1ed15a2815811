"""Pictures in an EchoRunner: rows that are hashes of a picture's key and of their number, kept where a journal's Encode
says, and what a token sees of them; and the same without a memory, as the oracle has it."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq

import numpy as np

from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup
from quire.protocol.step_plan import ImageEncoding
from quire.sim.echo_pages import STATE_BYTES, Bytes, EchoPages, state_digest


def row_state(key: bytes, row: int) -> int:
    """What a picture's row is."""
    return state_digest(key + struct.pack("<q", row))


def visible_rows(media: Seq[ImageItem], position: int, cross: bool) -> tuple[int, range] | None:
    """Which picture the token at a position sees, and which rows of it: with cross attention all of the latest one that
    begins before it or with it, else the one that takes its place. None if it sees none."""
    for i in reversed(range(len(media))):
        if media[i].start <= position:
            row = position - media[i].start
            if cross:
                return i, range(media[i].num_embeds)
            return (i, range(row, row + 1)) if row < media[i].num_embeds else None
    return None


def visible_images(media: Seq[ImageItem], position: int, groups: Seq[KVCacheGroup]) -> bytes:
    """What the token at a position sees of pictures."""
    found = visible_rows(media, position, any(group.kind == "cross" for group in groups))
    if found is None:
        return b""
    states = [row_state(media[found[0]].key, row) for row in found[1]]
    return struct.pack(f"<{len(states)}q", *states)


class EchoImages:
    """What is kept of pictures in the pages of all groups, those of a geometry."""

    def __init__(self, geometry: KVCacheConfig, groups: list[EchoPages]) -> None:
        self.geometry, self.groups = geometry, groups
        self.group_index = next((g for g, one in enumerate(geometry.groups) if one.kind in ("cross", "vision")), -1)
        self.is_cross_attention = any(group.kind == "cross" for group in geometry.groups)
        if geometry.sight == "inside":
            self.group_index = geometry.image_embed_group
        self.media: dict[int, tuple[ImageItem, ...]] = {}  # by slot
        self.encoded_parts: dict[tuple[int, int], int] = {}  # of slot and picture: how many are encoded
        self.transient_rows: dict[tuple[int, int], list[int]] = {}  # rows that are gone after the step
        self.num_encoded = 0  # pictures that were encoded

    def encode(self, entry: ImageEncoding) -> None:
        """Do what a journal says. Parts come in order."""
        medium, place = self.media[entry.slot][entry.image_index], (entry.slot, entry.image_index)
        done = self.encoded_parts.get(place, 0) if entry.first_part else 0
        assert done == entry.first_part, (
            f"slot {entry.slot} has {done} parts of picture {entry.image_index}, not {entry.first_part}"
        )
        assert 0 < entry.num_parts <= medium.num_parts - done, (
            f"picture {entry.image_index} has {medium.num_parts} parts"
        )
        self.encoded_parts[place] = done + entry.num_parts
        if self.encoded_parts[place] < medium.num_parts:
            return
        del self.encoded_parts[place]
        self.num_encoded += 1
        states = [row_state(medium.key, row) for row in range(medium.num_embeds)]
        if entry.group < 0:
            self.transient_rows[place] = states
        elif self.geometry.sight == "inside":
            for row in range(entry.skip_embeds, medium.num_embeds):
                cell = np.frombuffer(struct.pack("<q", states[row]), np.uint8)
                self._inline_row(entry.slot, medium.start + row)[:] = np.resize(cell, self.geometry.row_bytes)
        else:
            pages = self.groups[entry.group]
            for row, state in enumerate(states):
                pages.write_state(entry.slot, entry.first_page * pages.group.run_tokens + row, state)

    def _inline_row(self, slot: int, position: int) -> Bytes:
        """Where the row of a position lies among keys and values to come."""
        pages, size = self.groups[self.group_index], self.geometry.row_bytes
        page, place = divmod(position, pages.group.run_tokens)
        return pages.pages[pages.page_at(slot, page + 1), place * size : (place + 1) * size]

    def read_visible(self, slot: int, position: int) -> bytes:
        """What the token at a position of a slot sees of pictures."""
        media = self.media[slot]
        found = visible_rows(media, position, self.is_cross_attention)
        if found is None:
            return b""
        i, rows = found
        if self.geometry.sight == "off":
            return struct.pack("<q", self.transient_rows[slot, i][rows.start])
        pages = self.groups[self.group_index]
        if self.geometry.sight == "inside":
            return self._inline_row(slot, position)[:STATE_BYTES].tobytes()
        first = sum(pages.group.num_pages(medium.num_embeds) for medium in media[:i]) * pages.group.run_tokens
        return pages.read_states(slot, first + rows.start, first + rows.stop).tobytes()
