"""Hostile connections against a server of 256 descriptors, while one chat goes on over its own connection."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serve_process import Process, serving

TESTS = Path(__file__).parent.parent
PROGRAM = """
import sys, types
sys.path.insert(0, sys.argv.pop(1))
import echo_service
stand_in = types.ModuleType("quire.startup.build")
stand_in.build = lambda config, progress=False: echo_service.built(echo_service.Echo(pause=0.002))
sys.modules["quire.startup.build"] = stand_in
from quire.cli import main
sys.exit(main(["serve", "--port", "0", "--engine-process", "off"]))
"""
IDLE = 2000
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHAT = {"messages": [{"role": "user", "content": "a quire of pages"}], "max_tokens": 8, "seed": 1, "ignore_eos": True}


def connect(to: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", to.port), timeout=20)


class Canary:
    """One chat after the other on one connection, from a thread; how long the longest took, and what was answered."""

    def __init__(self, url: str) -> None:
        self.answers: list[str] = []
        self.slowest = 0.0
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Canary:
        self._thread.start()
        while not self.answers and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, limits=httpx.Limits(max_connections=1)) as http:
            while not self._stop.wait(0.02):
                began = time.monotonic()
                answer = http.post("/v1/chat/completions", json=CHAT)
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.answers.append(answer.text if answer.status_code != 200 else str(answer.json()["choices"]))


def idle(to: Process, chance: random.Random) -> None:
    """Connections that say nothing, more than there is room for, until the server ends them."""
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(connect(to))
        time.sleep(chance.uniform(17, 19))


def slow(head: bytes) -> Callable[[Process, random.Random], None]:
    def work(to: Process, chance: random.Random) -> None:
        """A byte now and then, on 100 connections."""
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(to)) for _ in range(100)]
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(head)
            for _ in range(20):
                time.sleep(1)
                for client in clients:
                    with contextlib.suppress(OSError):
                        client.sendall(bytes([chance.randrange(97, 123)]))

    return work


def burst(make: Callable[[random.Random], bytes], *, half: bool = False) -> Callable[[Process, random.Random], None]:
    def work(to: Process, chance: random.Random) -> None:
        """300 connections, one after the other: something is sent and all of the answer read, or left."""
        for _ in range(300):
            with connect(to) as client, contextlib.suppress(OSError):
                client.sendall(make(chance))
                if half:
                    client.shutdown(socket.SHUT_WR)
                client.settimeout(chance.choice((0.01, 0.3)))
                while client.recv(65536):
                    pass

    return work


def pipelined(chance: random.Random) -> bytes:
    body = b'{"prompt": [1, 2], "max_tokens": 2}'
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return b"".join(chance.choice((GET + b"\r\n", request)) for _ in range(chance.randrange(2, 60)))


HOSTILE: dict[str, Callable[[Process, random.Random], None]] = {
    "2,000 idle connections": idle,
    "headers a byte at a time": slow(GET + b"X: "),
    "a body a byte at a time": slow(POST + b"Content-Length: 100000\r\n\r\n"),
    "a chunked body a byte at a time": slow(POST + b"Transfer-Encoding: chunked\r\n\r\n"),
    "garbage": burst(lambda chance: chance.randbytes(chance.randrange(1, 5000)) + b"\r\n\r\n"),
    "half-closed": burst(lambda chance: GET + b"\r\n" * chance.randrange(2), half=True),
    "pipelined": burst(pipelined),
    "10,000 headers": burst(lambda chance: GET + b"".join(b"x%d: y\r\n" % i for i in range(10_000)) + b"\r\n"),
    "chunks of a byte": burst(lambda chance: POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000),
    "wrong lengths": burst(lambda chance: POST + b"Content-Length: %d\r\n\r\n{}" % chance.choice((1, 10**18))),
}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_hostile_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    command = ["bash", "-c", f"ulimit -n 256; exec {sys.executable} -c '{PROGRAM}' {TESTS}"]
    try:
        with serving(command=command) as to:
            with Canary(to.url) as canary:
                for name, work in HOSTILE.items():
                    before, began = len(canary.answers), time.monotonic()
                    canary.slowest = 0.0
                    work(to, random.Random(name))
                    print(
                        f"{name}: {time.monotonic() - began:.1f} s, {len(canary.answers) - before} chats, "
                        f"slowest {canary.slowest * 1e3:.0f} ms"
                    )
                    assert canary.slowest < 5, name
                    assert len(canary.answers) > before, name
            assert set(canary.answers) == {canary.answers[0]}
            assert canary.answers[0].startswith("[{")
            end = time.monotonic() + 20
            while httpx.get(f"{to.url}/health").status_code != 200 and time.monotonic() < end:
                time.sleep(0.2)
            assert httpx.get(f"{to.url}/health").status_code == 200
            assert to.end(30) == 0
            print(to.text[-4000:])
            assert "Traceback" not in to.text
            assert len(to.text.splitlines()) < 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
