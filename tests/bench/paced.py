"""A server that sends tokens at a known pace: the first one `first` seconds after a request came, the next ones `gap`
seconds apart, whatever else happens."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WORD = {"id": "cmpl-0", "choices": [{"index": 0, "text": " word", "finish_reason": None}], "usage": None}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Paced:
    """`together` tokens come in each chunk. The first connection of each `drop` is closed after its first chunk; 0:
    none. Nothing is sent before so many requests as `crowd` were under way at once. One of `every` is refused.
    Where there are `metrics` nothing is sent before they were looked at once more."""

    def __init__(
        self, first: float = 0.0, gap: float = 0.0, together: int = 1, drop: int = 0, crowd: int = 0, every: int = 0,
        metrics: bytes = b"",
    ) -> None:  # fmt: skip
        self.first, self.gap, self.together, self.drop, self.crowd = first, gap, together, drop, crowd
        self.every, self.metrics, self.looks = every, metrics, 0
        self.requests = self.under_way = self.most = self.connections = 0
        self.asked: list[dict[str, Any]] = []
        self.keys = set[bytes]()  # of the requests of all paths; empty: none

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1]
                self.keys.add(head.partition(b"Authorization: ")[2].partition(b"\r\n")[0])
                if path == b"/v1/models":
                    writer.write(answer(b"200 OK", b'{"data": [{"id": "paced"}]}'))
                elif path in (b"/v1/completions", b"/v1/chat/completions"):
                    length = head.lower().partition(b"content-length:")[2].split()[0]
                    self.asked.append(json.loads(await reader.readexactly(int(length))) | {"path": path.decode()})
                    await self.complete(self.asked[-1], writer)
                elif path == b"/metrics" and self.metrics:
                    self.looks += 1
                    writer.write(answer(b"200 OK", self.metrics))
                else:
                    writer.write(answer(b"404 Not Found"))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        came, looks = time.monotonic(), self.looks
        self.requests += 1
        if self.every and self.requests % self.every == 0:
            writer.write(answer(b"503 Service Unavailable", b'{"error": {"message": "the queue is full"}}'))
            return
        dropped = self.drop and self.requests % self.drop == 0
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        tokens, prompt = asked["max_tokens"], asked.get("prompt")
        try:
            while self.most < self.crowd or (self.metrics and self.looks == looks):
                await asyncio.sleep(0.01)
            for i in range(-(-tokens // self.together)):
                await asyncio.sleep(max(0.0, came + self.first + i * self.gap - time.monotonic()))
                writer.write((HEAD if i == 0 else b"") + chunk(WORD))
                if dropped:
                    raise ConnectionError
            read = len(prompt) if isinstance(prompt, list) else 7  # tokens
            usage = {"prompt_tokens": read, "completion_tokens": tokens}
            writer.write(chunk({"choices": [], "usage": usage}) + chunk(None) + b"0\r\n\r\n")
        finally:
            self.under_way -= 1


def answer(status: bytes, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def chunk(said: object) -> bytes:
    event = b"data: %s\n\n" % (b"[DONE]" if said is None else json.dumps(said).encode())
    return b"%x\r\n%s\r\n" % (len(event), event)


@contextmanager
def serving(paced: Paced, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Its URL, while it serves in a thread of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports = list[int]()

    async def serve() -> None:
        server = await asyncio.start_server(paced.connected, "127.0.0.1", 0, backlog=1024, ssl=tls)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        async with server:
            await stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http{'s' if tls else ''}://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
