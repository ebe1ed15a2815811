"""Ranks on GPUs before they build anything: the GPU of each rank, its exchange, and the memory that remains.

QUIRE_SHARE_GPU=1 permits more ranks than GPUs, to test the code: ranks take turns on a GPU, so each exchange takes
several time slices, and NCCL, which does not support this, is not used."""

from __future__ import annotations

import logging
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from glob import glob
from typing import TYPE_CHECKING, Any

from quire.distributed.rank_messages import InitMessage
from quire.errors import StartupError

if TYPE_CHECKING:
    from quire.distributed.device_exchange import DeviceExchange
    from quire.distributed.shared_memory_exchange import SharedMemoryExchange

SHARE_GPU_VARIABLE = "QUIRE_SHARE_GPU"
GPU_DEVICE_FILES = "/dev/nvidia[0-9]*"  # one for each GPU
GIB = 2**30
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")
QUERY_SECONDS = 5.0  # timeout of the query
MAX_PROCESSES = 4  # named at most
REPORT_SHARE = 0.1  # share of a GPU's memory; with more in use, the processes are queried
log = logging.getLogger("quire.distributed")


def seems_to_have_devices(device: str, ranks: int) -> bool:
    """Return True if there are probably enough devices for this number of ranks, before torch is imported and
    `check_gpus` checks it: by the GPUs' device files and the length of CUDA_VISIBLE_DEVICES."""
    if device == "cpu":
        return True
    count = len(visible_gpus())
    if count == 0:
        return device == "auto"
    return ranks <= count or may_share_gpus()


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs in CUDA_VISIBLE_DEVICES, or their numbers, as far as the GPUs' device
    files show them."""
    count, named = len(glob(GPU_DEVICE_FILES)), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if named is None else list(filter(None, map(str.strip, named.split(","))))
    return names[:count]


def check_gpus(tp: int, pp: int = 1) -> None:
    """Raise StartupError if there are more ranks than GPUs that this process may use."""
    import torch

    count, ranks = torch.cuda.device_count(), tp * pp
    if ranks > count and not (count and may_share_gpus()):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = "" if seen is None else f" (CUDA_VISIBLE_DEVICES is {seen[:80]!r})"
        raise StartupError(
            f"--tp is {tp}{f' and --pp {pp}' * (pp > 1)}, and torch finds {count} GPU{'s' * (count != 1)}{named}",
            f"Use --tp {count} or less, or --device cpu",
        )


def may_share_gpus() -> bool:
    """Return True if ranks may share GPUs."""
    return os.environ.get(SHARE_GPU_VARIABLE, "") not in ("", "0")


def gpus_per_rank(ranks: int) -> float:
    """Return the GPUs of a rank: one, or a fraction if ranks share GPUs."""
    import torch

    count = torch.cuda.device_count()
    return 1 / -(-ranks // count) if may_share_gpus() and count else 1.0


def smallest_device_memory(memory_infos: Sequence[dict[str, Any]], utilization: float) -> tuple[int, int, str]:
    """Return the memory to plan for, given each rank's `RankDevice.memory_info` with its `node` ("": this host): total
    and free bytes of a rank's GPU, of the one with the least room, and a description of it that names its other users,
    if known. Raise StartupError for GPUs of different kinds."""
    names = [str(one["name"]) for one in memory_infos]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise StartupError(
                f"GPU 0 is {names[0]}, and GPU {rank}{_on_node(memory_infos[rank])} is {name}: ranks divide each layer "
                "equally",
                "Choose GPUs of one kind by CUDA_VISIBLE_DEVICES",
            )
    users = Counter(one["uuid"] for one in memory_infos)  # indices of GPUs recur on other nodes
    rooms = [(int(one["total"]) // users[one["uuid"]], int(one["free"]) // users[one["uuid"]]) for one in memory_infos]
    rank = min(range(len(rooms)), key=lambda rank: utilization * rooms[rank][0] - rooms[rank][0] + rooms[rank][1])
    total, free = rooms[rank]
    others = f" (used: {memory_infos[rank]['others']})" if memory_infos[rank].get("others") else ""
    gpu = f"GPU {memory_infos[rank]['index']}{_on_node(memory_infos[rank])}"
    description = f"{gpu}, of which {free / GIB:.2f} of {total / GIB:.2f} GiB are free{others}"
    return total, free, description


def _on_node(memory_info: dict[str, Any]) -> str:
    node = memory_info.get("node")
    return f" of node {node}" if node else ""


class RankDevice:
    """A rank's GPU, opened, its exchange (None for a single rank), and its links to stages on other nodes."""

    def __init__(self, hello: InitMessage) -> None:
        """Open the GPU and the exchange; all ranks must do so at the same time. Raise StartupError if ranks can't
        communicate."""
        import torch

        from quire.distributed.nccl import set_nccl_environment
        from quire.distributed.nccl_stage_links import open_stage_links
        from quire.distributed.shared_memory_exchange import SharedMemoryExchange

        fds = hello.meeting.fds(hello.part)
        self.index = fds.number % max(torch.cuda.device_count(), 1)
        self.device = torch.device("cuda", self.index)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # creates the CUDA context
        set_nccl_environment(fds)
        self.notices: tuple[str, ...] = ()
        self.exchange: DeviceExchange | None = None
        if hello.part.tp_size > 1:
            host = SharedMemoryExchange(hello.part, fds, hello.seconds)
            self.exchange = self._open_exchange(hello, host)
            host.barrier()  # all ranks have allocated their exchange memory
        self.links = open_stage_links(hello.part, fds, hello.seconds, self.device)
        self.notices += self.links.notices

    def _open_exchange(self, hello: InitMessage, host: SharedMemoryExchange) -> DeviceExchange:
        import torch

        from quire.distributed.device_exchange import DeviceExchange
        from quire.distributed.nccl import NcclCommunicator
        from quire.distributed.peer_buffers import open_peer_buffers

        indices = host.all_gather(torch.tensor([self.index])).flatten().tolist()
        peers, why = open_peer_buffers(hello.part, self.device, indices, host, hello.seconds)
        if len(set(indices)) < len(indices):
            if peers is None:
                raise StartupError(
                    f"ranks share a GPU ({SHARE_GPU_VARIABLE}), and can't reach each other's memory: {why}"
                )
            self.notices += (
                f"{len(indices)} ranks share {len(set(indices))} GPU ({SHARE_GPU_VARIABLE}): this is slow",
            )
            return DeviceExchange(hello.part, self.device, host, peers, None)
        if why:
            self.notices += (f"ranks exchange through NCCL: {why}",)
        group = NcclCommunicator(hello.part, host.store, hello.seconds, self.device, hello.config.deterministic)
        return DeviceExchange(hello.part, self.device, host, peers, group)

    def memory_info(self) -> dict[str, Any]:
        """Return the memory of the GPU, for `smallest_device_memory`."""
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        info = {
            "name": torch.cuda.get_device_name(self.device), "index": self.index, "uuid": uuid, "free": free,
            "total": total,
        }  # fmt: skip
        if total - free > REPORT_SHARE * total:
            info["others"] = other_gpu_processes(uuid)
        return info


def other_gpu_processes(uuid: str) -> str:
    """Describe the other processes with the most memory on the GPU of that uuid; "" if none are known."""
    try:
        query = subprocess.run(QUERY, capture_output=True, errors="replace", timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    processes = []
    for line in query.stdout.splitlines():
        gpu, *fields = (field.strip() for field in line.split(",", 3))
        if len(fields) == 3 and uuid in gpu and fields[0] != str(os.getpid()):
            processes.append((int(fields[1]) if fields[1].isdigit() else 0, fields[0], fields[2].rpartition("/")[2]))
    largest = sorted(processes, reverse=True)[:MAX_PROCESSES]
    return ", ".join(f"{mib / 1024:.2f} GiB by process {pid} ({name[:40]})" for mib, pid, name in largest)
