"""Threads that suit a machine, from trees like those of /sys and /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import library_loader
from quire.kernels.cpu.cores import Cores, available_cores

PAIRS = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}


def machine(root: Path, files: dict[str, str], siblings: dict[int, str] = PAIRS) -> Path:
    trees = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": of for cpu, of in siblings.items()}
    for name, text in {**trees, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("allowed", "physical"),
    [({0, 1, 2, 3, 4, 5}, 3), ({0, 4}, 1), ({0, 1}, 2), ({2, 3, 5}, 2), ({0, 6, 7}, 3)],
)
def test_threads_of_a_core_count_once(tmp_path: Path, allowed: set[int], physical: int) -> None:
    found = available_cores(machine(tmp_path, {}), allowed)
    assert found == Cores(len(allowed), physical, None)
    assert found.threads == physical


V2 = {"proc/self/cgroup": "0::/user/app"}


def v1(group: str, quota: int) -> dict[str, str]:
    """Files of the older cgroups."""
    quotas = {"quota": quota, "period": 100_000}
    files = {f"sys/fs/cgroup/{group}/cpu.cfs_{name}_us": str(value) for name, value in quotas.items()}
    return {"proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/docker/b\n1:cpuset:/c", **files}


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({}, None, 3),
        ({**V2, "sys/fs/cgroup/user/app/cpu.max": "150000 100000"}, 1.5, 2),
        ({**V2, "sys/fs/cgroup/user/app/cpu.max": "max 100000"}, None, 3),
        ({**V2, "sys/fs/cgroup/user/app/cpu.max": "400000 100000", "sys/fs/cgroup/cpu.max": "20000 100000"}, 0.2, 1),
        ({**V2, "sys/fs/cgroup/user/app/cpu.max": "max 100000", "sys/fs/cgroup/user/cpu.max": "5000 5000"}, 1, 1),
        ({**V2, "sys/fs/cgroup/user/other/cpu.max": "5000 5000"}, None, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "800000 100000"}, 8, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "nonsense"}, None, 3),
        (v1("cpu/docker/b", 200_000), 2, 2),
        (v1("cpu,cpuacct", 50_000), 0.5, 1),
        (v1("cpu/docker/b", -1), None, 3),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], quota: float | None, threads: int) -> None:
    found = available_cores(machine(tmp_path, files), set(PAIRS))
    assert found == Cores(6, 3, quota)
    assert found.threads == threads


def test_what_is_said() -> None:
    assert str(Cores(1, 1, None)) == "1 core"
    assert str(Cores(8, 4, 1.5)) == "4 cores, 8 CPUs, a quota of 1.5"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system doesn't say which CPUs a process may use")
def test_this_process() -> None:
    found = available_cores()
    assert 1 <= found.threads <= found.physical <= found.allowed == len(os.sched_getaffinity(0))


def test_threads_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --threads, by OMP_NUM_THREADS, or by what there is; for torch and the kernels."""
    before = torch.get_num_threads()
    monkeypatch.setattr(library_loader, "available_cores", lambda: Cores(8, 4, 2.5))
    try:
        for asked, omp, expected in ((2, "1", 2), (None, "1", 2), (None, None, 3), (1, None, 1)):
            monkeypatch.setenv("OMP_NUM_THREADS", omp) if omp else monkeypatch.delenv("OMP_NUM_THREADS")
            library_loader.use_threads(asked)
            library = library_loader.library()
            assert torch.get_num_threads() == expected
            assert library is None or library.threads == expected
            monkeypatch.setenv("OMP_NUM_THREADS", "1")
            assert f"{expected} thread" in library_loader.describe()
    finally:
        library_loader.use_threads(before)
