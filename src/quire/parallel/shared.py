"""How ranks on CPUs of one host meet in a step: each writes what it has into its slot, tells the others, and reads
theirs. Every rank adds up all by itself, in rank order and in fp32, so that all have the same bits.

A rank has two slots, used in turn. Whoever has heard of the others' next piece knows that they have read this one, so
that what is written over was read by all.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.errors import PeerLost
from quire.parallel.meeting import COUNTS, LINE, SLOT, seats_of
from quire.vocabulary.layout import Part

AT_START = 5.0  # times as long as in a step others are waited for: quire.parallel.remote.STARTS
MARGIN = 30.0  # seconds more than the engine waits: it names who is silent before anybody else gives up


class SharedExchange:
    """One rank's end (see quire.data.layers.exchange). PeerLost where another one says nothing for `seconds`."""

    def __init__(self, part: Part, descriptors: Sequence[int], seconds: float) -> None:
        """`descriptors` are a Meeting's."""
        self.part, self._seconds = part, seconds + MARGIN
        seats = seats_of(part, descriptors)
        events, self.store = seats.events, seats.store
        shared = mmap.mmap(seats.memory, seats.bytes)
        self._counts = memoryview(shared)[:COUNTS].cast("Q")
        slots = torch.frombuffer(shared, dtype=torch.uint8, offset=COUNTS).view(-1, part.ranks, 2, SLOT)
        self._slots = slots[part.stage]
        self._mine = events[2 * part.rank : 2 * part.rank + 2]
        self._others = [list(events[turn::2]) for turn in range(2)]
        for turn in range(2):
            self._others[turn].pop(part.rank)
        self._polls = [select.poll() for _ in range(2)]
        for poll, event in zip(self._polls, self._mine):
            poll.register(event, select.POLLIN)
        self._turn = 0

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: everybody's, in rank order."""
        every = x.new_empty((self.part.ranks, *x.shape))
        sent, received = _bytes(x.contiguous()), every.view(self.part.ranks, -1).view(torch.uint8)
        for at in range(0, len(sent), SLOT):
            piece = sent[at : at + SLOT]
            received[:, at : at + SLOT] = self._meet(piece)
        return every

    def add(self, x: Tensor) -> Tensor:
        """x, in place and returned: the sum of all ranks'."""
        flat, most = x.contiguous().view(-1), SLOT // x.itemsize
        for at in range(0, len(flat), most):
            piece = flat[at : at + most]
            every = self._meet(_bytes(piece)).view(x.dtype)
            total = every[0].to(torch.float32, copy=True)
            for other in every[1:]:
                total += other
            piece.copy_(total)
        return x if x.is_contiguous() else x.copy_(flat.view(x.shape))

    def largest(self, x: Tensor) -> Tensor:
        """x's numbers, each the largest of all ranks': asked for while weights are loaded, for as long as a start may
        take. On x's device."""
        with self._patient(AT_START):
            return self.gather(x.cpu()).amax(0).to(x.device)

    def meet(self, times: float = 1.0) -> None:
        """Wait until all are here, so many times as long as in a step."""
        with self._patient(times):
            self.gather(torch.zeros(1))

    @contextmanager
    def _patient(self, times: float) -> Iterator[None]:
        seconds, self._seconds = self._seconds, self._seconds * times
        try:
            yield
        finally:
            self._seconds = seconds

    def check(self) -> None:
        """Who is missed is missed at once."""

    def _meet(self, piece: Tensor) -> Tensor:
        """[ranks, bytes]: everybody's piece, until two more are met."""
        turn, missing = self._next(), self.part.ranks - 1
        self._counts[self.part.number * LINE] += 1
        self._slots[self.part.rank, turn, : len(piece)] = piece
        for event in self._others[turn]:
            os.eventfd_write(event, 1)
        while missing:
            if not self._polls[turn].poll(self._seconds * 1000):
                raise PeerLost(f"{missing} of {self.part.ranks - 1} other ranks have said nothing in a step")
            missing -= os.eventfd_read(self._mine[turn])
        return self._slots[:, turn, : len(piece)]

    def _next(self) -> int:
        """The slot of the next piece."""
        self._turn = 1 - self._turn
        return self._turn


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
