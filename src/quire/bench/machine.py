"""Describe the machine of a measurement, and the load of its other processes.

One busy core spoils timings of two threads, so each result has the load of other processes.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import quire
from quire.cli.env import cpu, installed_version

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "neon", "asimd", "sve")
ROOT = Path(quire.__file__).parents[2]
QUIET = 0.1  # cores in use by other processes from which a timing is unreliable


def machine() -> dict[str, Any]:
    """Return the facts needed to compare numbers of machines. torch is queried only if it is already loaded."""
    model, flags = cpu(FLAGS)
    torch = sys.modules.get("torch")
    return {
        "cpu": model, "flags": flags, "cores": psutil.cpu_count(logical=False), "logical_cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None, "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
        "torch": installed_version("torch"), "python": platform.python_version(), "quire": quire.__version__,
        "revision": revision(),
    }  # fmt: skip


@cache
def revision() -> str | None:
    """Return the git revision of this checkout at the first call, with "-dirty" if its code differs; None if there is
    none."""
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    try:
        named = subprocess.run(
            [*git, "describe", "--always", "--abbrev=12", "--exclude=*"], capture_output=True, text=True, timeout=10
        )
        code = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "papers", "bench"], timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return named.stdout.strip() + "-dirty" * (code.returncode == 1) or None


def seconds_alive() -> float:
    """Return the seconds since this process was started."""
    return time.time() - float(psutil.Process().create_time())


def peak_rss() -> int:
    """Return the maximum resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Others:
    """The CPU use of all other processes, in cores, since this object was made."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), _busy(), _own()

    def load(self) -> float:
        """Return the CPU seconds of other processes per second."""
        wall = time.perf_counter() - self._began
        return max(0.0, (_busy() - self._busy - (_own() - self._own)) / wall)


def _busy() -> float:
    """Return the CPU seconds of all processes on this machine, including time stolen by other virtual machines."""
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for name in names)


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
