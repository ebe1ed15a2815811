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

WORD = {"id": "cmpl-0", "choices": [{"index": 0, "text": " word", "finish_reason": None}], "usage": None}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Paced:
    """`together` tokens come in each chunk. The first connection of each `drop` is closed after its first chunk; 0:
    none. Nothing is sent before so many requests as `crowd` were under way at once."""

    def __init__(self, first: float, gap: float, together: int = 1, drop: int = 0, crowd: int = 0) -> None:
        self.first, self.gap, self.together, self.drop, self.crowd = first, gap, together, drop, crowd
        self.requests = self.under_way = self.most = self.connections = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1]
                if path == b"/v1/models":
                    said = b'{"data": [{"id": "paced"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
                elif path == b"/v1/completions":
                    length = head.lower().partition(b"content-length:")[2].split()[0]
                    await self.complete(json.loads(await reader.readexactly(int(length))), writer)
                else:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def complete(self, asked: dict[str, object], writer: asyncio.StreamWriter) -> None:
        came = time.monotonic()
        self.requests += 1
        dropped = self.drop and self.requests % self.drop == 0
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        tokens, prompt = asked["max_tokens"], asked["prompt"]
        assert isinstance(tokens, int)
        assert isinstance(prompt, list)
        try:
            while self.most < self.crowd:
                await asyncio.sleep(0.01)
            for i in range(-(-tokens // self.together)):
                await asyncio.sleep(max(0.0, came + self.first + i * self.gap - time.monotonic()))
                writer.write((HEAD if i == 0 else b"") + chunk(WORD))
                if dropped:
                    raise ConnectionError
            usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
            writer.write(chunk({"choices": [], "usage": usage}) + chunk(None) + b"0\r\n\r\n")
        finally:
            self.under_way -= 1


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
