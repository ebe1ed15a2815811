"""How ranks on CPUs meet in a step: over torch's gloo, on the loopback interface. Every rank gets all tensors and adds
them up itself, in rank order and in fp32, so that all have the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import PeerLost
from quire.vocabulary.layout import Part

LOOPBACK = "lo"
MARGIN = 30.0  # seconds more than the engine waits: it names who is silent before anybody else gives up


class GlooExchange:
    """One rank's end (see quire.data.layers.exchange). PeerLost where another one can't be reached, or says nothing for
    `seconds`."""

    def __init__(self, part: Part, store: int, seconds: float) -> None:
        """Meet the others; `store` is the descriptor of an empty file that all have."""
        self.part = part
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=seconds + MARGIN)
        options._devices = [dist.ProcessGroupGloo.create_device(interface=LOOPBACK)]
        self._group: Any = None
        self._file = os.dup(store)
        self._store: Any = dist.FileStore(f"/proc/self/fd/{self._file}", part.ranks)  # type: ignore[attr-defined]
        self._group = self._meeting(lambda: dist.ProcessGroupGloo(self._store, part.rank, part.ranks, options))

    def __del__(self) -> None:
        """The store opens the file once more at its end, which comes with the group's."""
        self._group = self._store = None
        if hasattr(self, "_file"):
            os.close(self._file)

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: everybody's, in rank order."""
        every = x.new_empty((self.part.ranks, *x.shape))
        sent, received = _bytes(x.contiguous()), _bytes(every)
        self._meeting(lambda: self._group._allgather_base(received, sent).wait())
        return every

    def add(self, x: Tensor) -> Tensor:
        """x, in place and returned: the sum of all ranks'."""
        every = self.gather(x)
        total = every[0].float()
        for other in every[1:]:
            total += other
        return x.copy_(total)

    def _meeting(self, meet: Callable[[], Any]) -> Any:
        try:
            return meet()
        except RuntimeError as error:
            said = next(iter(str(error).splitlines()), "")
            raise PeerLost(f"the other ranks can't be reached: {said}"[:300]) from error


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
