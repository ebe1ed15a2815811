"""Ranks on GPUs, before they build anything: which GPU each has, how they will meet, and what room that leaves.

QUIRE_SHARE_GPU=1 lets more ranks start than there are GPUs, to try the code without them: they take turns on one, so
each exchange takes as long as some time slices, and NCCL, which refuses that, isn't used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from glob import glob
from typing import TYPE_CHECKING, Any

from quire.errors import StartupError
from quire.parallel.frames import Hello
from quire.parallel.neighbours import MANY, neighbours

if TYPE_CHECKING:
    from quire.parallel.device_exchange import DeviceExchange
    from quire.parallel.shared import SharedExchange

SHARE = "QUIRE_SHARE_GPU"
FILES = "/dev/nvidia[0-9]*"  # a GPU each
GIB = 2**30
log = logging.getLogger("quire.parallel")


def may_start(device: str, ranks: int) -> bool:
    """Whether it is likely, before torch is imported and `check_gpus` says it, that so many ranks have what to compute
    on: by the GPUs' files, and by how many CUDA_VISIBLE_DEVICES names."""
    if device == "cpu":
        return True
    count, named = len(glob(FILES)), os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        count = min(count, len(list(filter(None, map(str.strip, named.split(","))))))
    if count == 0:
        return device == "auto"
    return ranks <= count or sharing()


def check_gpus(tp: int, pp: int = 1) -> None:
    """StartupError for more ranks than GPUs that this process may use."""
    import torch

    count, ranks = torch.cuda.device_count(), tp * pp
    if ranks > count and not (count and sharing()):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = "" if seen is None else f" (CUDA_VISIBLE_DEVICES is {seen[:80]!r})"
        raise StartupError(
            f"--tp is {tp}{f' and --pp {pp}' * (pp > 1)}, and torch finds {count} GPU{'s' * (count != 1)}{named}",
            f"Use --tp {count} or less, or --device cpu",
        )


def sharing() -> bool:
    """Ranks may share GPUs."""
    return os.environ.get(SHARE, "") not in ("", "0")


def gpus_each(ranks: int) -> float:
    """What a rank has of a GPU: one, or a share where they share."""
    import torch

    count = torch.cuda.device_count()
    return 1 / -(-ranks // count) if sharing() and count else 1.0


def room_of(told: Sequence[dict[str, Any]], utilization: float) -> tuple[int, int, str]:
    """What memory is planned for, given what each rank's Seat tells: bytes of a rank's GPU in all and free, of the one
    with the least room, and a name for it that says who uses it, if known. StartupError for GPUs of different kinds."""
    names = [str(one["name"]) for one in told]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise StartupError(
                f"GPU 0 is {names[0]}, and GPU {rank} is {name}: ranks share out each layer equally",
                "Choose GPUs of one kind by CUDA_VISIBLE_DEVICES",
            )
    users = {one["index"]: sum(other["index"] == one["index"] for other in told) for one in told}
    rooms = [(int(one["total"]) // users[one["index"]], int(one["free"]) // users[one["index"]]) for one in told]
    rank = min(range(len(rooms)), key=lambda rank: utilization * rooms[rank][0] - rooms[rank][0] + rooms[rank][1])
    total, free = rooms[rank]
    others = f" (used: {told[rank]['others']})" if told[rank].get("others") else ""
    said = f"GPU {told[rank]['index']}, of which {free / GIB:.2f} of {total / GIB:.2f} GiB are free{others}"
    return total, free, said


class Seat:
    """A rank's GPU, opened, and its end of the exchange (None: there are no others)."""

    def __init__(self, hello: Hello) -> None:
        """StartupError where ranks can't meet. All ranks at a time."""
        import torch

        from quire.parallel.shared import SharedExchange

        self.index = hello.part.number % max(torch.cuda.device_count(), 1)
        self.device = torch.device("cuda", self.index)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # makes the context
        self.notices: tuple[str, ...] = ()
        self.exchange: DeviceExchange | None = None
        if hello.part.ranks > 1:
            host = SharedExchange(hello.part, hello.meeting, hello.seconds)
            self.exchange = self._met(hello, host)
            host.meet()  # all have all that they allocate

    def _met(self, hello: Hello, host: SharedExchange) -> DeviceExchange:
        import torch

        from quire.parallel.device_exchange import DeviceExchange
        from quire.parallel.group import Group
        from quire.parallel.peers import open_peers

        indices = host.gather(torch.tensor([self.index])).flatten().tolist()
        peers, why = open_peers(hello.part, self.device, indices, host, hello.seconds)
        if len(set(indices)) < len(indices):
            if peers is None:
                raise StartupError(f"ranks share a GPU ({SHARE}), and can't reach each other's memory: {why}")
            self.notices += (f"{len(indices)} ranks share {len(set(indices))} GPU ({SHARE}): this is slow",)
            return DeviceExchange(hello.part, self.device, host, peers, None)
        if why:
            self.notices += (f"ranks exchange through NCCL: {why}",)
        group = Group(hello.part, host.store, hello.seconds, self.device, hello.config.deterministic)
        return DeviceExchange(hello.part, self.device, host, peers, group)

    def told(self) -> dict[str, Any]:
        """For `room_of`."""
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        found = {"name": torch.cuda.get_device_name(self.device), "index": self.index, "free": free, "total": total}
        if total - free > MANY * total:
            found["others"] = neighbours(str(torch.cuda.get_device_properties(self.device).uuid))
        return found
