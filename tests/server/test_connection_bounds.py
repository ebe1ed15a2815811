"""Connections within bounds: how many, how long, how large; what is said to those beyond, and to the log."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import resource
import signal
import socket
import time

import echo_service
import h11
import httpx
import pytest
from asking import KEY, connect
from echo_service import Running, Servers
from fastapi import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from test_process import process
from waiting import wait_until

from quire.errors import StartupError
from quire.server.connections import BoundedParser
from quire.server.errors import Failure
from quire.server.options import RESERVED_DESCRIPTORS, connection_capacity

pytestmark = pytest.mark.xdist_group(name="connection_bounds")

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = GET.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n"
ASKING = CHUNKED.replace(b"/health", b"/v1/completions")
KEYED = b"Authorization: Bearer %b\r\nHost" % KEY.encode()


def refusal(client: socket.socket, code: int, words: str) -> dict[str, str]:
    """Checks that all there is to read is an error in OpenAI's shape; returns its headers."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    body = answer.fp.read()  # until the server closes
    assert answer.status == code, body
    headers = {name.lower(): value for name, value in answer.getheaders()}
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["code"] == code
    assert words in error["message"]
    assert error["type"].endswith("Error")
    return headers


def told(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """The lines of the log with `words`, once there are some."""

    def lines() -> list[str]:
        return [message for message in map(logging.LogRecord.getMessage, caplog.records) if words in message]

    return wait_until(lines, lambda: f"the log has {words!r}: {caplog.text}")


def recovers(running: Running) -> None:
    wait_until(lambda: httpx.get(f"{running.url}/health").status_code == 200, "there is room for a connection")


def test_those_beyond_the_cap_get_a_503_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with echo_service.serving(max_connections=3) as running, httpx.Client(base_url=running.url) as known:
        assert known.get("/health").status_code == 200
        with connect(running), connect(running):
            start = time.monotonic()
            for _ in range(40):
                with connect(running) as late:
                    late.sendall(GET + b"\r\n")
                    headers = refusal(late, 503, "all 3 connections are in use")
                assert int(headers["retry-after"]) >= 1
                assert known.get("/health").status_code == 200
            took = time.monotonic() - start
            assert took < 40
            assert len(told(caplog, "connections beyond the limit")) <= 3 + took  # one a second
        recovers(running)


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", GET, GET + b"X: y\r\n" * 5, GET + b"\r\n" + GET],
    ids=["nothing", "a byte", "a line", "headers", "a second request"],
)
def test_headers_that_never_end(servers: Servers, sent: bytes) -> None:
    with connect(servers(bounds={"head": 0.5, "sweep": 0.1})) as client:
        began = time.monotonic()
        if sent.startswith(GET + b"\r\n"):
            client.sendall(GET + b"\r\n")
            assert b" 200 OK" in client.recv(1000)
            sent = GET
        client.sendall(sent)
        with contextlib.suppress(OSError):
            for _ in range(20):  # a byte now and then buys no time
                time.sleep(0.04)  # 0.8 s in all, more than the limit
                client.sendall(b"a" if sent else b"")
        refusal(client, 408, "did not arrive within 0.5 s")
        assert time.monotonic() - began < 15


def test_a_body_that_never_ends_after_its_answer(servers: Servers) -> None:
    """Without a key the answer comes before the body; the connection isn't the client's to keep."""
    with connect(servers(keys=[KEY], bounds={"head": 0.5, "sweep": 0.1})) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{")
        assert b" 401 " in client.recv(10_000)
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 30:
                time.sleep(0.05)  # the pace of a slow client
                client.sendall(b" ")


def test_an_idle_connection_stays_for_its_time() -> None:
    """The limit of headers is none of a connection that waits between two requests."""
    with echo_service.serving(bounds={"head": 1.0, "sweep": 0.1}) as running, connect(running) as client:
        for pause in (1.8, 0.0):
            client.sendall(GET + b"\r\n")
            assert b" 200 OK" in client.recv(1000)
            time.sleep(pause)  # longer than the limit of headers


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [
        (b"\x16\x03\x01 garbage\r\n\r\n", 400, "not valid HTTP: illegal request line"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: pickled\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "the limit is 8192"),
        (GET + b"X: y\r\n" * 100 + b"\r\n", 431, "more than 100 headers"),
        (GET + b"X: y\r\n" * 10_000, 431, "more than 100 headers"),
        (GET + b"X: " + b"y" * 70_000, 431, "more than 65536 bytes"),
        (GET + b"Content-Length: 0\r\n\r\n" + b"\x00\r\n\r\n", 400, "not valid HTTP"),
        (CHUNKED.replace(b"Host", KEYED) + b"0\r\n" + b"a:\r\n" * 12_500 + b"\r\n", 431, "more than 100 trailers"),
    ],
    ids=["garbage", "header", "host", "encoding", "target", "101 headers", "10,000", "64 KiB", "pipelined", "trailers"],
)
def test_malformed_requests(bounded: Running, sent: bytes, code: int, words: str) -> None:
    with connect(bounded) as client:
        client.sendall(sent)
        if sent.startswith(GET + b"Content-Length: 0"):
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += client.recv(1)
            assert b" 200 OK" in answer
        refusal(client, code, words)


@pytest.fixture
def bounded(servers: Servers) -> Running:
    return servers(keys=[KEY], bounds={"sweep": 0.1, "linger": 0.3})


