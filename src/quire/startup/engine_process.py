"""Start the process of an engine, and meanwhile read its model's tokenizer and chat template here."""

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
    """Start an engine's process and wait until its model is loaded. The tokenizer is read here meanwhile. With more
    than one client, `start_other_clients` starts the frontends beside this one, over the child's other connections."""
    child = ChildProcess(num_clients, program)
    engine_client = ProcessEngineClient(child)

    def begin(named: tuple[int, ...]) -> None:
        engine_client.send_init(EngineInitMessage(config, named, stall_after, progress, logging.getLogger().level))
        if start_other_clients is not None:
            start_other_clients(child)

    return _read_model_and_wait(engine_client, config, begin)


def join_engine_process(
    config: EngineConfig, connection: socket.socket, on_tokenizer_read: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """Connect to an engine's process that another frontend started, and wait until its model is loaded;
    `on_tokenizer_read` is called before the wait."""
    return _read_model_and_wait(ProcessEngineClient(ExternalProcess(connection)), config, on_tokenizer_read)


def _read_model_and_wait(
    engine_client: ProcessEngineClient, config: EngineConfig, on_tokenizer_read: Callable[[tuple[int, ...]], None]
) -> tuple[ProcessEngineClient, InputProcessor, Checkpoint]:
    """Read the model's tokenizer and chat template, call `on_tokenizer_read` with its end tokens, and wait for the
    engine."""
    from quire.text.template_process import TemplateProcess

    renderer = None if config.skip_tokenizer_init else TemplateProcess()
    try:
        checkpoint = read_checkpoint(config)
        tokenizer, chat_template = read_tokenizer_and_template(config, checkpoint, renderer)
        image_loader = read_image_loader(config, checkpoint, tokenizer)
        on_tokenizer_read(tokenizer.eos_ids if tokenizer is not None else ())
        engine_client.wait_ready()
    except BaseException:
        engine_client.close(0.0)
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
