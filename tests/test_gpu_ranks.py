"""Ranks that have a device each: opened before anything is planned, met through each other's memory, and refused where
they can't be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tensor_parallel import PARAMS, PROMPTS, SETTINGS, tokens_of

import quire.distributed.rank_startup
import quire.distributed.remote_runner
from quire import LLM
from quire.distributed import rank_devices
from quire.distributed.rank_handle import launch_rank_process
from quire.distributed.remote_runner import RemoteRunner
from quire.errors import StartupError
from quire.ipc.child_process import BOOTSTRAP

GIB = 2**30
PROGRAM = ("-P", "-c", BOOTSTRAP, str(Path(__file__).parent), "peer_ranks")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have ranks meet as on GPUs. Return the memory that was planned for."""
    seen: list[Any] = []
    build = quire.distributed.rank_startup.build_ranks

    def met(ranks: RemoteRunner, config: Any, *more: Any) -> None:
        seen.append(quire.distributed.rank_startup.open_devices(ranks, config))
        build(ranks, config, *more)

    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    monkeypatch.setattr(quire.distributed.rank_startup, "build_ranks", met)
    start = partial(launch_rank_process, program=PROGRAM)
    monkeypatch.setattr(quire.distributed.remote_runner, "RemoteRunner", partial(RemoteRunner, start=start))
    return seen


def test_ranks_with_peers_memory_say_what_one_says(peers: list[Any]) -> None:
    """With sums and norms, the embedding, and sampling over a sharded vocabulary."""
    settings = SETTINGS | {"rank_timeout": 60.0, "max_num_seqs": 4, "attention": "sdpa"}
    several, alone = (LLM("tiny", tp=tp, **settings) for tp in (2, 1))
    for params in PARAMS[:2]:
        few = replace(params, max_tokens=4)
        assert tokens_of(several, PROMPTS[1:3], few) == tokens_of(alone, PROMPTS[1:3], few)
    several.close()
    assert peers == [(4 * GIB, 3 * GIB, "GPU 0, of which 3.00 of 4.00 GiB are free")]


@pytest.mark.parametrize("layout", [{"pp": 3}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.soak)], ids=str)
def test_stages_copy_into_each_others_memory(peers: list[Any], layout: dict[str, int]) -> None:
    """They give one rank's tokens, with chunked prompts and several steps in flight."""
    settings = SETTINGS | {"rank_timeout": 60.0, "max_num_seqs": 6, "max_num_batched_tokens": 16, "attention": "sdpa"}
    several, alone = (LLM("tiny", **layout, **settings), LLM("tiny", **settings))
    params = replace(PARAMS[0], max_tokens=6)
    assert tokens_of(several, PROMPTS, params) == tokens_of(alone, PROMPTS, params)
    several.close()


def test_who_reaches_nobody_says_so(peers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNREACHABLE", "1")
    with pytest.raises(StartupError, match="a stage's GPU doesn't reach another one's memory: no such memory"):
        LLM("tiny", pp=2, attention="sdpa", **SETTINGS)
    peers.clear()
    with pytest.raises(StartupError, match=r"rank [01] has no peers: no such memory"):
        LLM("tiny", tp=2, attention="sdpa", **SETTINGS)
    assert peers == []


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-7")
    rank_devices.check_gpus(2)
    with pytest.raises(
        StartupError, match=r"--tp is 4, and torch finds 2 GPUs \(CUDA_VISIBLE_DEVICES is 'GPU-1,GPU-7'"
    ):
        rank_devices.check_gpus(4)
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")
    rank_devices.check_gpus(4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StartupError, match="torch finds 0 GPUs"):
        rank_devices.check_gpus(2)


def told(index: int, free: int, name: str = "H", node: str = "") -> dict[str, Any]:
    uuid = f"{node}-{index}"
    return {"name": name, "index": index, "uuid": uuid, "free": free * GIB, "total": 80 * GIB, "node": node}


def test_the_gpu_with_the_least_room_decides() -> None:
    found = rank_devices.smallest_device_memory([told(0, 70), told(1, 30), told(2, 60)], 0.9)
    assert found == (80 * GIB, 30 * GIB, "GPU 1, of which 30.00 of 80.00 GiB are free")
    assert rank_devices.smallest_device_memory([told(0, 70), told(0, 70)], 0.9)[:2] == (40 * GIB, 35 * GIB)
    with pytest.raises(StartupError, match=r"GPU 0 is H, and GPU 2 is A: .*CUDA_VISIBLE_DEVICES"):
        rank_devices.smallest_device_memory([told(0, 70), told(1, 70), told(2, 70, "A")], 0.9)


def test_gpus_of_the_same_number_on_two_nodes_are_not_shared() -> None:
    infos = [told(i, 70 - i - 10 * (node == "b"), node=node) for node in ("a", "b") for i in range(2)]
    found = rank_devices.smallest_device_memory(infos, 0.9)
    assert found == (80 * GIB, 59 * GIB, "GPU 1 of node b, of which 59.00 of 80.00 GiB are free")
    with pytest.raises(StartupError, match=r"GPU 0 is H, and GPU 1 of node b is A: "):
        rank_devices.smallest_device_memory([told(0, 70, node="a"), told(0, 70, "A", node="b")], 0.9)
