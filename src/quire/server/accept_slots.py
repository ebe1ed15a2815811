"""Connections of all fronts of a server: how many each has open, in memory that they share, so that they take turns at
accepting, those that have the fewest first, and keep one limit together.

A front writes its own number and reads the others'. Nobody waits for anybody: a number that is late costs evenness.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Any

COUNT_FORMAT = struct.Struct("=I")


def create_slots_file(count: int) -> int:
    """The descriptor of a file without a name for the numbers of so many fronts; the caller's to close."""
    with tempfile.TemporaryFile() as file:
        file.truncate(COUNT_FORMAT.size * count)
        return os.dup(file.fileno())


class AcceptSlots:
    """The numbers of `count` fronts in the file of that descriptor, of which this one's is `index`; `max_connections`
    connections may be open in all of them."""

    def __init__(self, descriptor: int, count: int, index: int, max_connections: int | None) -> None:
        self.max_connections, self._index = max_connections, index
        self._open_counts = memoryview(mmap.mmap(descriptor, COUNT_FORMAT.size * count)).cast("I")

    def set_open(self, open: int) -> None:
        """This front has so many."""
        self._open_counts[self._index] = open

    def is_full(self) -> bool:
        """There is no room for another one."""
        return self.max_connections is not None and sum(self._open_counts) >= self.max_connections

    def is_my_turn(self) -> bool:
        """It is this front's turn: none has fewer."""
        return self._open_counts[self._index] <= min(self._open_counts)


class OpenConnections(set[Any]):
    """The connections that a front has open, their number noted in `accept_slots`."""

    def __init__(self, accept_slots: AcceptSlots | None) -> None:
        super().__init__()
        self._accept_slots = accept_slots

    def add(self, one: Any) -> None:
        """One was accepted."""
        super().add(one)
        if self._accept_slots is not None:
            self._accept_slots.set_open(len(self))

    def discard(self, one: Any) -> None:
        """One is closed."""
        super().discard(one)
        if self._accept_slots is not None:
            self._accept_slots.set_open(len(self))
