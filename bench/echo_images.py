"""Images in an EchoRunner: embeddings are hashes of an image's key and their index, stored in the pages of an
ImageEncoding. The same without a memory is the oracle."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq

import numpy as np

from bench.echo_pages import STATE_BYTES, Bytes, EchoPages, state_digest
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import ImageEncoding


def row_state(key: bytes, row: int) -> int:
    """Return embedding `row` of an image."""
    return state_digest(key + struct.pack("<q", row))


def visible_rows(media: Seq[ImageItem], position: int, cross: bool) -> tuple[int, range] | None:
    """Return the image and the embeddings that the token at a position attends to: with cross-attention all of the
    latest one that begins at or before it, else the one in its place. None if there is none."""
    for i in reversed(range(len(media))):
        if media[i].start <= position:
            row = position - media[i].start
            if cross:
                return i, range(media[i].num_embeds)
            return (i, range(row, row + 1)) if row < media[i].num_embeds else None
    return None


class EchoImages:
    """Image embeddings in the pages of a geometry's groups."""

    def __init__(self, geometry: KVCacheConfig, groups: list[EchoPages]) -> None:
        self.geometry, self.groups = geometry, groups
        self.group_index = next((g for g, one in enumerate(geometry.groups) if one.kind in ("cross", "vision")), -1)
        self.is_cross_attention = any(group.kind == "cross" for group in geometry.groups)
        if geometry.sight == "inside":
            self.group_index = geometry.image_embed_group
        self.media: dict[int, tuple[ImageItem, ...]] = {}  # by slot
        self.encoded_parts: dict[tuple[int, int], int] = {}  # by slot and image
        self.transient_rows: dict[tuple[int, int], list[int]] = {}  # embeddings of this step only
        self.num_encoded = 0  # images

    def encode(self, entry: ImageEncoding) -> None:
        """Apply an encoding. Parts must be in order."""
        image, key = self.media[entry.slot][entry.image_index], (entry.slot, entry.image_index)
        done = self.encoded_parts.get(key, 0) if entry.first_part else 0
        assert done == entry.first_part, (
            f"slot {entry.slot} has {done} parts of image {entry.image_index}, not {entry.first_part}"
        )
        assert 0 < entry.num_parts <= image.num_parts - done, f"image {entry.image_index} has {image.num_parts} parts"
        self.encoded_parts[key] = done + entry.num_parts
        if self.encoded_parts[key] < image.num_parts:
            return
        del self.encoded_parts[key]
        self.num_encoded += 1
        states = [row_state(image.key, row) for row in range(image.num_embeds)]
        if entry.group < 0:
            self.transient_rows[key] = states
        elif self.geometry.sight == "inside":
            for row in range(entry.skip_embeds, image.num_embeds):
                cell = np.frombuffer(struct.pack("<q", states[row]), np.uint8)
                self._inline_row(entry.slot, image.start + row)[:] = np.resize(cell, self.geometry.row_bytes)
        else:
            pages = self.groups[entry.group]
            for row, state in enumerate(states):
                pages.write_state(entry.slot, entry.first_page * pages.group.run_tokens + row, state)

    def _inline_row(self, slot: int, position: int) -> Bytes:
        """Return the bytes of a position's embedding, in a page for later keys and values."""
        pages, size = self.groups[self.group_index], self.geometry.row_bytes
        page, place = divmod(position, pages.group.run_tokens)
        return pages.pages[pages.page_at(slot, page + 1), place * size : (place + 1) * size]

    def read_visible(self, slot: int, position: int) -> bytes:
        """Read the image embeddings that the token at a position of a slot attends to."""
        media = self.media[slot]
        visible = visible_rows(media, position, self.is_cross_attention)
        if visible is None:
            return b""
        i, rows = visible
        if self.geometry.sight == "off":
            return struct.pack("<q", self.transient_rows[slot, i][rows.start])
        pages = self.groups[self.group_index]
        if self.geometry.sight == "inside":
            return self._inline_row(slot, position)[:STATE_BYTES].tobytes()
        first = sum(pages.group.num_pages(image.num_embeds) for image in media[:i]) * pages.group.run_tokens
        return pages.read_states(slot, first + rows.start, first + rows.stop).tobytes()
