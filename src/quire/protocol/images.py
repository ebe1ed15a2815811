"""Images in prompts: ImageItem for the engine, ImagePixels for the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ImageItem(NamedTuple):
    """An image in a prompt. `key` (32 bytes) is a digest of its content, its preprocessing and the tenant's salt;
    caches find an image's data by it.

    It stands at positions start .. start + num_tokens - 1. The encoder makes `num_embeds` embeddings: one for each
    token, if they replace the tokens' embeddings, or another number, if layers of their own attend to them (cross
    attention). The image consists of `num_parts` equal parts (tiles), which can be encoded one after another.
    """

    key: bytes
    start: int
    num_tokens: int
    num_embeds: int
    num_parts: int = 1

    @property
    def end(self) -> int:
        """The position after the image."""
        return self.start + self.num_tokens


def clip_at_image(images: Sequence[ImageItem], planned: int, count: int) -> int:
    """Return how many of a sequence's next `count` tokens, after the first `planned` ones, one step may compute if it
    must not end within one of the `images`."""
    end = planned + count
    cut = next((image for image in images if image.start < end < image.end), None)
    return count if cut is None else max(cut.start - planned, 0)


class ImagePixels(NamedTuple):
    """The encoder's input for the image `key`: bytes of `shape` (tiles, height, width, 3), and `grid`, the
    fields of its TileGrid, or of several for images that are encoded as one."""

    key: bytes
    shape: tuple[int, ...]
    data: bytes
    grid: tuple[int, ...] = ()
