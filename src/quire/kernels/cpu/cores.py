"""The CPU cores that this process may use, by its affinity, the machine's topology and its container's quota. Read from
Linux; on other systems torch's default number of threads stays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """`allowed`: logical CPUs that the process may run on; `physical`: their physical cores; `quota`: CPU seconds per
    second that its container may use (None: no limit)."""

    allowed: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """Return one thread for each physical core, because hyperthreads share its multipliers, limited by the
        quota."""
        return self.physical if self.quota is None else max(1, min(self.physical, math.ceil(self.quota - 1e-6)))

    def __str__(self) -> str:
        shared = f", {self.allowed} CPUs" if self.allowed != self.physical else ""
        quota = f", a quota of {self.quota:g}" if self.quota is not None else ""
        return f"{self.physical} core{'s' * (self.physical != 1)}{shared}{quota}"


def available_cores(root: Path = Path("/"), allowed: Set[int] | None = None) -> Cores | None:
    """Return the cores of this process; None if the system does not report its affinity. `root` contains /sys and
    /proc."""
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        allowed = os.sched_getaffinity(0)
    siblings = {
        _read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in allowed
    }
    return Cores(len(allowed), len(siblings), min(_cgroup_quotas(root), default=None))


def _cgroup_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of the process's control groups and their parents, versions 1 and 2."""
    mount = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            tops = (mount, mount / "unified")
        elif "cpu" in controllers.split(","):
            tops = (mount / "cpu", mount / controllers)
        else:
            continue
        path = Path(group.lstrip("/"))
        for top in tops:
            # Parents too, because a container may see only its own group, mounted as the root.
            for folder in (top / path, *(top / above for above in path.parents)):
                quota, period = _cpu_limit(folder)
                if quota > 0 and period > 0:
                    yield quota / period


def _cpu_limit(folder: Path) -> tuple[int, int]:
    """Return (quota, period) in microseconds; (0, 0) if there is no limit."""
    words = _read_text(folder / "cpu.max").split() or [
        _read_text(folder / "cpu.cfs_quota_us"),
        _read_text(folder / "cpu.cfs_period_us"),
    ]
    try:
        return int(words[0]), int(words[1])
    except (ValueError, IndexError):  # "max", or no such file
        return 0, 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
