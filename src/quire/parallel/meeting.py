"""Where ranks of one host meet in a step: memory that they share, with two slots for each and how often each has met
the others, and two eventfds each. Made by the engine's process; none of it has a name. No torch here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress

SLOT = 1 << 20  # bytes that a rank tells at once; larger tensors go in pieces
COUNTS = 4096  # bytes for counts
LINE = 8  # words from a rank's count to the next one's


class Meeting:
    """The descriptors that ranks inherit: of the memory, of the events, two a rank, and of a file that groups of
    torch.distributed meet through."""

    def __init__(self, ranks: int) -> None:
        """OSError where the system has no memory or descriptor for it."""
        self.memory = os.memfd_create("quire-meeting", os.MFD_CLOEXEC)
        self.events: list[int] = []
        self.store = -1
        try:
            self.store = os.memfd_create("quire-group", os.MFD_CLOEXEC)
            os.ftruncate(self.memory, COUNTS + ranks * 2 * SLOT)
            self._map = mmap.mmap(self.memory, COUNTS)
            self._counts = memoryview(self._map).cast("Q")
            self.events += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2 * ranks)]
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them: the memory's, the events', the file's."""
        return self.memory, *self.events, self.store

    def behind(self, ranks: Iterable[int]) -> int:
        """Of these ranks the one that has met the others least often: they may wait for it."""
        return min(ranks, key=lambda rank: self._counts[rank * LINE])

    def close(self) -> None:
        """Let go of them, which stay as long as ranks have them."""
        if hasattr(self, "_counts"):
            self._counts.release()
            self._map.close()
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.events, self.store = [], -1
