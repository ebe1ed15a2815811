"""What HTTP costs: processor time of the server's process for each streamed token and each request. No engine runs:
tokens are put into streams, as many as there are clients, which another process reads over loopback sockets. As a
script it writes what it saw: `python tests/server/stream_price.py FILE [--against SRC]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import echo_service
from echo_service import deliver, new_stream

import quire
from quire.async_llm import AsyncLLM
from quire.bench.machine import machine
from quire.core.outputs import BranchOutput
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.server.api_server import bind
from quire.server.app import create_app
from quire.server.options import ServeOptions
from quire.server.web_server import WebServer
from quire.text.output_stream import OutputStream

WORDS = (" once", " upon", " a", " time", " there", " was", " a", " quire")
STEP = 0.004  # seconds between two steps, beside what they take
CONNECTIONS = 16  # of those who ask for prices of requests
TALK = {"messages": [{"role": "user", "content": "once upon a time"}], "max_tokens": 200, "ignore_eos": True}
PROSE = {"prompt": "once upon a time", "max_tokens": 200, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "GET /health": ("/health", None),
    "completion": ("/v1/completions", PROSE),
    "completion, streamed": ("/v1/completions", {**PROSE, "stream": True}),
    "chat": ("/v1/chat/completions", TALK),
    "chat, streamed": ("/v1/chat/completions", {**TALK, "stream": True}),
}


class Fed(AsyncLLM):
    """Takes every request, and leaves its outputs to whoever feeds `fed`; with `at_once` it answers with one token."""

    fed: list[OutputStream]
    at_once = False

    async def submit_all(  # type: ignore[override]
        self, prompts: Sequence[tuple[str, Sequence[int]]], *_: Any, patient: bool = False, **__: Any
    ) -> list[OutputStream]:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.set_result(None)
        streams = [new_stream(id, accepted, patient) for id, _ in prompts]
        if self.at_once:
            asyncio.get_running_loop().call_soon(deliver, [(stream, output(stream.id, 0, True)) for stream in streams])
        else:
            self.fed += streams
        return streams

    def abort(self, request_id: str) -> None:
        """Nothing runs."""


def output(id: str, at: int, done: bool = False) -> BranchOutput:
    why = "length" if done else None
    return BranchOutput(id, 0, (at % 400,), WORDS[at % len(WORDS)], (), why, None, done, 0.0)


class Running:
    """A server in this thread's event loop, over a Fed."""

    def __init__(self) -> None:
        self.llm = Fed.of(echo_service.built())
        self.llm.fed = []
        self.listener = bind("127.0.0.1", 0)
        self.ready = asyncio.Event()
        self.server = WebServer(create_app(self.llm, ["echo"]), ServeOptions(), self.ready.set)

    async def __aenter__(self) -> Running:
        self.serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        await self.ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self.serving
        await asyncio.to_thread(self.llm.close)
        self.listener.close()

    def clients(self, *arguments: object) -> asyncio.Task[dict[str, Any]]:
        """What another process with this script's `arguments` says that it read."""
        port = self.listener.getsockname()[1]
        command = [sys.executable, __file__, "--read", str(port), *map(str, arguments)]
        return asyncio.create_task(asyncio.to_thread(lambda: json.loads(subprocess.check_output(command))))


async def price_of_tokens(route: str, body: dict[str, Any], streams: int, tokens: int) -> float:
    """Microseconds a token, of `streams` at once of so many tokens."""
    async with Running() as running:
        reading = running.clients(route, json.dumps({**body, "stream": True}), streams, 1)
        while len(running.llm.fed) < streams:
            await asyncio.sleep(0.05)
        batches = [[(stream, output(stream.id, at)) for stream in running.llm.fed] for at in range(len(WORDS))]
        deliver(batches[0])
        await asyncio.sleep(0.2)
        began = time.process_time()
        for at in range(tokens):
            deliver(batches[at % len(WORDS)])
            await asyncio.sleep(STEP)
        spent = time.process_time() - began
        deliver([(stream, output(stream.id, 0, True)) for stream in running.llm.fed])
        seen = await reading
        opening = 2 if "chat" in route else 1
        assert seen["events"] == streams * (tokens + opening + 2), "tokens were merged"
    return spent / tokens / streams * 1e6


