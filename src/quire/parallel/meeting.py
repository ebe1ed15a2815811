"""Where ranks of one host meet in a step: memory that they share, with two slots for each and how often each has met
the others, two eventfds each, and pipes from stage to stage. Made by the engine's process; none of it has a name. No
torch here.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from quire.vocabulary.layout import Layout, Part

SLOT = 1 << 20  # bytes that a rank tells at once; larger tensors go in pieces
COUNTS = 4096  # bytes for counts
LINE = 8  # words from a rank's count to the next one's, of which the second says that it waits for another stage


class Seats(NamedTuple):
    """The descriptors of a Meeting that one rank uses: of the memory, which has `bytes`, of a file that groups of
    torch.distributed meet through, of the events of its stage, two a rank, and of its pipes from the stage before and
    to the one behind, or -1."""

    memory: int
    store: int
    events: Sequence[int]
    before: int
    behind: int
    bytes: int


def seats_of(part: Part, descriptors: Sequence[int]) -> Seats:
    """What is whose of a Meeting's descriptors."""
    memory, store, *rest = descriptors
    ranks, stage = part.ranks * part.stages, 2 * part.ranks
    pipes = rest[2 * ranks :]
    assert len(pipes) == 2 * (ranks - part.ranks), f"{len(rest)} descriptors are not those of {ranks} ranks"
    before = -1 if part.starts else pipes[2 * (part.number - part.ranks) + 1]
    behind = -1 if part.ends else pipes[2 * part.number]
    return Seats(
        memory, store, rest[stage * part.stage : stage * (part.stage + 1)], before, behind, COUNTS + ranks * 2 * SLOT
    )


class Meeting:
    """The descriptors that ranks inherit: of the memory, of a file that groups of torch.distributed meet through, of
    the events, two a rank, and of both ends of pipes, from each rank of a stage to its like of the next."""

    def __init__(self, layout: Layout) -> None:
        """OSError where the system has no memory or descriptor for it."""
        ranks = layout.ranks
        self.memory = os.memfd_create("quire-meeting", os.MFD_CLOEXEC)
        self.events, self.pipes = list[int](), list[int]()
        self.store = -1
        try:
            self.store = os.memfd_create("quire-group", os.MFD_CLOEXEC)
            os.ftruncate(self.memory, COUNTS + ranks * 2 * SLOT)
            self._map = mmap.mmap(self.memory, COUNTS)
            self._counts = memoryview(self._map).cast("Q")
            for _ in range(2 * ranks):
                self.events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            for _ in range(ranks - layout.tp):
                self.pipes += [end.detach() for end in socket.socketpair()]
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them: see `seats_of`."""
        return self.memory, self.store, *self.events, *self.pipes

    def behind(self, ranks: Iterable[int]) -> int:
        """Of these ranks the one that others may wait for: of those that don't wait for another stage the one that has
        met the others least often."""
        every = list(ranks)
        at_work = [rank for rank in every if not self._counts[rank * LINE + 1]]
        return min(at_work or every, key=lambda rank: self._counts[rank * LINE])

    def close(self) -> None:
        """Let go of them, which stay as long as ranks have them."""
        if hasattr(self, "_counts"):
            self._counts.release()
            self._map.close()
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.events, self.pipes, self.memory, self.store = [], [], -1, -1
