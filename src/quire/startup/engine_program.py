"""The program of an engine's process: build a model's engine, and serve its clients."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from quire.core.engine import Engine
from quire.errors import InputError
from quire.ipc.child_process import exit_now
from quire.ipc.engine_server import EngineBuilder, log, serve_clients
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.messages import EngineReady, engine_ready
from quire.protocol.structured_output import Grammar, Structured

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.startup.checkpoint import Checkpoint
    from quire.text.grammars.compiler import GrammarCompiler


def build_model(hello: EngineInitMessage) -> tuple[Engine, EngineReady, LazyGrammars]:
    """Build the engine of a model. Return it, what clients must know of it, and its grammar compiler."""
    from quire.startup.build import build_engine
    from quire.startup.checkpoint import read_checkpoint
    from quire.startup.loader import end_gpu_work, start_gpu_work
    from quire.startup.prealloc import preallocate_weights

    config = hello.config
    start_gpu_work(config, host_pages=hello.shared_host is None)
    source = read_checkpoint(config)
    preallocate_weights(config, source)
    engine, plan, notices = build_engine(config, source, hello.named, hello.progress, shared_host=hello.shared_host)
    end_gpu_work()
    return engine, engine_ready(engine, plan.to_lines(), notices), LazyGrammars(config, source, engine)


class LazyGrammars:
    """The grammar compiler of the engine's process: it reads the tokenizer for the first grammar. Clients have checked
    the sources of the grammars that they send."""

    def __init__(self, config: EngineConfig, source: Checkpoint, engine: Engine) -> None:
        self._config, self._source, self._engine = config, source, engine
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None

    def get_cached(self, structured: Structured) -> Grammar | None:
        """Return the grammar if it is cached, else None."""
        return None if self._grammars is None else self._grammars.get_cached(structured)

    def get(self, structured: Structured) -> Grammar:
        """Return the grammar, compiled if necessary."""
        with self._lock:
            if self._grammars is None:
                self._grammars = self._load()
        return self._grammars.get(structured)

    def _load(self) -> GrammarCompiler:
        from quire.startup.checkpoint import read_tokenizer
        from quire.text.grammars.compiler import GrammarCompiler

        tokenizer = read_tokenizer(self._config, self._source)
        if tokenizer is None:
            raise InputError("structured output needs a tokenizer to make a grammar of it", "structured_outputs")
        return GrammarCompiler(
            tokenizer, self._engine.limits.vocab_size, tuple(self._engine.scheduler.eos_ids), trusted=True
        )


def import_torch() -> None:
    """Import torch and log a failure, since a second import may fail differently after the first."""
    try:
        import_module("torch")
    except Exception:
        log.warning("torch can't be imported", exc_info=True)


def main(build: EngineBuilder | None = None) -> None:
    """Run the engine's process. The arguments are the descriptors of the connections. By default a model's engine is
    built: then torch is imported while the client decides what to build."""
    gc.disable()  # while loading
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if build is None:
        threading.Thread(target=import_torch, name="quire-imports", daemon=True).start()
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    exit_now(serve_clients(build or build_model, connections))
