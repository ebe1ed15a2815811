"""Start ranks from the engine's side: what each is to build."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.config import EngineConfig
from quire.distributed import remote_runner
from quire.distributed.rank_devices import gpus_per_rank, smallest_device_memory
from quire.distributed.rank_messages import InitMessage
from quire.distributed.remote_runner import RemoteRunner
from quire.memory.interface import KVMemory


def start_remote_runner(config: EngineConfig, device: str, checkpoints: Sequence[str]) -> RemoteRunner:
    """Start ranks on "cpu" or "cuda" for the model and the draft model in these folders or files. Raise StartupError if
    that is impossible."""
    open_hosts = None
    if config.executor == "ray":
        from quire.distributed.ray_launcher import RayLauncher

        gpus = gpus_per_rank(config.world_size) if device != "cpu" else 0.0
        open_hosts = RayLauncher(gpus, config.ray_address, checkpoints)
    return remote_runner.RemoteRunner(config.layout, config.rank_timeout, open_hosts=open_hosts)


def open_devices(ranks: RemoteRunner, config: EngineConfig) -> tuple[int, int, str]:
    """Have all ranks open their GPUs, and return the memory to plan for: see rank_devices.smallest_device_memory."""
    shards = ranks.layout.shards()
    memory_infos = ranks.open_devices([InitMessage(config, part, (), 1, ranks.seconds) for part in shards])
    return smallest_device_memory(memory_infos, config.gpu_memory_utilization)


def smallest_host_memory(ranks: RemoteRunner) -> tuple[int, int, str] | None:
    """Return the memory to plan for on CPUs: a rank's share of total and free bytes of RAM, on the host with the least
    room, and a description of it; None if all ranks are on this host."""
    rooms = [
        (host.memory[1] // len(host.ranks), host.memory[0] // len(host.ranks), host.name)
        for host in ranks.hosts
        if host.memory is not None
    ]
    free, total, name = min(rooms, default=(0, 0, ""))
    return (total, free, f"node {name}") if rooms else None


def build_ranks(
    ranks: RemoteRunner, config: EngineConfig, folder: str, eos_ids: tuple[int, ...], max_len: int, progress: bool
) -> None:
    """Have all ranks build their part of the model in `folder` ("": the config's named shape), and wait for it.
    `config` is sized, with dtype, device and attention resolved."""
    if folder:
        config = replace(config, model=folder, revision=None)
    # Defaults of requests are the engine's alone: other nodes need no file for them.
    config = replace(config, generation_config="vllm", override_generation_config=None)
    if config.device == "cpu" or config.threads is not None:
        each = [threads_per_rank(config.threads, len(host.ranks), host.cores) for host in ranks.hosts]
        config = replace(config, threads=None if None in each else min(filter(None, each)))
    level = logging.getLogger().getEffectiveLevel()
    ranks.send_init([
        InitMessage(
            config, part, eos_ids, max_len, ranks.seconds, progress=progress and part.global_rank == 0, log_level=level
        )
        for part in ranks.layout.shards()
    ])  # fmt: skip
    ranks.wait_until_built()


def rebuild_ranks(
    config: EngineConfig,
    checkpoints: Sequence[str],
    eos_ids: tuple[int, ...],
    max_len: int,
    make_memory: Callable[[], KVMemory],
    check_memory: Callable[[tuple[int, int, str]], None],
) -> tuple[RemoteRunner, KVMemory]:
    """Start new ranks after a failure, bound to a new memory like the old one; `config` is as for `build_ranks`.
    `checkpoints` are the folders or files of the model ("": a named shape) and of the draft model. `check_memory`
    raises StartupError if the free memory, as `open_devices` or `smallest_host_memory` returns it, is too small by now.
    Raise StartupError or RanksLost if the ranks can't be built."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    ranks = start_remote_runner(config, config.device, [path for path in checkpoints if path])
    try:
        measured = smallest_host_memory(ranks) if config.device == "cpu" else open_devices(ranks, config)
        if measured is not None:  # None: the ranks are where those were that have ended
            check_memory(measured)
        build_ranks(ranks, config, checkpoints[0], eos_ids, max_len, progress=False)
        memory = make_memory()
        ranks.bind(memory.kv_config)
        if config.warm_up:
            ranks.warm_up(config.max_num_batched_tokens, max_len)
    except BaseException:
        ranks.kill()
        raise
    return ranks, memory


def threads_per_rank(threads: int | None, ranks: int, cores: int | None = None) -> int | None:
    """Return the threads of a rank if all ranks of a host have `threads` (None: one for each of `cores`, by default
    those of this process); None: OMP_NUM_THREADS decides."""
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return None
    threads = threads or cores
    if threads is None:
        from quire.kernels.cpu.cores import available_cores

        here = available_cores()
        threads = here.threads if here is not None else os.cpu_count() or 1
    return max(threads // ranks, 1)


def unused_threads_notice(threads: int | None, ranks: int) -> list[str]:
    """Return a notice that ranks leave some of --threads unused, if so; `ranks` are those of the host with the most.
    All ranks have equally many, so that they compute alike."""
    if threads is None or (each := max(threads // ranks, 1)) * ranks == threads:
        return []
    return [f"--threads is {threads}, and {ranks} ranks use {each} each: {each * ranks}"]
