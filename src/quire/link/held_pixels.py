"""The pixels of the requests that an engine has: each picture once, until the last of its requests ended, since one
that was preempted may have to see it again. Bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.errors import Overloaded
from quire.vocabulary.media import Pixels

MOST_HELD = 1 << 32  # bytes


class HeldPixels:
    """Pictures by key. `bytes` is what they have together, `most` at most."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self.bytes, self.most = 0, most
        self._held: dict[bytes, Pixels] = {}
        self._users: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, pixels: Sequence[Pixels]) -> tuple[Pixels, ...]:
        """Count one more user of each; a picture that is here already is returned in place of its like. Overloaded if
        they don't fit, and then nothing changed."""
        new = {one.key: one for one in pixels if one.key not in self._held}
        size = sum(len(one.data) for one in new.values())
        if self.bytes + size > self.most:
            raise Overloaded(
                f"the pictures of requests under way have {self.bytes} bytes; with the {size} of this one they are "
                f"more than {self.most}"
            )
        self._held |= new
        self.bytes += size
        for one in pixels:
            self._users[one.key] = self._users.get(one.key, 0) + 1
        return tuple(self._held[one.key] for one in pixels)

    def drop(self, keys: Iterable[bytes]) -> None:
        """One user less of each; those without any are gone."""
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.bytes -= len(self._held.pop(key).data)