async def price_of_requests(route: str, body: dict[str, Any] | None, requests: int) -> float:
    """Microseconds a request, over CONNECTIONS at once."""
    async with Running() as running:
        running.llm.at_once = True
        await running.clients(route, json.dumps(body), CONNECTIONS, 5)
        began = time.process_time()
        seen = await running.clients(route, json.dumps(body), CONNECTIONS, requests // CONNECTIONS)
        spent = time.process_time() - began
    return spent / seen["answers"] * 1e6


# The other process


def read(port: int, route: str, body: str, connections: int, each: int) -> dict[str, Any]:
    """Ask over so many connections, `each` times, and count the events and the answers that come."""
    method, data = ("GET", b"") if body == "null" else ("POST", body.encode())
    head = f"{method} {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    request = f"{head}Authorization: Bearer none\r\nAccept: */*\r\nUser-Agent: quire-price\r\n\r\n".encode() + data
    ready, answers = selectors.DefaultSelector(), []
    for _ in range(connections):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request)
        ready.register(client, selectors.EVENT_READ, Answer())
    left = dict.fromkeys((key.fd for key in ready.get_map().values()), each)
    while ready.get_map():
        for key, _ in ready.select():
            client: socket.socket = key.fileobj  # type: ignore[no-redef, assignment]
            piece = client.recv(1 << 16)
            assert piece, "the server closed a connection"
            if not key.data.ended(piece):
                continue
            answers.append(key.data.events)
            left[key.fd] -= 1
            ready.unregister(client)
            if left[key.fd]:
                client.sendall(request)
                ready.register(client, selectors.EVENT_READ, Answer())
            else:
                client.close()
    return {"events": sum(answers), "answers": len(answers)}


class Answer:
    """What came of one answer: no more than a head, the number of events, and whether it has ended."""

    def __init__(self) -> None:
        self.head, self.size, self.left, self.events = b"", 0, -1, 0

    def ended(self, piece: bytes) -> bool:
        """Whether it has, with this piece of it."""
        if self.left < 0:
            self.head += piece
            head, end, piece = self.head.partition(b"\r\n\r\n")
            if not end:
                return False
            assert b" 200 OK" in head, head
            found = re.search(rb"content-length: (\d+)", head)
            self.left = int(found[1]) if found else sys.maxsize
            self.head = b""
        self.left -= len(piece)
        self.events += piece.count(b"data: ")
        return self.left == 0 or piece.endswith(b"\r\n0\r\n\r\n") or (piece == b"0\r\n\r\n")


# The script

TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "token of a completion": ("/v1/completions", PROSE),
    "token of a chat": ("/v1/chat/completions", TALK),
}


def measure(name: str, streams: int, tokens: int, requests: int) -> float:
    """One price in this process, in microseconds."""
    freeze_loaded_objects()  # as a server does
    if name not in TOKENS:
        return asyncio.run(price_of_requests(*REQUESTS[name], requests))
    route, body = TOKENS[name]
    return asyncio.run(price_of_tokens(route, body, streams, tokens))


def measured(name: str, sources: dict[str, str], given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, *map(str, (given.streams, given.tokens, given.requests))]
    runs: dict[str, list[float]] = {which: [] for which in sources}
    for _ in range(given.repeat):
        for which, source in sources.items():
            found = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": source})
            runs[which].append(round(float(found), 2))
    told = {which: {"us": round(statistics.median(found), 2), "runs": found} for which, found in runs.items()}
    print(name, json.dumps(told), flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--against", help="the src folder of another checkout, measured in turn with this one")
    for name, value in {"streams": 200, "tokens": 200, "requests": 3200, "repeat": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sources = {"now": str(Path(quire.__file__).parents[1])}
    if given.against:
        sources = {"before": given.against, **sources}
    prices = {name: measured(name, sources, given) for name in (*TOKENS, *REQUESTS)}
    settings = {name: value for name, value in vars(given).items() if name not in ("out", "against")}
    told = {"what": "us of the server's processor time", "settings": settings, "machine": machine(), "prices": prices}
    Path(given.out).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        port, route, body, connections, each = sys.argv[2:]
        print(json.dumps(read(int(port), route, body, int(connections), int(each))))
    elif sys.argv[1] == "--measure":
        name, *numbers = sys.argv[2:]
        print(measure(name, *map(int, numbers)))
    else:
        main()
