"""The ranks of a stage as a group of torch.distributed with NCCL. They connect through an unnamed file, so no port is
needed; NCCL itself listens on the loopback interface, or, on a stage with a neighbour on another host, on the interface
of that connection."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from quire.distributed.rendezvous import RankFds
from quire.protocol.parallel_layout import Shard

TORCH_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Defaults of environment variables. The engine ends ranks that fail, so NCCL's watchdog is off. torch warns that sends
wait for each other, which they must."""


def set_nccl_environment(fds: RankFds) -> None:
    """Set defaults of environment variables, before the first use of NCCL in this process. NCCL uses the loopback
    interface, or the one of the connection to a stage on another host."""
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        remote = fds.next_stage if fds.remote_next else fds.previous_stage if fds.remote_previous else -1
        os.environ.update({"NCCL_SOCKET_IFNAME": "lo"} if remote < 0 else _interface_variables(remote))


def _interface_variables(descriptor: int) -> dict[str, str]:
    """Return the variables that have NCCL use the interface of this connection; none if it is not found."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        family, address = connection.family, connection.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == family and one.address == address for one in addresses):
            return {"NCCL_SOCKET_IFNAME": f"={name}", "NCCL_SOCKET_FAMILY": family.name}
    return {}


class NcclCommunicator:
    """The communicator of one rank. `is_ordered`: sums are computed here, in rank order and in fp32; else NCCL computes
    them, in an order that depends on their size, and rounds after each addition."""

    def __init__(
        self, shard: Shard, store: int, seconds: float, device: torch.device, is_ordered: bool, backend: str = "nccl"
    ) -> None:
        """Connect to the other ranks, through the file of the descriptor `store`."""
        self.shard, self.is_ordered = shard, is_ordered
        dist.init_process_group(
            backend,
            store=PrefixStore(
                f"stage {shard.pp_rank}", FileStore(f"/proc/self/fd/{store}", shard.tp_size * shard.pp_size)
            ),
            rank=shard.tp_rank,
            world_size=shard.tp_size,
            timeout=timedelta(seconds=seconds),
            device_id=device if device.type == "cuda" else None,
        )
        self.all_reduce(torch.zeros(1, device=device))  # allocate the communicator's memory now
        self.all_gather(torch.zeros(1, device=device))

    def all_reduce(self, x: Tensor) -> Tensor:
        """See quire.layers.exchange."""
        if self.is_ordered:
            total, *others = self.all_gather(x)
            total = total.float()
            for other in others:
                total += other
            return x.copy_(total)
        dense = x.contiguous()
        dist.all_reduce(dense)
        return x if dense is x else x.copy_(dense)

    def all_gather(self, x: Tensor) -> Tensor:
        """See quire.layers.exchange."""
        every = x.new_empty((self.shard.tp_size, *x.shape))
        gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer and older torch
        gather_all(every.view(-1), x.contiguous().view(-1))
        return every

    def close(self) -> None:
        """Leave the group. Graphs that captured its operations must be gone."""
        dist.destroy_process_group()
