"""Fronts that can't start, and what can't be served."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.link.child import Child
from quire.server.fronts import Fronts
from quire.server.run import ServeOptions, serve


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os._exit(7)", "front 1 ended with status 7 at start. What it wrote"),
        (
            "import socket, sys; from quire.server.control import hear, tell; "
            "s = socket.socket(fileno=int(sys.argv[1])); hear(s); "
            "tell(s, 'failed', {'text': 'no ' + sys.argv[2], 'remedy': 'Mend it'})",
            r"front 1 can't start: no \d+. Mend it",
        ),
        ("import time; time.sleep(60)", "front 1 was not ready within 0.5 s"),
    ],
)
def test_a_front_that_cannot_start_is_named(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.fronts.PROGRAM", ("-c", program))
    if "sleep" in program:
        monkeypatch.setattr("quire.server.fronts.START_SECONDS", 0.5)
    monkeypatch.setattr("quire.server.fronts.KILL_SECONDS", 0.1)
    closed: list[None] = []
    llm = SimpleNamespace(close=lambda: closed.append(None))
    engine = Child(2, ("-c", ""))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fronts = Fronts(2, listener, {})
        try:
            fronts.start(engine)
            with pytest.raises(StartupError, match=said):
                fronts.wait(llm)  # type: ignore[arg-type]
        finally:
            fronts.close()
            engine.end(5)
            engine.connections[0].close()
    assert all(other.child.ended() for other in fronts.others)
    assert closed == [None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fronts": 0}, "--fronts is 0. It must be between 1 and 64"),
        ({"fronts": 65}, "--fronts is 65. It must be between 1 and 64"),
        ({"fronts": 2, "engine_process": "off"}, "--fronts is 2, and --engine-process is off"),
    ],
)
def test_what_cannot_be_served(options: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=re.escape(said)):
        serve(EngineConfig(), ServeOptions(**options), print)  # type: ignore[arg-type]
