"""Start the processes of engines, and meanwhile read its model's tokenizer and chat template here."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import FileIO
from typing import TypeVar

from quire.config import EngineConfig
from quire.distributed.rank_devices import may_share_gpus, visible_gpus
from quire.distributed.rank_startup import threads_per_rank
from quire.errors import StartupError
from quire.ipc.child_process import ENGINE_PROGRAM, ChildProcess, ExternalProcess
from quire.ipc.engine_client import EngineClient
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.process_client import ProcessEngineClient
from quire.ipc.replicas import ReplicatedEngineClient
from quire.protocol.shared_host import SharedHostMemory
from quire.startup.checkpoint import (
    Checkpoint,
    collect_eos_ids,
    read_checkpoint,
    read_image_loader,
    read_tokenizer_and_template,
)
from quire.startup.memory_plan import GIB, default_cpu_kv_bytes, device_memory
from quire.text.input_processor import InputProcessor

Client = TypeVar("Client", bound=EngineClient)


def launch_engine_process(
    config: EngineConfig,
    progress: bool = False,
    stall_after: float = 60.0,
    program: Sequence[str] = ENGINE_PROGRAM,
    start_other_clients: Callable[[ChildProcess], None] | None = None,
    report_cache: bool = False,
    shared_parts: int = 0,
    child: ChildProcess | None = None,
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """Start an engine's process, or use `child`, which has just been started, and wait until its model is loaded. The
    tokenizer is read here meanwhile. `start_other_clients` starts the frontends beside this one, over the child's other
    connections. With `shared_parts` the engine's host memory is the first of these parts of memory that it shares with
    this process."""
    memory = create_shared_memory() if shared_parts else None
    child = child or ChildProcess(1, program, shared_memory=memory)
    engine_client = ProcessEngineClient(child)
    shared = None if memory is None else shared_part(memory, 0, shared_parts, config)

    def begin(named: tuple[int, ...]) -> None:
        level = logging.getLogger().level
        engine_client.send_init(
            EngineInitMessage(config, named, stall_after, progress, level, report_cache, shared_host=shared)
        )
        if start_other_clients is not None:
            start_other_clients(child)

    try:
        return _read_model_and_wait([engine_client], config, begin, lambda: engine_client)
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def launch_replicas(
    config: EngineConfig,
    count: int,
    policy: str,
    progress: bool = False,
    stall_after: float = 60.0,
    restart: bool = False,
    program: Sequence[str] = ENGINE_PROGRAM,
    num_prefill: int = 0,
) -> tuple[ReplicatedEngineClient, InputProcessor, Checkpoint]:
    """Start `count` engines, each in a process of its own, with GPUs of its own or an equal share of the cores. The
    router's `policy` divides the requests among them. With `restart` one that ends is started again, once. The first
    `num_prefill` engines compute prompts for the others, which read the pages in host memory that all of them share.
    Raise StartupError if there are too few GPUs, or if an engine can't be built."""
    gpus = replica_gpus(config, count)
    config = replace(config, threads=threads_per_rank(config.threads, count))
    if gpus[0] is None and config.kv_tokens is None and config.kv_gib is None:
        config = replace(config, kv_gib=default_cpu_kv_bytes(device_memory("cpu")[1]) / count / GIB)
    replicas = list[ProcessEngineClient]()
    memory = create_shared_memory() if num_prefill else None
    for i, names in enumerate(gpus):
        variables = {} if names is None else {"CUDA_VISIBLE_DEVICES": names}
        child = ChildProcess(1, program, f"replica {i}", variables=variables, shared_memory=memory)
        replicas.append(ProcessEngineClient(child))

    def begin(named: tuple[int, ...]) -> None:
        level, report_cache = logging.getLogger().level, policy == "prefix"
        for i, replica in enumerate(replicas):
            shown = progress and i == 0
            shared = None if memory is None else shared_part(memory, i, count, config)
            replica.send_init(EngineInitMessage(config, named, stall_after, shown, level, report_cache, i, shared))

    def connect() -> ReplicatedEngineClient:
        return ReplicatedEngineClient(replicas, policy, restart, num_prefill)

    try:
        return _read_model_and_wait(replicas, config, begin, connect)
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def create_shared_memory() -> FileIO:
    """Return an empty file in memory, for host pages that several processes map."""
    return FileIO(os.memfd_create("quire-host-pages", os.MFD_CLOEXEC), "r+b")


def shared_part(memory: FileIO, part: int, num_parts: int, config: EngineConfig) -> SharedHostMemory:
    """Return a part of `memory`, for the host pages of an engine with these settings."""
    return SharedHostMemory(memory.fileno(), part, num_parts, int(config.swap_gib * GIB))


def replica_gpus(config: EngineConfig, count: int) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each replica: `tp` times `pp` of this process's GPUs; None on a CPU. Raise
    StartupError if there are too few."""
    ranks, visible = config.tp * config.pp, [] if config.device == "cpu" else visible_gpus()
    if not visible:
        return [None] * count
    if count * ranks > len(visible) and not may_share_gpus():
        each = f", of {ranks} GPUs each" * (ranks > 1)
        raise StartupError(
            f"--replicas is {count}{each}, and there are {len(visible)} GPUs",
            f"Use --replicas {len(visible) // ranks} or less, or --device cpu",
        )
    return [",".join(visible[(i * ranks + rank) % len(visible)] for rank in range(ranks)) for i in range(count)]


def join_engine_process(
    config: EngineConfig, connection: socket.socket, on_tokenizer_read: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """Connect to an engine's process that another frontend started, and wait until its model is loaded;
    `on_tokenizer_read` is called before the wait."""
    engine_client = ProcessEngineClient(ExternalProcess(connection))
    return _read_model_and_wait([engine_client], config, on_tokenizer_read, lambda: engine_client)


def read_input_processor(config: EngineConfig, engine_client: EngineClient) -> tuple[InputProcessor, Checkpoint]:
    """Read the tokenizer and the chat template for an engine that is ready."""
    _, input_processor, checkpoint = _read_model_and_wait([], config, lambda named: None, lambda: engine_client)
    return input_processor, checkpoint


def _read_model_and_wait(
    processes: Sequence[ProcessEngineClient],
    config: EngineConfig,
    on_tokenizer_read: Callable[[tuple[int, ...]], None],
    make_client: Callable[[], Client],
) -> tuple[Client, InputProcessor, Checkpoint]:
    """Read the model's tokenizer and chat template, call `on_tokenizer_read` with its end tokens, wait for the
    engines' processes, and make the client of all of them."""
    from quire.text.template_process import TemplateProcess

    renderer = None if config.skip_tokenizer_init else TemplateProcess()
    try:
        checkpoint = read_checkpoint(config)
        tokenizer, chat_template = read_tokenizer_and_template(config, checkpoint, renderer)
        image_loader = read_image_loader(config, checkpoint, tokenizer)
        on_tokenizer_read(tokenizer.eos_ids if tokenizer is not None else ())
        for process in processes:
            process.wait_ready()
        engine_client = make_client()
    except BaseException:
        for process in processes:
            process.close(0.0)
        if renderer is not None:
            renderer.close()
        raise
    eos_ids = None if tokenizer is None else collect_eos_ids(checkpoint, tokenizer.eos_ids)
    return (
        engine_client,
        InputProcessor(
            tokenizer, chat_template, engine_client.ready.limits, checkpoint.default_sampling, image_loader, eos_ids
        ),
        checkpoint,
    )
