"""The pixels of the requests of an engine. Each image is held once until the last of its requests ended, since a
preempted request may have to encode it again. The size is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.errors import Overloaded
from quire.protocol.images import ImagePixels

MAX_PIXEL_BYTES = 1 << 32


class PixelStore:
    """Pixels by the key of their image. `total_bytes` is their size, at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_PIXEL_BYTES) -> None:
        self.total_bytes, self.max_bytes = 0, max_bytes
        self._by_key: dict[bytes, ImagePixels] = {}
        self._refcounts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def incref(self, pixels: Sequence[ImagePixels]) -> tuple[ImagePixels, ...]:
        """Add one reference to each image; for an image that is held already, the held pixels are returned. Raise
        Overloaded, and change nothing, if the pixels do not fit."""
        new = {image.key: image for image in pixels if image.key not in self._by_key}
        size = sum(len(image.data) for image in new.values())
        if self.total_bytes + size > self.max_bytes:
            raise Overloaded(
                f"the images of requests under way have {self.total_bytes} bytes; with the {size} of this request they "
                f"exceed {self.max_bytes}"
            )
        self._by_key |= new
        self.total_bytes += size
        for image in pixels:
            self._refcounts[image.key] = self._refcounts.get(image.key, 0) + 1
        return tuple(self._by_key[image.key] for image in pixels)

    def decref(self, keys: Iterable[bytes]) -> None:
        """Remove one reference from each image, and images without references."""
        for key in keys:
            self._refcounts[key] -= 1
            if not self._refcounts[key]:
                del self._refcounts[key]
                self.total_bytes -= len(self._by_key.pop(key).data)
