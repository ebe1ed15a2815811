"""Who uses a GPU, as an nvidia-smi tells it that isn't one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.config import EngineConfig
from quire.distributed import rank_startup, remote_runner
from quire.distributed.rank_devices import other_gpu_processes, smallest_device_memory
from quire.errors import StartupError
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.parallel_layout import ParallelLayout
from quire.startup.memory_plan import MemoryPlan, check_still_fits, plan_memory

GIB = 2**30
SAID = f"""GPU-aa11, 31, 1024, /usr/bin/small
GPU-bb22, 32, 71680, /opt/env/bin/python, with a comma
GPU-bb22, {os.getpid()}, 2048, this one
GPU-bb22, 33, [N/A], other
what isn't a line of it
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an nvidia-smi that prints SAID if its arguments are as expected."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase $1 in --query-compute-apps=gpu_uuid,pid,*) cat <<'E'\n{SAID}E\nesac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


def test_the_largest_come_first_and_this_process_is_none(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        other_gpu_processes("bb22") == "70.00 GiB by process 32 (python, with a comma), 0.00 GiB by process 33 (other)"
    )
    assert other_gpu_processes("aa11") == "1.00 GiB by process 31 (small)"
    assert other_gpu_processes("cc33") == ""
    smi.write_text("#!/bin/sh\nprintf 'GPU-aa11, 31, 1024, /usr/bin/\\377\\n'\n")  # names may have any bytes
    assert other_gpu_processes("aa11") == "1.00 GiB by process 31 (\ufffd)"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert other_gpu_processes("aa11") == ""


def gpus(free: int) -> list[dict[str, Any]]:
    """Return the memory information of two ranks; the GPU of the second has `free` GiB free."""
    return [
        {"name": "H", "index": 0, "uuid": "aa11", "free": 79 * GIB, "total": 80 * GIB},
        {"name": "H", "index": 1, "uuid": "bb22", "free": free * GIB, "total": 80 * GIB,
         "others": other_gpu_processes("bb22")},
    ]  # fmt: skip


def planned(free: int) -> MemoryPlan:
    """Return the memory plan of Llama-3-8B on these GPUs."""
    seen = smallest_device_memory(gpus(free), 0.9)
    return plan_memory(
        EngineConfig(tp=2), read_spec(named_config("llama3-8b")), "m", "bfloat16", 2, "cuda", measured=seen
    )


TOO_FULL = (
    r"14\.\d+ GiB of weights.* don't fit into {} on GPU 1, of which 8\.00 of 80\.00 GiB are free "
    r"\(used: 70\.00 GiB by process 32 \(python"
)


@pytest.mark.usefixtures("smi")
def test_a_gpu_that_has_filled_up_is_named_as_ranks_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first start and at a restart, before ranks load. Memory that the plan does not use may be in use."""
    with pytest.raises(StartupError, match=TOO_FULL.format(r"0\.0 MiB")):
        planned(8)
    config, plan = EngineConfig(tp=2, device="cuda", max_num_batched_tokens=2048), planned(78)
    for free, told in ((8, TOO_FULL.format(r"8\.00 GiB")), (76, "they would load")):
        ranks = Mock(
            layout=ParallelLayout(2),
            seconds=60.0,
            **{"open_devices.return_value": gpus(free)},
        )
        ranks.send_init.side_effect = StartupError("they would load")
        monkeypatch.setattr(remote_runner, "RemoteRunner", Mock(return_value=ranks))
        with pytest.raises(StartupError, match=told):
            rank_startup.rebuild_ranks(config, [""], (), plan.max_len, Mock(), partial(check_still_fits, config, plan))
        ranks.kill.assert_called_once()


def test_the_memory_of_nodes_is_checked_as_ranks_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs: a node that remains may get the stages of one that was lost."""
    host, check = Mock(ranks=[0, 1], memory=(8 * GIB, 6 * GIB)), Mock(side_effect=StartupError("too small"))
    host.name = "a"
    ranks = Mock(layout=ParallelLayout(1, 2), hosts=[host])
    monkeypatch.setattr(remote_runner, "RemoteRunner", Mock(return_value=ranks))
    with pytest.raises(StartupError, match="too small"):
        rank_startup.rebuild_ranks(
            EngineConfig(pp=2, device="cpu", max_num_batched_tokens=64), [""], (), 64, Mock(), check
        )
    check.assert_called_once_with((4 * GIB, 3 * GIB, "node a"))
    ranks.kill.assert_called_once()
