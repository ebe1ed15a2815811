"""The shared resources through which the ranks of one host communicate in a step: memory with two slots for each rank
and a counter of its exchanges, two eventfds for each rank, and a socket to each neighbouring stage. The process that
starts the ranks creates them; none has a name. No torch here."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from quire.protocol.parallel_layout import ParallelLayout, Shard

START_FACTOR = 5  # a start may take this many times as long as a step
SLOT_BYTES = 1 << 20  # of a rank's tensor; larger ones are sent in pieces
COUNTER_BYTES = 4096
# Words for each rank: the count of its exchanges, then a flag that it waits for another stage, then padding.
COUNTER_STRIDE = 8


class RankFds(NamedTuple):
    """What one rank uses of a RankRendezvous: `number` is its number among the ranks of its host. The descriptors are
    the memory; a file through which groups of torch.distributed connect; the events of its stage, two for each rank;
    and its sockets to the previous and the next stage, or -1. `remote_previous` and `remote_next`: that stage is on
    another host."""

    number: int
    memory: int
    store: int
    events: Sequence[int]
    previous_stage: int
    next_stage: int
    remote_previous: bool
    remote_next: bool


class Meeting(NamedTuple):
    """A RankRendezvous as its ranks get it: the stages of their host, `num_stages` from `first_stage` on, and the
    inherited descriptors. These are the memory, the file, and for each rank two events, the socket to the previous
    stage unless it is in the first one, and the socket to the next stage unless it is in the last one."""

    first_stage: int = 0
    num_stages: int = 1
    descriptors: tuple[int, ...] = ()

    def fds(self, shard: Shard) -> RankFds:
        """Return what the rank of that shard uses."""
        memory, store, *rest = self.descriptors
        sizes = [_num_descriptors(stage, shard.pp_size) for stage in range(shard.pp_size)]
        own = sizes[self.first_stage : self.first_stage + self.num_stages]
        assert len(rest) == shard.tp_size * sum(own), f"{len(rest)} descriptors do not match stages {self[:2]}"
        stage, size = shard.pp_rank - self.first_stage, sizes[shard.pp_rank]
        start = shard.tp_size * sum(own[:stage])
        ranks = [rest[at : at + size] for at in range(start, start + shard.tp_size * size, size)]
        sockets = ranks[shard.tp_rank][2:]
        return RankFds(
            number=stage * shard.tp_size + shard.tp_rank,
            memory=memory,
            store=store,
            events=[event for rank in ranks for event in rank[:2]],
            previous_stage=-1 if shard.is_first_stage else sockets[0],
            next_stage=-1 if shard.is_last_stage else sockets[-1],
            remote_previous=stage == 0 and not shard.is_first_stage,
            remote_next=stage == self.num_stages - 1 and not shard.is_last_stage,
        )


def _num_descriptors(stage: int, num_stages: int) -> int:
    """Return the descriptors of one rank of that stage."""
    return 2 + (stage > 0) + (stage < num_stages - 1)


class RankRendezvous:
    """The shared resources of the ranks of `stages`, by default all (see Meeting)."""

    def __init__(
        self,
        layout: ParallelLayout,
        stages: range | None = None,
        previous: Sequence[socket.socket] = (),
        following: Sequence[socket.socket] = (),
    ) -> None:
        """Create them. `previous` and `following` are sockets to the stages before and after on other hosts, one for
        each rank of the first and of the last stage here; they are closed with the rest. Raise OSError if the system
        has no memory or descriptor left."""
        self.stages = stages = stages or range(layout.pp)
        ranks = layout.tp * len(stages)
        self.memory = os.memfd_create("quire-meeting", os.MFD_CLOEXEC)
        self.store = -1
        self._each_rank: list[list[int]] = []
        sockets = [*previous, *following]
        try:
            self.store = os.memfd_create("quire-group", os.MFD_CLOEXEC)
            os.ftruncate(self.memory, COUNTER_BYTES + ranks * 2 * SLOT_BYTES)
            self._map = mmap.mmap(self.memory, COUNTER_BYTES)
            self._counters = memoryview(self._map).cast("Q")
            for stage in stages:
                after = list(following)
                if stage < stages[-1]:
                    pairs = [socket.socketpair() for _ in range(layout.tp)]
                    after, next_before = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
                    sockets += after + next_before
                for rank in range(layout.tp):
                    own = list[int]()
                    self._each_rank.append(own)
                    for _ in range(2):
                        own.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                    own += (ends[rank].detach() for ends in (previous, after) if ends)
                if stage < stages[-1]:
                    previous = next_before
        except OSError:
            for end in sockets:
                end.close()
            self.close()
            raise

    @property
    def meeting(self) -> Meeting:
        """What ranks get."""
        descriptors = (self.memory, self.store, *(one for rank in self._each_rank for one in rank))
        return Meeting(self.stages[0], len(self.stages), descriptors)

    def progress(self, number: int) -> tuple[bool, int]:
        """Return True if a rank of this host waits for another stage, and the count of its exchanges."""
        return bool(self._counters[number * COUNTER_STRIDE + 1]), self._counters[number * COUNTER_STRIDE]

    def close(self) -> None:
        """Close them. They exist as long as ranks have them open."""
        if hasattr(self, "_counters"):
            self._counters.release()
            self._map.close()
        for descriptor in self.meeting.descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._each_rank, self.memory, self.store = [], -1, -1


def slowest_rank(progress: Mapping[int, tuple[bool, int]], ranks: Iterable[int]) -> int:
    """Return the one of these ranks for which the others probably wait: of those that do not wait for another stage,
    the one with the fewest exchanges. `progress` is by rank: see RankRendezvous."""
    every = list(ranks)
    at_work = [rank for rank in every if not progress[rank][0]]
    return min(at_work or every, key=lambda rank: progress[rank][1])
