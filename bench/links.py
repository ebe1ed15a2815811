"""A program that reports how this machine's GPUs are linked, as JSON: a process of its own, so that its caller opens no
GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

BYTES = 1 << 28  # bytes of a copy
COPIES = 20
MOST_TEXT = 8000  # characters of nvidia-smi's output
ASKED = ("topo -m", "nvlink -s", "--query-gpu=index,name,memory.total,memory.used,clocks.sm --format=csv")


def found() -> dict[str, Any]:
    """Return the results of another process; empty without a GPU."""
    command = (sys.executable, "-m", "bench.links")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        said: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"gpus": [], "error": f"{type(error).__name__} {error}"[:300]}
    return said


def measured() -> dict[str, Any]:
    """Return the GPUs' names, nvidia-smi's description of their links, and for each pair: peer access, atomic
    operations over the link (NVLink has them), and GB/s of copies in one direction."""
    import torch

    from quire.distributed.peer_memory import PeerError, has_native_atomics

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    said = {asked: text for asked in ASKED if (text := _smi(asked))} if names else {}
    pairs = []
    for here in range(len(names)):
        for there in range(len(names)):
            if here == there:
                continue
            pair: dict[str, Any] = {"from": here, "to": there}
            pair["peer_access"] = torch.cuda.can_device_access_peer(here, there)
            with suppress(PeerError):
                pair["nvlink"] = has_native_atomics(here, there)
            pair["gb_s"] = _copied(here, there)
            pairs.append(pair)
    return {"gpus": names, "nvidia_smi": said, "pairs": pairs}


def _copied(here: int, there: int) -> float:
    """Measure 10^9 bytes a second of copies from one GPU to another."""
    import torch

    source = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{here}")
    target = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{there}")
    with torch.cuda.device(here):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(COPIES + 3):
            if i == 3:
                start.record()
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    return COPIES * BYTES / float(start.elapsed_time(end)) / 1e6


def _smi(asked: str) -> str:
    try:
        done = subprocess.run(("nvidia-smi", *asked.split()), capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r" \(UUID: [^)]*\)", "", done.stdout)[:MOST_TEXT]


if __name__ == "__main__":
    print(json.dumps(measured()))
