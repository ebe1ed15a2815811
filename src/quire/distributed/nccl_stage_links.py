"""Links over NCCL between pipeline stages on GPUs of different hosts: for each rank of a stage, a communicator with the
same rank of the next stage.

NCCL's ranks find each other by an id, which goes through the stages' socket (SocketStore), so torch opens no port. NCCL
itself does, on the interface that quire.distributed.nccl chooses. Nothing here waits for a neighbour without a timeout
but the start and the GPU's streams: then the engine ends the ranks."""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from datetime import timedelta
from hashlib import sha256
from socket import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from quire.distributed.rendezvous import RankFds
from quire.distributed.stage_pipes import blocking_call, open_socket, receive_into, stage_timeout
from quire.errors import PeerLost, StartupError
from quire.protocol.parallel_layout import Shard

VARIABLE = "QUIRE_STAGE_NCCL"  # 0: rows go over TCP
NO_OFFER = bytes(32)
FRAME = struct.Struct("<II")  # bytes of the key and of the value that follow
SENDER, RECEIVER = range(2)  # ranks of a communicator


class StageLinks(NamedTuple):
    """The links of one rank to the stages before and after; None: that stage is on this host, there is none, or rows go
    over TCP. `notices` are shown at start."""

    previous: NcclStageLink | None = None
    next: NcclStageLink | None = None
    notices: tuple[str, ...] = ()


def open_stage_links(
    shard: Shard, fds: RankFds, seconds: float, device: torch.device, backend: str = "nccl"
) -> StageLinks:
    """Connect to the neighbouring stages on other hosts, over `backend` of torch.distributed where both ends can use
    it. All ranks must do so at the same time. Raise PeerLost if a neighbour has left, StartupError if the backend can't
    connect."""
    limit, offer = stage_timeout(shard, seconds), make_offer(device, backend)
    ends = [
        open_socket(descriptor if is_remote else -1, limit)
        for descriptor, is_remote in ((fds.previous_stage, fds.remote_previous), (fds.next_stage, fds.remote_next))
    ]
    links: list[NcclStageLink | None] = []
    notices: list[str] = []
    try:
        for end in ends:
            if end is not None:
                blocking_call(end.sendall, offer)
        for end, number in zip(ends, (RECEIVER, SENDER)):
            links.append(None)
            if end is not None:
                receive_into(end, memoryview(theirs := bytearray(len(offer))))
                if NO_OFFER != offer != theirs != NO_OFFER:
                    links[-1] = NcclStageLink(end, number, device, limit, backend)
                where = "TCP, by way of the CPU's memory" if links[-1] is None else "NCCL"
                notices.append(f"rows between nodes go over {where}")
    finally:
        for end in ends:
            if end is not None:
                end.close()
    return StageLinks(links[0], links[1], tuple(dict.fromkeys(notices)))


def make_offer(device: torch.device, backend: str) -> bytes:
    """Return what both ends of a connection send: NO_OFFER if this one can't use `backend`, else a digest by which to
    compare GPUs. Equal ones are one GPU, which NCCL refuses, unless each rank has another NCCL_HOSTID."""
    if os.environ.get(VARIABLE) == "0" or not getattr(dist, f"is_{backend}_available")():
        return NO_OFFER
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    elif backend == "nccl":
        return NO_OFFER
    else:
        gpu = secrets.token_hex()
    return sha256(f"{gpu} {os.environ.get('NCCL_HOSTID', '')}".encode()).digest()


class SocketStore(Store):
    """A store of torch.distributed that two processes share through a socket. What one of them sets is sent to the
    other."""

    def __init__(self, end: socket) -> None:
        """Use `end` until `disconnect`. After that, the store is local."""
        super().__init__()
        self._end: socket | None = end
        self._values: dict[str, bytes] = {}
        self.error: PeerLost | None = None  # torch turns exceptions of `get` into its own

    def set(self, key: str, value: bytes | str) -> None:
        """See torch.distributed.Store."""
        self._values[key] = data = value.encode() if isinstance(value, str) else bytes(value)
        if self._end is not None:
            blocking_call(self._end.sendall, FRAME.pack(len(key.encode()), len(data)) + key.encode() + data)

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store. Raise PeerLost if the other process does not set the key in time."""
        try:
            while key not in self._values and self._end is not None:
                name, value = self._receive_frame(self._end)
                self._values[name] = value
        except PeerLost as error:
            self.error = error
            raise
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store. The socket's timeout applies."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """See torch.distributed.Store. Keys that have not been read from the socket are not found."""
        return all(key in self._values for key in keys)

    def disconnect(self) -> None:
        """Wait until the other process does so too, and leave the socket to others."""
        if self._end is not None:
            blocking_call(self._end.sendall, FRAME.pack(0, 0))
            while self._receive_frame(self._end)[0]:
                pass
            self._end = None

    @staticmethod
    def _receive_frame(end: socket) -> tuple[str, bytes]:
        sizes = bytearray(FRAME.size)
        receive_into(end, memoryview(sizes))
        key, value = map(bytearray, FRAME.unpack(sizes))
        for room in (key, value):
            receive_into(end, memoryview(room))
        return key.decode(), bytes(value)


class NcclStageLink:
    """A communicator of two ranks, of which SENDER sends and RECEIVER receives."""

    def __init__(self, end: socket, number: int, device: torch.device, seconds: float, backend: str) -> None:
        """Connect rank `number` to the other one, through the socket `end`, and send a byte, so that NCCL allocates its
        memory now. Raise PeerLost if the other rank has left, StartupError if NCCL can't connect."""
        self._other = 1 - number
        self._store = store = SocketStore(end)  # torch's reference does not keep the Python object
        self._pending: Work | None = None
        probe = torch.zeros(1, dtype=torch.uint8, device=device)
        try:
            self._group = _open_group(backend, store, number, timedelta(seconds=seconds))
            weakref.finalize(self, self._group.abort)
            self._group.eager_connect_single_device(device)
            if number == SENDER:
                self.send(probe)
                self.wait()
            else:
                self.receive(probe)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            store.disconnect()
        except RuntimeError as error:
            if store.error is not None:
                raise store.error from error
            raise StartupError(
                f"a stage does not reach its neighbour on another node over {backend}: {error}",
                "Set NCCL_SOCKET_IFNAME to the interface through which nodes reach each other (NCCL_DEBUG=INFO logs "
                f"more), or {VARIABLE}=0 to use TCP",
            ) from error

    def send(self, rows: Tensor) -> None:
        """Send a contiguous tensor after the operations on the current stream, without waiting. It may be overwritten
        after `wait`."""
        self._pending = self._group.send([_as_bytes(rows)], self._other, 0)

    def wait(self) -> None:
        """Have the current stream wait for the last `send`."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def receive(self, rows: Tensor) -> None:
        """Receive a contiguous tensor, on the current stream."""
        self._group.recv([_as_bytes(rows)], self._other, 0).wait()


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _open_group(backend: str, store: Store, number: int, timeout: timedelta) -> Any:
    """Return a group of two ranks that torch.distributed does not list."""
    if backend == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, number, 2, options)
    from torch._C._distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, number, 2, timeout)
