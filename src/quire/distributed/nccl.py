"""The ranks of a stage as a group of torch.distributed with NCCL. They connect through an unnamed file, so no port is
needed; NCCL itself listens on the loopback interface."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from quire.protocol.parallel_layout import Shard

SINGLE_HOST_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Defaults of environment variables. The engine ends ranks that fail, so NCCL's watchdog is off."""


class NcclCommunicator:
    """The communicator of one rank. `is_ordered`: sums are computed here, in rank order and in fp32; else NCCL computes
    them, in an order that depends on their size, and rounds after each addition."""

    def __init__(
        self, shard: Shard, store: int, seconds: float, device: torch.device, is_ordered: bool, backend: str = "nccl"
    ) -> None:
        """Connect to the other ranks, through the file of the descriptor `store`."""
        for name, value in SINGLE_HOST_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
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
