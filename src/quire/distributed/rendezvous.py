"""The shared resources through which the ranks of one host communicate in a step: memory with two slots for each rank
and a counter of its exchanges, two eventfds for each rank, and sockets between stages. The engine's process creates
them; none has a name. No torch here."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from quire.protocol.parallel_layout import ParallelLayout, Shard

START_FACTOR = 5  # a start may take this many times as long as a step
SLOT_BYTES = 1 << 20  # of a rank's tensor; larger ones are sent in pieces
COUNTER_BYTES = 4096
# Words for each rank: the count of its exchanges, then a flag that it waits for another stage, then padding.
COUNTER_STRIDE = 8


class RankFds(NamedTuple):
    """The descriptors of a RankRendezvous that one rank uses: the memory; a file through which groups of
    torch.distributed connect; the events of its stage, two for each rank; and its sockets to the previous and the next
    stage, or -1."""

    memory: int
    store: int
    events: Sequence[int]
    previous_stage: int
    next_stage: int


def rank_fds(shard: Shard, descriptors: Sequence[int]) -> RankFds:
    """Return the descriptors that a rank uses of `RankRendezvous.descriptors`."""
    memory, store, *rest = descriptors
    ranks, stage = shard.tp_size * shard.pp_size, 2 * shard.tp_size
    pipes = rest[2 * ranks :]
    assert len(pipes) == 2 * (ranks - shard.tp_size), f"{len(rest)} descriptors do not match {ranks} ranks"
    previous_stage = -1 if shard.is_first_stage else pipes[2 * (shard.global_rank - shard.tp_size) + 1]
    next_stage = -1 if shard.is_last_stage else pipes[2 * shard.global_rank]
    events = rest[stage * shard.pp_rank : stage * (shard.pp_rank + 1)]
    return RankFds(memory, store, events, previous_stage, next_stage)


class RankRendezvous:
    """The descriptors that ranks inherit (see RankFds), with both ends of the sockets from each rank of a stage to the
    same rank of the next one."""

    def __init__(self, layout: ParallelLayout) -> None:
        """Create them. Raise OSError if the system has no memory or descriptor left."""
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
        """All descriptors: see `rank_fds`."""
        return self.memory, self.store, *self.events, *self.pipes

    def slowest_rank(self, ranks: Iterable[int]) -> int:
        """Return the one of these ranks for which the others probably wait: of those that do not wait for another
        stage, the one with the fewest exchanges."""
        every = list(ranks)
        at_work = [rank for rank in every if not self._counters[rank * COUNTER_STRIDE + 1]]
        return min(at_work or every, key=lambda rank: self._counters[rank * COUNTER_STRIDE])

    def close(self) -> None:
        """Close them. They exist as long as ranks have them open."""
        if hasattr(self, "_counters"):
            self._counters.release()
            self._map.close()
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.events, self.pipes, self.memory, self.store = [], [], -1, -1
