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

NUMBER = struct.Struct("=I")


def shared_file(count: int) -> int:
    """The descriptor of a file without a name for the numbers of so many fronts; the caller's to close."""
    with tempfile.TemporaryFile() as file:
        file.truncate(NUMBER.size * count)
        return os.dup(file.fileno())


class Places:
    """The numbers of `count` fronts in the file of that descriptor, of which this one's is `number`; `most` connections
    may be open in all of them."""

    def __init__(self, descriptor: int, count: int, number: int, most: int | None) -> None:
        self.most, self._number = most, number
        self._open = memoryview(mmap.mmap(descriptor, NUMBER.size * count)).cast("I")

    def note(self, open: int) -> None:
        """This front has so many."""
        self._open[self._number] = open

    def full(self) -> bool:
        """There is no room for another one."""
        return self.most is not None and sum(self._open) >= self.most

    def mine(self) -> bool:
        """It is this front's turn: none has fewer."""
        return self._open[self._number] <= min(self._open)


class Open(set[Any]):
    """The connections that a front has open, their number noted in `places`."""

    def __init__(self, places: Places | None) -> None:
        super().__init__()
        self._places = places

    def add(self, one: Any) -> None:
        """One was accepted."""
        super().add(one)
        if self._places is not None:
            self._places.note(len(self))

    def discard(self, one: Any) -> None:
        """One is closed."""
        super().discard(one)
        if self._places is not None:
            self._places.note(len(self))
