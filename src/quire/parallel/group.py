"""Ranks as a group of torch.distributed: NCCL on GPUs. They find each other through a file without a name, so no port
is asked for; NCCL itself listens on the loopback interface.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from quire.vocabulary.layout import Part

ON_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""What is set where nothing else is: the engine ends ranks that fail, not NCCL's watchdog."""


class Group:
    """One rank's end. `ordered`: sums are taken here, in rank order and in fp32; else NCCL takes them, in an order that
    depends on their size, and rounds as it goes."""

    def __init__(
        self, part: Part, store: int, seconds: float, device: torch.device, ordered: bool, backend: str = "nccl"
    ) -> None:
        """Meet the others, through the file that the descriptor `store` is of."""
        for name, value in ON_ONE_HOST.items():
            os.environ.setdefault(name, value)
        self.part, self.ordered = part, ordered
        dist.init_process_group(
            backend,
            store=PrefixStore(f"stage {part.stage}", FileStore(f"/proc/self/fd/{store}", part.ranks * part.stages)),
            rank=part.rank,
            world_size=part.ranks,
            timeout=timedelta(seconds=seconds),
            device_id=device if device.type == "cuda" else None,
        )
        self.add(torch.zeros(1, device=device))  # what communicators allocate is allocated now
        self.gather(torch.zeros(1, device=device))

    def add(self, x: Tensor) -> Tensor:
        """See quire.data.layers.exchange."""
        if self.ordered:
            total, *others = self.gather(x)
            total = total.float()
            for other in others:
                total += other
            return x.copy_(total)
        if x.is_contiguous():
            dist.all_reduce(x)
            return x
        dense = x.contiguous()
        dist.all_reduce(dense)
        return x.copy_(dense)

    def gather(self, x: Tensor) -> Tensor:
        """See quire.data.layers.exchange."""
        every = x.new_empty((self.part.ranks, *x.shape))
        gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer and older torch
        gather_all(every.view(-1), x.contiguous().view(-1))
        return every

    def close(self) -> None:
        """Leave it. Graphs that have its operations are gone."""
        dist.destroy_process_group()
