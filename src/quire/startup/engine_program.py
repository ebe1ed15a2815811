"""The program of an engine's process: it builds the model that it is told, and serves its clients."""

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


def build_model(hello: EngineInitMessage) -> tuple[Engine, EngineReady]:
    """The engine of a model."""
    from quire.startup.build import build_engine
    from quire.startup.checkpoint import read_checkpoint
    from quire.startup.prealloc import preallocate_weights

    config = hello.config
    source = read_checkpoint(config)
    preallocate_weights(config, source)
    engine, plan, notices = build_engine(config, source, hello.named, hello.progress)
    engine.grammar_compiler = LazyGrammars(config, source, engine)
    return engine, engine_ready(engine, plan.to_lines(), notices)


class LazyGrammars:
    """Makes grammars in the engine's process: fronts send the forms of outputs, which they have checked and tried. The
    tokenizer is read with the first."""

    def __init__(self, config: EngineConfig, source: Checkpoint, engine: Engine) -> None:
        self._config, self._source, self._engine = config, source, engine
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None

    def get_cached(self, structured: Structured) -> Grammar | None:
        """The grammar, if it costs nothing to get it."""
        return None if self._grammars is None else self._grammars.get_cached(structured)

    def get(self, structured: Structured) -> Grammar:
        """Its grammar."""
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
    """What goes wrong is in the log: who imports it again may fail of what the first time left behind."""
    try:
        import_module("torch")
    except Exception:
        log.warning("torch can't be imported", exc_info=True)


def main(build: EngineBuilder | None = None) -> None:
    """The arguments are the numbers of the connections' file descriptors. Without a `build` of its own it's a model's:
    torch is imported while the front finds out what it wants."""
    gc.disable()  # until all is loaded
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if build is None:
        threading.Thread(target=import_torch, name="quire-imports", daemon=True).start()
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    exit_now(serve_clients(build or build_model, connections))
