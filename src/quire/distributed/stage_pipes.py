"""Communication of pipeline stages on CPUs: the tensors of a step at the border of two stages go through sockets, from
each rank of a stage to the same rank of the next one. The sockets of one host have no names; those between hosts are
TCP connections."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.distributed.rendezvous import COUNTER_BYTES, COUNTER_STRIDE, RankFds
from quire.distributed.shared_memory_exchange import TIMEOUT_MARGIN
from quire.errors import PeerLost
from quire.protocol.parallel_layout import Shard

HEAD = struct.Struct("<QIIIB")  # number of the message, rows, columns, bytes of an element, whether there is a delta
SOCKET_BUFFER_BYTES = 1 << 22  # requested; the system may allow less


class StagePipes:
    """The StageNeighbours (quire.layers.exchange) of one rank. Raises PeerLost if a neighbour sends or receives nothing
    for `seconds` times the number of stages."""

    def __init__(self, shard: Shard, fds: RankFds, seconds: float) -> None:
        """Open the sockets of the RankRendezvous."""
        self.shard, self._number = shard, fds.number
        self._previous, self._next = (
            open_socket(one, stage_timeout(shard, seconds)) for one in (fds.previous_stage, fds.next_stage)
        )
        weakref.finalize(self, _close, self._previous, self._next)
        self._counters = memoryview(mmap.mmap(fds.memory, COUNTER_BYTES)).cast("Q")
        self.num_sent = self.num_received = 0

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """Send x and delta, if any, [T, columns] each, to the next stage."""
        assert self._next is not None, "the last stage has no next one"
        both = [x] if delta is None else [x, delta]
        self._send_head(x, len(both))
        for tensor in both:
            self._blocking_call(self._next.sendall, _bytes(tensor.contiguous()))

    def _send_head(self, x: Tensor, count: int) -> None:
        """Send the header of `count` tensors like x."""
        assert self._next is not None, "the last stage has no next one"
        self.num_sent += 1
        self._blocking_call(self._next.sendall, HEAD.pack(self.num_sent, *x.shape, x.itemsize, count - 1))

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Receive the tensors of the previous stage's next step, which has `rows` rows."""
        more = self._receive_head(rows, columns, dtype)
        assert self._previous is not None, "the first stage has no previous one"
        both = [torch.empty(rows, columns, dtype=dtype) for _ in range(1 + more)]
        for tensor in both:
            self._receive_into(self._previous, _bytes(tensor))
        return both[0], both[1] if more else None

    def _receive_head(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Wait for the next header, which must have this shape and dtype. Return True if there are two tensors."""
        assert self._previous is not None, "the first stage has no previous one"
        self.num_received += 1
        head = bytearray(HEAD.size)
        self._receive_into(self._previous, memoryview(head))
        *found, more = HEAD.unpack(head)
        due = [self.num_received, rows, columns, dtype.itemsize]
        assert found == due, f"the previous stage sent (number, rows, columns, bytes) {found}, not {due}"
        return bool(more)

    def _receive_into(self, end: socket.socket, room: memoryview) -> None:
        with self._marked_as_waiting():
            receive_into(end, room)

    def _blocking_call(self, work: Callable[[memoryview | bytes], int | None], data: memoryview | bytes) -> int:
        with self._marked_as_waiting():
            return blocking_call(work, data)

    @contextmanager
    def _marked_as_waiting(self) -> Iterator[None]:
        """A context in which this rank is marked as waiting for another stage, so that it is not reported as the
        slowest."""
        self._counters[self._number * COUNTER_STRIDE + 1] = 1
        try:
            yield
        finally:
            self._counters[self._number * COUNTER_STRIDE + 1] = 0


def stage_timeout(shard: Shard, seconds: float) -> float:
    """Return the seconds to wait for a neighbouring stage, if a step may take `seconds` in each."""
    return seconds * shard.pp_size + TIMEOUT_MARGIN


def open_socket(descriptor: int, seconds: float) -> socket.socket | None:
    """Open a socket of RankFds, with a timeout; None for -1."""
    if descriptor < 0:
        return None
    made = socket.socket(fileno=os.dup(descriptor))
    made.settimeout(seconds)
    if made.family == socket.AF_UNIX:  # the system adapts the buffers of TCP, unless they are set
        for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            made.setsockopt(socket.SOL_SOCKET, kind, SOCKET_BUFFER_BYTES)
    return made


def receive_into(end: socket.socket, room: memoryview) -> None:
    """Fill `room` from a neighbouring stage. Raise PeerLost if it has left or sends nothing in time."""
    while len(room):
        count = blocking_call(end.recv_into, room)
        if not count:
            raise PeerLost("another stage has left")
        room = room[count:]


def blocking_call(work: Callable[[memoryview | bytes], int | None], data: memoryview | bytes) -> int:
    """Return work(data), a method of a socket. Raise PeerLost if the neighbouring stage has left or does not answer in
    time."""
    try:
        return work(data) or 0
    except TimeoutError:
        raise PeerLost("another stage has received or sent nothing in a step") from None
    except OSError as error:  # over TCP, for example, EHOSTUNREACH
        raise PeerLost("another stage has left") from error


def _close(*ends: socket.socket | None) -> None:
    for end in ends:
        if end is not None:
            end.close()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
