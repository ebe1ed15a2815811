"""The pixels of the requests that an engine has: each picture once, until the last of its requests ended, since one
that was preempted may have to see it again. Bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.errors import Overloaded
from quire.protocol.images import ImagePixels

MAX_PIXEL_BYTES = 1 << 32  # bytes


class PixelStore:
    """Pictures by key. `total_bytes` is what they have together, `max_bytes` at most."""

    def __init__(self, max_bytes: int = MAX_PIXEL_BYTES) -> None:
        self.total_bytes, self.max_bytes = 0, max_bytes
        self._by_key: dict[bytes, ImagePixels] = {}
        self._refcounts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def incref(self, pixels: Sequence[ImagePixels]) -> tuple[ImagePixels, ...]:
        """Count one more user of each; a picture that is here already is returned in place of its like. Overloaded if
        they don't fit, and then nothing changed."""
        new = {one.key: one for one in pixels if one.key not in self._by_key}
        size = sum(len(one.data) for one in new.values())
        if self.total_bytes + size > self.max_bytes:
            raise Overloaded(
                f"the pictures of requests under way have {self.total_bytes} bytes; with the {size} of this one they "
                f"are "
                f"more than {self.max_bytes}"
            )
        self._by_key |= new
        self.total_bytes += size
        for one in pixels:
            self._refcounts[one.key] = self._refcounts.get(one.key, 0) + 1
        return tuple(self._by_key[one.key] for one in pixels)

    def decref(self, keys: Iterable[bytes]) -> None:
        """One user less of each; those without any are gone."""
        for key in keys:
            self._refcounts[key] -= 1
            if not self._refcounts[key]:
                del self._refcounts[key]
                self.total_bytes -= len(self._by_key.pop(key).data)
