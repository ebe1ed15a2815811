"""How many threads suit this process: what the machine, its scheduler and a container's quota leave to it. Reads what
Linux says; where it says nothing, torch's own choice stays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """`allowed`: CPUs that the process may run on; `physical`: cores under them; `quota`: CPU time that its container
    has a second, in seconds; None: as much as it likes."""

    allowed: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """A thread a core: those that share one share its multipliers too. No more than may run at once."""
        return self.physical if self.quota is None else max(1, min(self.physical, math.ceil(self.quota - 1e-6)))

    def __str__(self) -> str:
        shared = f", {self.allowed} CPUs" if self.allowed != self.physical else ""
        quota = f", a quota of {self.quota:g}" if self.quota is not None else ""
        return f"{self.physical} core{'s' * (self.physical != 1)}{shared}{quota}"


def available_cores(root: Path = Path("/"), allowed: Set[int] | None = None) -> Cores | None:
    """Those of this process; None where the system doesn't say which CPUs it may use. `root`: where /sys and /proc
    are."""
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        allowed = os.sched_getaffinity(0)
    siblings = {
        _read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in allowed
    }
    return Cores(len(allowed), len(siblings), min(_cgroup_quotas(root), default=None))


def _cgroup_quotas(root: Path) -> Iterator[float]:
    """Those of the process's control groups and of the groups above them, versions 1 and 2."""
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
            for folder in (top / path, *(top / above for above in path.parents)):  # a container may see its own only
                quota, period = _cpu_limit(folder)
                if quota > 0 and period > 0:
                    yield quota / period


def _cpu_limit(folder: Path) -> tuple[int, int]:
    """Microseconds, and of how many; 0 where there is no limit."""
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
