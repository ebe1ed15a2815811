"""Who else uses a GPU, as far as nvidia-smi is there and tells: in a container it may see no processes."""

from __future__ import annotations

import os
import subprocess

QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")
QUERY_SECONDS = 5.0  # for it to answer
MAX_PROCESSES = 4  # processes that are named
REPORT_SHARE = 0.1  # share of a GPU's memory from which on it is asked who has it


def other_gpu_processes(uuid: str) -> str:
    """The processes with the most memory of the GPU that is called so, but for this one: "" if none are known."""
    try:
        done = subprocess.run(QUERY, capture_output=True, errors="replace", timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = []
    for line in done.stdout.splitlines():
        gpu, *fields = (field.strip() for field in line.split(",", 3))
        if len(fields) == 3 and uuid in gpu and fields[0] != str(os.getpid()):
            found.append((int(fields[1]) if fields[1].isdigit() else 0, fields[0], fields[2].rpartition("/")[2]))
    largest = sorted(found, reverse=True)[:MAX_PROCESSES]
    return ", ".join(f"{mib / 1024:.2f} GiB by process {pid} ({name[:40]})" for mib, pid, name in largest)
