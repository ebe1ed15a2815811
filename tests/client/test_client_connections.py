"""Connections that servers close, break or leave silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from waiting import wait_until_async

from quire.client.connection_pool import SILENCE_SECONDS, Address, ConnectionPool
from quire.client.response_parser import ResponseRecord

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
EVENTS = b'data: {"choices":[1],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(EVENTS), EVENTS)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def asked(serve: Serve, use: Callable[[ConnectionPool], Awaitable[None]]) -> None:
    """Run `use` with connections to a server that treats each of its own as `serve` says."""

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        connections = ConnectionPool(Address("127.0.0.1", server.sockets[0].getsockname()[1], None))
        try:
            await use(connections)
        finally:
            connections.close()
            server.close()

    asyncio.run(main())


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    opened = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        if len(opened) == 1:  # it reads the next request too, and says nothing
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def use(connections: ConnectionPool) -> None:
        for number in range(3):
            answer = ResponseRecord(number, None)
            await connections.request(REQUEST, answer)
            assert (answer.error, answer.completion_tokens, len(answer.chunk_times)) == (None, 1, 1)
            if number == 1:
                await wait_until_async(lambda: not any(one.is_usable for one in connections._idle), "it is closed")
        assert len(opened) == 3
        assert not connections.in_use

    asked(serve, use)


def test_a_silent_server_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def use(connections: ConnectionPool) -> None:
        answer = ResponseRecord(0, None)
        asking = asyncio.create_task(connections.request(REQUEST, answer))
        await wait_until_async(lambda: connections.in_use, "the request is sent")
        connections.abort_silent(time.monotonic() + SILENCE_SECONDS - 5)
        assert connections.in_use
        connections.abort_silent(time.monotonic() + SILENCE_SECONDS + 1)
        await asking
        assert answer.error == f"nothing came for {SILENCE_SECONDS:g} s"

    asked(serve, use)


def test_bytes_after_an_answer_end_the_connection() -> None:
    opened, answered = [], asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        await answered.wait()
        writer.write(b"more")
        await reader.read()
        writer.close()

    async def use(connections: ConnectionPool) -> None:
        for number in range(2):
            answer = ResponseRecord(number, None)
            await connections.request(REQUEST, answer)
            assert answer.error is None
            answered.set()
            await wait_until_async(lambda: not any(one.is_usable for one in connections._idle), "it is closed")
            answered.clear()
        assert len(opened) == 2

    asked(serve, use)
