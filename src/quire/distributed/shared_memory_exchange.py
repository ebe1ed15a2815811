"""Communication of ranks on CPUs of one host in a step: each rank writes its tensor into its slot, notifies the others,
and reads theirs. Every rank sums all tensors itself, in rank order and in fp32, so all get the same bits.

A rank has two slots, used in turn. A notification for the next piece shows that its sender has read this one, so a slot
is only overwritten after all ranks have read it."""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.distributed.rendezvous import COUNTER_BYTES, COUNTER_STRIDE, SLOT_BYTES, START_FACTOR, RankFds
from quire.errors import PeerLost
from quire.protocol.parallel_layout import Shard

TIMEOUT_MARGIN = 30.0  # seconds more than the engine waits, so that the engine names the silent rank first


class SharedMemoryExchange:
    """The Exchange (quire.layers.exchange) of one rank. Raises PeerLost if another rank is silent for `seconds`."""

    def __init__(self, shard: Shard, fds: RankFds, seconds: float) -> None:
        """Map the memory of the RankRendezvous."""
        self.shard, self._seconds = shard, seconds + TIMEOUT_MARGIN
        self.store, self._number = fds.store, fds.number
        shared = mmap.mmap(fds.memory, 0)
        self._counters = memoryview(shared)[:COUNTER_BYTES].cast("Q")
        slots = torch.frombuffer(shared, dtype=torch.uint8, offset=COUNTER_BYTES).view(-1, shard.tp_size, 2, SLOT_BYTES)
        self._slots = slots[fds.number // shard.tp_size]
        self._own_events = fds.events[2 * shard.tp_rank : 2 * shard.tp_rank + 2]
        self._other_events = [list(fds.events[turn::2]) for turn in range(2)]
        for turn in range(2):
            self._other_events[turn].pop(shard.tp_rank)
        self._polls = [select.poll() for _ in range(2)]
        for poll, event in zip(self._polls, self._own_events):
            poll.register(event, select.POLLIN)
        self._slot = 0

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors, [ranks, *x.shape], in rank order."""
        gathered = x.new_empty((self.shard.tp_size, *x.shape))
        sent, received = _as_bytes(x.contiguous()), gathered.view(self.shard.tp_size, -1).view(torch.uint8)
        for at in range(0, len(sent), SLOT_BYTES):
            piece = sent[at : at + SLOT_BYTES]
            received[:, at : at + SLOT_BYTES] = self._all_gather_chunk(piece)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by the sum over all ranks, and return it."""
        flat, most = x.contiguous().view(-1), SLOT_BYTES // x.itemsize
        for at in range(0, len(flat), most):
            piece = flat[at : at + most]
            every = self._all_gather_chunk(_as_bytes(piece)).view(x.dtype)
            total = every[0].to(torch.float32, copy=True)
            for other in every[1:]:
                total += other
            piece.copy_(total)
        return x if x.is_contiguous() else x.copy_(flat.view(x.shape))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks, on x's device. Used while weights are loaded, with the
        timeout of a start."""
        with self._scaled_timeout(START_FACTOR):
            return self.all_gather(x.cpu()).amax(0).to(x.device)

    def barrier(self, timeout_factor: float = 1.0) -> None:
        """Wait for all ranks, with the timeout of a step times `timeout_factor`."""
        with self._scaled_timeout(timeout_factor):
            self.all_gather(torch.zeros(1))

    @contextmanager
    def _scaled_timeout(self, timeout_factor: float) -> Iterator[None]:
        seconds, self._seconds = self._seconds, self._seconds * timeout_factor
        try:
            yield
        finally:
            self._seconds = seconds

    def check_peers(self) -> None:
        """Do nothing: a lost rank raises an error in the exchange itself."""

    def _all_gather_chunk(self, piece: Tensor) -> Tensor:
        """Return all ranks' bytes of one piece, [ranks, bytes], valid until the exchange after next."""
        self._slot = turn = 1 - self._slot
        missing = self.shard.tp_size - 1
        self._counters[self._number * COUNTER_STRIDE] += 1
        self._slots[self.shard.tp_rank, turn, : len(piece)] = piece
        for event in self._other_events[turn]:
            os.eventfd_write(event, 1)
        while missing:
            if not self._polls[turn].poll(self._seconds * 1000):
                raise PeerLost(f"{missing} of {self.shard.tp_size - 1} other ranks were silent in a step")
            missing -= os.eventfd_read(self._own_events[turn])
        return self._slots[:, turn, : len(piece)]


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
