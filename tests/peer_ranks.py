"""A rank whose GPU is a piece of shared memory, and whose exchange is the kernels of `reduce`, interpreted: everything
between a MEET and the tokens but the calls of CUDA's driver. `main` is a program's."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from quire.distributed import peer_buffers, peer_memory, rank_devices
from quire.distributed.device_exchange import DeviceExchange
from quire.distributed.device_stage_pipes import DeviceStagePipes
from quire.distributed.nccl_stage_links import StageLinks
from quire.distributed.rank_messages import InitMessage
from quire.distributed.shared_memory_exchange import SharedMemoryExchange
from quire.kernels import peer_memory_layout
from quire.kernels.triton import all_reduce
from quire.startup.rank_program import main as rank_main

WHERE = struct.Struct("<QQ")  # a process, and a descriptor of it
kept: list[mmap.mmap] = []


def _mapped(descriptor: int) -> int:
    kept.append(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
    return torch.frombuffer(kept[-1], dtype=torch.uint8).data_ptr()


def export(nbytes: int) -> peer_memory.ExportedMemory:
    descriptor = os.memfd_create("peer")
    os.ftruncate(descriptor, nbytes)
    where = WHERE.pack(os.getpid(), descriptor).ljust(peer_memory.HANDLE_BYTES, b"\0")
    return peer_memory.ExportedMemory(_mapped(descriptor), where)


def tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def write(address: int, value: int, stream: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def wait(address: int, value: int, stream: int) -> None:
    """What comes has been sent when it's said: nobody waits here."""
    assert ctypes.c_int64.from_address(address).value == value, "a step's rows were written over, or aren't there"


def opened(handle: bytes) -> int:
    process, descriptor = WHERE.unpack_from(handle)
    if os.environ.get("UNREACHABLE"):
        raise peer_memory.PeerError("no such memory")
    return _mapped(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR))


class Seat(rank_devices.RankDevice):
    """On a CPU."""

    def __init__(self, hello: InitMessage) -> None:
        self.index, self.device, self.notices = hello.part.tp_rank, torch.device("cpu"), ()
        self.exchange: DeviceExchange | None = None
        self.links = StageLinks()
        if hello.part.tp_size > 1:
            host = SharedMemoryExchange(hello.part, hello.meeting.fds(hello.part), hello.seconds)
            found, why = peer_buffers.open_peer_buffers(
                hello.part, self.device, range(hello.part.tp_size), host, hello.seconds
            )
            if found is None:
                raise rank_devices.StartupError(f"rank {hello.part.tp_rank} has no peers: {why}")
            self.exchange = DeviceExchange(hello.part, self.device, host, found, None)
            with self.exchange.warming_up():  # one after another, and each meets nobody
                before = found.counters.clone()
                self.exchange.all_reduce(torch.ones(1, 16))
            assert torch.equal(found.counters, before), "a rehearsal counts as a call"
            self.exchange.check_peers()

    def memory_info(self) -> dict[str, Any]:
        return {"name": "a CPU", "index": self.index, "uuid": str(self.index), "free": 3 << 30, "total": 4 << 30}


def reach() -> None:
    """Each other's memory, and nothing that takes a GPU's streams, as what is carried does."""
    all_reduce.PROGRAMS, peer_memory_layout.COPY_BYTES = 4, 0
    peer_memory.export, peer_memory.open_handle, peer_buffers._unreachable = export, opened, lambda *_: ""


def main() -> None:
    reach()
    peer_memory.as_tensor, peer_memory.stream_write_value, peer_memory.stream_wait_value = tensor, write, wait
    peer_memory.copy = lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes)
    DeviceStagePipes._current_stream = lambda pipes: 0
    rank_main(device_opener=Seat)
