"""Share one limit of open connections among the frontends of a server, and take turns at accepting.

Each frontend writes the number of its open connections into shared memory and reads those of the others. The frontend
with the fewest accepts first. There are no locks: a number that is read late only makes the shares less even.

SO_REUSEPORT, a socket for each frontend, is not used: a stopped frontend would leave its share of the clients hanging,
and any program of the same user could listen on the port. Without turns, a burst of 200 connections was divided among
four frontends as unevenly as 7 to 118.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Any

COUNT_FORMAT = struct.Struct("=I")


def create_slots_file(count: int) -> int:
    """Return the descriptor of an unnamed file for the numbers of `count` frontends. The caller closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(COUNT_FORMAT.size * count)
        return os.dup(file.fileno())


class AcceptSlots:
    """The numbers of open connections of `count` frontends in the file `descriptor`. This frontend's number is at
    `index`. All of them together may have `max_connections` open (None: no limit)."""

    def __init__(self, descriptor: int, count: int, index: int, max_connections: int | None) -> None:
        self.max_connections, self._index = max_connections, index
        self._open_counts = memoryview(mmap.mmap(descriptor, COUNT_FORMAT.size * count)).cast("I")

    def set_open(self, open: int) -> None:
        """Set the number of connections that this frontend has open."""
        self._open_counts[self._index] = open

    def is_full(self) -> bool:
        """Return True if the frontends have reached the limit together."""
        return self.max_connections is not None and sum(self._open_counts) >= self.max_connections

    def is_my_turn(self) -> bool:
        """Return True if no frontend has fewer connections open than this one."""
        return self._open_counts[self._index] <= min(self._open_counts)


class OpenConnections(set[Any]):
    """The set of this frontend's open connections. Its size is published in `accept_slots`, if given."""

    def __init__(self, accept_slots: AcceptSlots | None) -> None:
        super().__init__()
        self._accept_slots = accept_slots

    def add(self, one: Any) -> None:
        """Add an accepted connection."""
        super().add(one)
        if self._accept_slots is not None:
            self._accept_slots.set_open(len(self))

    def discard(self, one: Any) -> None:
        """Remove a closed connection."""
        super().discard(one)
        if self._accept_slots is not None:
            self._accept_slots.set_open(len(self))
