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

from quire.protocol.parallel_layout import ParallelLayout, Shard

SLOT_BYTES = 1 << 20  # bytes that a rank tells at once; larger tensors go in pieces
COUNTER_BYTES = 4096  # bytes for counts
# words from a rank's count to the next one's, of which the second says that it waits for another stage
COUNTER_STRIDE = 8


class RankFds(NamedTuple):
    """The descriptors of a Meeting that one rank uses: of the memory, which has `bytes`, of a file that groups of
    torch.distributed meet through, of the events of its stage, two a rank, and of its pipes from the stage before and
    to the one behind, or -1."""

    memory: int
    store: int
    events: Sequence[int]
    previous_stage: int
    next_stage: int
    bytes: int


def rank_fds(shard: Shard, descriptors: Sequence[int]) -> RankFds:
    """What is whose of a Meeting's descriptors."""
    memory, store, *rest = descriptors
    ranks, stage = shard.tp_size * shard.pp_size, 2 * shard.tp_size
    pipes = rest[2 * ranks :]
    assert len(pipes) == 2 * (ranks - shard.tp_size), f"{len(rest)} descriptors are not those of {ranks} ranks"
    before = -1 if shard.is_first_stage else pipes[2 * (shard.global_rank - shard.tp_size) + 1]
    behind = -1 if shard.is_last_stage else pipes[2 * shard.global_rank]
    return RankFds(
        memory,
        store,
        rest[stage * shard.pp_rank : stage * (shard.pp_rank + 1)],
        before,
        behind,
        COUNTER_BYTES + ranks * 2 * SLOT_BYTES,
    )


class RankRendezvous:
    """The descriptors that ranks inherit: of the memory, of a file that groups of torch.distributed meet through, of
    the events, two a rank, and of both ends of pipes, from each rank of a stage to its like of the next."""

    def __init__(self, layout: ParallelLayout) -> None:
        """OSError where the system has no memory or descriptor for it."""
        ranks = layout.world_size
        self.memory = os.memfd_create("quire-meeting", os.MFD_CLOEXEC)
        self.events, self.pipes = list[int](), list[int]()
        self.store = -1
        try:
            self.store = os.memfd_create("quire-group", os.MFD_CLOEXEC)
            os.ftruncate(self.memory, COUNTER_BYTES + ranks * 2 * SLOT_BYTES)
            self._map = mmap.mmap(self.memory, COUNTER_BYTES)
            self._counters = memoryview(self._map).cast("Q")
            for _ in range(2 * ranks):
                self.events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            for _ in range(ranks - layout.tp):
                self.pipes += [end.detach() for end in socket.socketpair()]
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them: see `rank_fds`."""
        return self.memory, self.store, *self.events, *self.pipes

    def slowest_rank(self, ranks: Iterable[int]) -> int:
        """Of these ranks the one that others may wait for: of those that don't wait for another stage the one that has
        met the others least often."""
        every = list(ranks)
        at_work = [rank for rank in every if not self._counters[rank * COUNTER_STRIDE + 1]]
        return min(at_work or every, key=lambda rank: self._counters[rank * COUNTER_STRIDE])

    def close(self) -> None:
        """Let go of them, which stay as long as ranks have them."""
        if hasattr(self, "_counters"):
            self._counters.release()
            self._map.close()
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.events, self.pipes, self.memory, self.store = [], [], -1, -1
