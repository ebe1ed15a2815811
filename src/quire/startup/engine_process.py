"""Starts the process of an engine, and reads the texts of its model meanwhile."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from quire.config import EngineConfig
from quire.ipc.child_process import ChildProcess, ExternalProcess, program_arguments
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.process_client import ProcessEngineClient
from quire.startup.checkpoint import (
    Checkpoint,
    collect_eos_ids,
    read_checkpoint,
    read_image_loader,
    read_tokenizer_and_template,
)
from quire.text.input_processor import InputProcessor

ENGINE_PROGRAM = program_arguments("quire.startup.engine_program")


def launch_engine_process(
    config: EngineConfig,
    progress: bool = False,
    stall_after: float = 60.0,
    program: Sequence[str] = ENGINE_PROGRAM,
    num_clients: int = 1,
    start_other_clients: Callable[[ChildProcess], None] | None = None,
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """Start an engine's process and wait until its model is there. Texts are read here meanwhile. With more than one
    front `start_other_clients` starts those beside this one, over the child's other connections."""
    child = ChildProcess(num_clients, program)
    link = ProcessEngineClient(child)

    def begin(named: tuple[int, ...]) -> None:
        link.send_init(EngineInitMessage(config, named, stall_after, progress, logging.getLogger().level))
        if start_other_clients is not None:
            start_other_clients(child)

    return _read_model_and_wait(link, config, begin)


def join_engine_process(
    config: EngineConfig, connection: socket.socket, on_tokenizer_read: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """The engine's process that another front started, once its model is there; `on_tokenizer_read` is called before
    that is waited for."""
    return _read_model_and_wait(ProcessEngineClient(ExternalProcess(connection)), config, on_tokenizer_read)


def _read_model_and_wait(
    engine_client: ProcessEngineClient, config: EngineConfig, on_tokenizer_read: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """Read the model's texts; `on_tokenizer_read` learns the tokenizer's end tokens. Then wait for the engine."""
    from quire.text.template_process import TemplateProcess

    renderer = None if config.skip_tokenizer_init else TemplateProcess()
    try:
        source = read_checkpoint(config)
        tokenizer, chat = read_tokenizer_and_template(config, source, renderer)
        sight = read_image_loader(config, source, tokenizer)
        on_tokenizer_read(tokenizer.eos_ids if tokenizer is not None else ())
        engine_client.wait_ready()
    except BaseException:
        engine_client.close(0.0)
        if renderer is not None:
            renderer.close()
        raise
    ends = None if tokenizer is None else collect_eos_ids(source, tokenizer.eos_ids)
    return (
        engine_client,
        InputProcessor(tokenizer, chat, engine_client.ready.limits, source.default_sampling, sight, ends),
        source,
    )