@pytest.mark.parametrize("split", [0, 2, 1])
def test_100_headers_are_fine(bounded: Running, split: int) -> None:
    with connect(bounded) as client:
        head = GET + b"X: y\r\n" * 99 + b"\r\n"
        client.sendall(head[: len(head) - split])
        time.sleep(0.05 * bool(split))  # so that the server reads what came apart from the rest
        client.sendall(head[len(head) - split :])
        assert b" 200 OK" in client.recv(1000)


def test_chunks_of_a_byte(bounded: Running) -> None:
    """Each costs as much as a head, whoever sends it."""
    head = ASKING.replace(b"Host", b"Content-Type: application/json\r\n" + KEYED)
    with connect(bounded) as client:
        client.sendall(head + b"1\r\n \r\n" * 30_000)
        refusal(client, 400, "chunks of 1 bytes")
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    with connect(bounded) as client:
        client.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert b" 200 OK" in client.recv(10_000)


def parsed(*pieces: bytes) -> tuple[BoundedParser, list[object]]:
    parser, events = BoundedParser(), []
    for piece in pieces:
        parser.receive_data(piece)
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            events.append(event)
    return parser, events


@pytest.mark.parametrize("end", [b"0\r\n", b"1\r\nx\r\n0\r\n", b"000;a=b\r\n", b"7\r\n0\n0\r\n0\n\r\n0\r\n"])
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_trailers_are_bounded_as_headers_are(end: bytes, step: int) -> None:
    def sent(trailers: int) -> list[bytes]:
        data = CHUNKED + end + b"X: y\r\n" * trailers + b"\r\n"
        return [data[at : at + step] for at in range(0, len(data), step)]

    parser, events = parsed(*sent(100))
    assert parser.fault is None
    assert isinstance(events[-1], h11.EndOfMessage)
    assert len(events[-1].headers) == 100
    parser, events = parsed(*sent(101))
    assert parser.fault == Failure(431, "there are more than 100 trailers")
    assert not any(isinstance(event, h11.EndOfMessage) for event in events)
    parser, _ = parsed(CHUNKED, end + b"X: " + b"y" * 70_000 + b"\r\n\r\n")
    assert parser.fault == Failure(431, "the trailers have more than 65536 bytes")


def test_what_looks_like_trailers() -> None:
    for sent in (
        CHUNKED + b"800\r\n" + b"0\r\n\n" * 512 + b"\r\n0\r\n\r\n",
        CHUNKED + b"0\r\n\r\n" + GET + b"X: y\r\n" * 99 + b"\r\n",
        GET + b"Content-Length: 2000\r\n\r\n" + b"0\r\n\n" * 500,
    ):
        for step in (1, 100, 1 << 20):
            parser, events = parsed(*(sent[at : at + step] for at in range(0, len(sent), step)))
            assert parser.fault is None
            assert isinstance(events[-1], h11.EndOfMessage)


def test_a_request_for_another_protocol_is_answered_in_this_one(
    bounded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(bounded) as client:
        client.sendall(GET + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert b" 200 OK" in client.recv(1000)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_a_response_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection ends, and what it holds meanwhile is what fits into the buffers of one."""
    sent = 0

    async def endless(request: Request) -> Response:
        async def pieces() -> object:
            nonlocal sent
            while True:
                sent += 1
                yield b"x" * 10_000
                await asyncio.sleep(0)

        return StreamingResponse(pieces())  # type: ignore[arg-type]

    async def large(request: Request) -> Response:
        return PlainTextResponse(b"x" * 30_000_000, headers={"Connection": "close"})

    with echo_service.serving(bounds={"write": 1.0, "sweep": 0.1}) as running:
        running.app.add_route("/endless", endless)
        running.app.add_route("/large", large)
        for path in ("endless", "large"):
            with connect(running) as client:
                client.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                told(caplog, "bytes of a response were not read within 1 s")
                caplog.clear()
        assert sent * 10_000 < 20_000_000
        with connect(running) as client:  # slow isn't stuck
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
            client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            for _ in range(15):
                time.sleep(0.1)  # the pace of a slow client
                assert client.recv(1_000_000)


def test_queries_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "uvicorn.access")
    with echo_service.serving(access_log=True) as running:
        httpx.get(f"{running.url}/health?api_key={KEY}")
        httpx.get(f"{running.url}/nothing%3Fkey={KEY}")
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert '"GET /health HTTP/1.1" 200' in text
    assert f"api_key={KEY}" not in text


def test_a_hundred_idle_connections_with_64_descriptors() -> None:
    """As a process: those that were there go on, new ones get a 503, no tracebacks; when they are gone all is well."""
    with process(shell='ulimit -n 64; exec "$@"', pause=0) as server:
        with httpx.Client(base_url=server.url, timeout=30) as known, contextlib.ExitStack() as stack:
            running = Running(server.url, None, None, known)
            assert known.get("/health").status_code == 200
            for _ in range(100):
                stack.enter_context(connect(running))
            body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            for _ in range(20):
                assert known.post("/v1/completions", json=body).status_code == 200
                assert httpx.get(f"{running.url}/health").status_code == 503
        recovers(running)
        server.child.send_signal(signal.SIGTERM)
        status, error = server.end()
    assert status == 0, error
    assert "Traceback" not in error
    assert len(error.splitlines()) < 40


def test_capacity() -> None:
    taken = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connection_capacity(5) == 5
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + RESERVED_DESCRIPTORS + 7, hard))
        assert abs(connection_capacity() - 7) <= 2
        with pytest.raises(StartupError, match="20 connections don't fit"):
            connection_capacity(20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + RESERVED_DESCRIPTORS - 2, hard))
        with pytest.raises(StartupError, match="1 connections don't fit"):
            connection_capacity()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(StartupError, match="--max-connections is 0"):
        connection_capacity(0)
