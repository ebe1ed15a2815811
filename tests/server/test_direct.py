"""Bodies written at once: framed as h11 frames them, and only while that is right; what is around them goes on."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import h11
import httpx
import pytest
from asking import TALK, connect
from echo_service import Running
from starlette.types import Receive, Scope, Send

from quire.server.connections import BoundedProtocol, ConnectionLimits, LogThrottle
from quire.server.direct_writer import DIRECT_EXTENSION, DirectWriter
from quire.server.options import ServeOptions
from quire.server.web_server import WebServer


class App:
    """Answers with a body of which parts are sent by ASGI and by Direct, in turn with the test."""

    def __init__(self) -> None:
        self.direct: list[DirectWriter] = []
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope["extensions"][DIRECT_EXTENSION]
        assert not direct.is_open, "nothing has been sent"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        self.direct.append(direct)
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await self.go.wait()
        self.go.clear()
        await send({"type": "http.response.body", "body": b" end", "more_body": False})


def connected(app: App) -> tuple[BoundedProtocol, Mock]:
    """A connection, and its transport, which keeps what is written."""
    server = WebServer(app, ServeOptions(), bool)
    server.config.load()
    protocol = BoundedProtocol(
        server.config, server.server_state, {}, ConnectionLimits(), set(), LogThrottle("refused")
    )
    wire = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
    protocol.connection_made(wire)
    return protocol, wire


def written(wire: Mock) -> bytes:
    return b"".join(call.args[0] for call in wire.write.call_args_list)


async def turns() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def body(data: bytes) -> bytes:
    """The first answer's, as h11 reads it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    found = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Data):
            found += event.data
    return found


def test_what_is_written_is_a_part_of_the_body() -> None:
    async def work() -> None:
        app = App()
        protocol, wire = connected(app)
        for round in range(2):  # the connection lives on
            wire.write.reset_mock()
            protocol.data_received(GET)
            await turns()
            assert app.direct[round].is_open
            app.direct[round].write(b"two")
            app.direct[round].write(b"-" * 5000)
            app.go.set()
            await turns()
            assert body(written(wire)) == b"one two" + b"-" * 5000 + b" end"
            assert not any(direct.is_open for direct in app.direct)
        wire.close.assert_not_called()
        wire.pause_reading.assert_not_called()  # nothing came that had to wait
        protocol.shutdown()

    asyncio.run(work())


def test_nothing_is_written_to_who_does_not_read_or_has_left() -> None:
    async def work() -> None:
        app = App()
        protocol, wire = connected(app)
        protocol.data_received(GET)
        await turns()
        [direct] = app.direct
        assert direct.is_open
        protocol.pause_writing()
        assert not direct.is_open
        protocol.resume_writing()
        assert direct.is_open
        wire.is_closing.return_value = True
        assert not direct.is_open
        wire.is_closing.return_value = False
        protocol.connection_lost(None)
        assert not direct.is_open
        app.go.set()
        await turns()
        protocol, _ = connected(app)
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await turns()
        assert app.direct[-1].is_open
        protocol.data_received(b"no number\r\n")  # it breaks a rule while its answer is under way
        assert not app.direct[-1].is_open
        app.go.set()
        await turns()
        protocol.connection_lost(None)

    asyncio.run(work())


def test_a_request_that_comes_early_waits_and_is_not_read_further() -> None:
    async def work() -> None:
        app = App()
        protocol, wire = connected(app)
        protocol.data_received(GET)
        await turns()
        protocol.data_received(GET)
        await turns()
        wire.pause_reading.assert_called_once()
        assert len(app.direct) == 1
        app.go.set()
        await turns()
        assert len(app.direct) == 2
        app.go.set()
        await turns()
        assert written(wire).count(b"one ") == written(wire).count(b" end") == 2
        protocol.shutdown()

    asyncio.run(work())


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_over_a_socket(echo: Running, http: httpx.Client, path: str, version: str) -> None:
    """As its bytes are on the wire; then the same connection answers once more, where it lives on."""
    asked = {"max_tokens": 20, "n": 2, "ignore_eos": True, "stream": True, "seed": 3}
    asked |= {"messages": TALK} if "chat" in path else {"prompt": "a"}
    data = json.dumps(asked).encode()
    head = f"POST /v1/{path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    raw = b""
    with connect(echo) as client:
        client.sendall(
            head.encode() + b"\r\n\r\n" + data + (GET.replace(b" / ", b" /ping ") if version == "1.1" else b"")
        )
        while not (b"Content-Length: 0" in raw or b"content-length: 0" in raw) and (piece := client.recv(1 << 16)):
            raw += piece
    assert b"content-type: text/event-stream" in raw.lower()
    chunks = body(raw) if version == "1.1" else raw.partition(b"\r\n\r\n")[2]
    lines = chunks.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    whole = {**asked, "stream": False}
    for choice in http.post(f"/v1/{path}", json=whole).json()["choices"]:
        mine = [found for found in choices if found["index"] == choice["index"]]
        said = [found["text"] if "text" in found else found["delta"]["content"] for found in mine]
        assert "".join(said) == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [found["finish_reason"] for found in mine if found["finish_reason"]] == [choice["finish_reason"]]
