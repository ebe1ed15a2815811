"""The engine's process, with an echo in the model's place: `echo_engine.py RECIPE FD ...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import echo_service

from quire.core.engine import Engine
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.messages import EngineReady, engine_ready
from quire.startup.engine_program import main
from quire.text.grammars.compiler import GrammarCompiler


def build(hello: EngineInitMessage) -> tuple[Engine, EngineReady, GrammarCompiler | None]:
    """The echo of the recipe."""
    echo = echo_service.Echo(**RECIPE["echo"], shared_host=hello.shared_host)
    given = {"text": RECIPE["text"], "kv_tokens": RECIPE["kv_tokens"], **RECIPE["settings"]}
    model = echo_service.built(echo, chat=False, **given)  # templates are the front's
    grammars = None
    if model.tokenizer is not None:
        grammars = GrammarCompiler(model.tokenizer, echo_service.VOCAB, (0,), trusted=True)
    return model.engine, engine_ready(model.engine, model.memory_plan.to_lines(), model.notices), grammars


RECIPE = json.loads(sys.argv.pop(1))
main(build)
