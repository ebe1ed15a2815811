"""How stages on CPUs of one host give each other what a step's tokens are at a layer's border: through pipes without a
name, from each rank of a stage to its like of the next.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.errors import PeerLost
from quire.parallel.meeting import COUNTS, LINE, seats_of
from quire.parallel.shared import MARGIN
from quire.vocabulary.layout import Part

HEAD = struct.Struct("<QIIIB")  # the pass, rows, columns, bytes of a number, and whether something is to be added
ROOM = 1 << 22  # bytes on their way that are asked for; the system may allow less


class Pipes:
    """One rank's ends (see quire.data.runner.stages). PeerLost where a neighbour takes or gives nothing for so long."""

    def __init__(self, part: Part, descriptors: Sequence[int], seconds: float) -> None:
        """`descriptors` are a Meeting's."""
        seats = seats_of(part, descriptors)
        self.part = part
        self._before, self._behind = (
            _socket(one, seconds * part.stages + MARGIN) for one in (seats.before, seats.behind)
        )
        weakref.finalize(self, _close, self._before, self._behind)
        self._counts = memoryview(mmap.mmap(seats.memory, COUNTS)).cast("Q")
        self.given = self.taken = 0

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """x and delta, if any, [T, columns] each, to the stage behind."""
        assert self._behind is not None, "the last stage has none behind it"
        both = [x] if delta is None else [x, delta]
        self._say(x, len(both))
        for tensor in both:
            self._wait(self._behind.sendall, _bytes(tensor.contiguous()))

    def _say(self, x: Tensor, count: int) -> None:
        """What comes: so many tensors like x."""
        assert self._behind is not None, "the last stage has none behind it"
        self.given += 1
        self._wait(self._behind.sendall, HEAD.pack(self.given, *x.shape, x.itemsize, count - 1))

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What the stage before sent of its next step, which has so many rows."""
        more = self._hear(rows, columns, dtype)
        assert self._before is not None, "the first stage has none before it"
        both = [torch.empty(rows, columns, dtype=dtype) for _ in range(1 + more)]
        for tensor in both:
            self._fill(self._before, _bytes(tensor))
        return both[0], both[1] if more else None

    def _hear(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Wait for the head of what comes, which must be of such rows; whether there are two tensors."""
        assert self._before is not None, "the first stage has none before it"
        self.taken += 1
        head = bytearray(HEAD.size)
        self._fill(self._before, memoryview(head))
        *found, more = HEAD.unpack(head)
        due = [self.taken, rows, columns, dtype.itemsize]
        assert found == due, f"the stage before gave (pass, rows, columns, bytes) {found}, and {due} are due"
        return bool(more)

    def _fill(self, end: socket.socket, room: memoryview) -> None:
        while len(room):
            count = self._wait(end.recv_into, room)
            if not count:
                raise PeerLost("another stage has left")
            room = room[count:]

    def _wait(self, work: Callable[[memoryview | bytes], int | None], data: memoryview | bytes) -> int:
        with self._waiting():
            try:
                return work(data) or 0
            except TimeoutError:
                raise PeerLost("another stage has taken or given nothing in a step") from None
            except ConnectionError as error:
                raise PeerLost("another stage has left") from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Whoever looks for the one that all wait for is told that it isn't this one."""
        self._counts[self.part.number * LINE + 1] = 1
        try:
            yield
        finally:
            self._counts[self.part.number * LINE + 1] = 0


def _socket(descriptor: int, seconds: float) -> socket.socket | None:
    if descriptor < 0:
        return None
    made = socket.socket(fileno=os.dup(descriptor))
    made.settimeout(seconds)
    for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, kind, ROOM)
    return made


def _close(*ends: socket.socket | None) -> None:
    for end in ends:
        if end is not None:
            end.close()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
