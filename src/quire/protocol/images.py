"""What a prompt has besides tokens: pictures, as the control plane counts them and as the data plane sees them."""

from __future__ import annotations

from typing import NamedTuple


class ImageItem(NamedTuple):
    """A picture in a prompt. `key` (32 bytes) says what it is: a digest of its content, how it was prepared, and the
    tenant's salt; what was made of a picture is found again by it.

    It stands at positions start .. start + tokens - 1. Its encoder makes `num_embeds` rows of numbers: as many as
    tokens, where they take the place of these tokens' embeddings; or others, where layers of their own attend to them
    (cross attention). `num_parts` equal shares (tiles) of a picture can be encoded one after another.
    """

    key: bytes
    start: int
    num_tokens: int
    num_embeds: int
    num_parts: int = 1

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + self.num_tokens


class ImagePixels(NamedTuple):
    """What the encoder gets of the picture `key`: `shape` (tiles, height, width, 3) bytes, and `grid`, what else its
    model must know of it (tiles a side, the original's size)."""

    key: bytes
    shape: tuple[int, ...]
    data: bytes
    grid: tuple[int, ...] = ()
