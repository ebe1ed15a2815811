"""Waiting for outputs on behalf of a client that may leave: whole responses, and server-sent events.

A client that leaves cancels the wait, and with it the requests. A stream ends with exactly one [DONE]; one that fails
midway ends with an error event and no [DONE].
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.async_llm import AsyncLLM
from quire.control.outcomes import Output
from quire.server.direct import DIRECT, Direct
from quire.server.errors import failure
from quire.server.inbox import Inbox, Items, Writer
from quire.server.pieces import SHORT, Pieces
from quire.server.render import Choice, Renderer
from quire.server.size import Held, Size
from quire.text.prompts import Prompt
from quire.text.streams import Stream
from quire.vocabulary.params import SamplingParams

PART = 1 << 16  # characters sent at once
MANY = 256  # tokens of an output that are worth a turn of the event loop
DONE = b"data: [DONE]\n\n"
CLIENT_LEFT = 499
T = TypeVar("T")
Json = dict[str, Any]


def event(payload: Json) -> bytes:
    """One server-sent event. JSON is ASCII, so an event has no line breaks of its own."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


async def send_pieces(send: Send, pieces: Iterable[str], more: bool) -> None:
    """Send text as a body, or with `more` as a part of one: PART characters at once, at the client's pace."""
    part: list[str] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= PART:
            await send({"type": "http.response.body", "body": "".join(part).encode(), "more_body": True})
            part, size = [], 0
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": "".join(part).encode(), "more_body": more})


class Call:
    """The engine requests of one HTTP request, one a prompt: accepted all or none, and ended together. Until then its
    answer's `size` counts in `held`."""

    def __init__(self, llm: AsyncLLM, id: str, held: Held, size: Size) -> None:
        self.llm, self.id = llm, id
        self.streams: list[Stream] = []
        self._held, self._size, self._bytes = held, size, 0

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, salt: str, patient: bool, client: str
    ) -> None:
        """Queue all prompts of a client, or none."""
        self._held.add(self._size)
        named = [(f"{self.id}-{at}", prompt.ids) for at, prompt in enumerate(prompts)]
        pixels = [one for prompt in prompts for one in prompt.pixels]
        media = [prompt.media for prompt in prompts] if pixels else ()
        try:
            self.streams = await self.llm.submit_all(
                named, params, salt=salt, patient=patient, media=media, pixels=pixels, client=client
            )
        except BaseException:
            self._held.drop(self._size)
            raise

    def outputs(self, writer: Writer | None = None) -> Inbox:
        """(prompt index, Output) as they come, but what `writer` writes. A prompt whose reader is slow is merged, not
        queued."""
        return Inbox(self.streams, writer)

    async def whole(self) -> list[tuple[int, Output]]:
        """All of it: one Output for each prompt and branch, in order. For patient streams."""
        found: list[tuple[int, Output]] = []
        async for at, output in self.outputs():
            found.append((at, output))
            if len(output.tokens) > MANY:
                await asyncio.sleep(0)
        return sorted(found, key=lambda item: (item[0], item[1].branch))

    def weigh(self, bytes: int) -> None:
        """The answer was written and has so many bytes, which are held until it is sent. Overloaded if all that are
        held are too many."""
        self._held.weigh(bytes)
        self._bytes = bytes

    def close(self) -> None:
        """Abort what hasn't ended; nothing of the answer is held any more."""
        if self.streams:
            self._held.drop(self._size, self._bytes)
        for stream in self.streams:
            if not stream.done:
                self.llm.abort(stream.id)
        self.streams = []


async def _left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with `work` cancelled, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, gone)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(Response):
    """Sends the chunks of a call; ends the call when it is over, whoever ended it. With `usage` every chunk has one:
    null but for the last one's or, if it is `continuous`, what the choice has used so far."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, renderer: Renderer, headers: dict[str, str], usage: bool, continuous: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._call, self._renderer, self._usage, self._continuous = call, renderer, usage, usage and continuous
        self._head = f"data: {renderer.head(whole=False)}"
        self._writer: Writer | None = None
        renderer.pace.most = math.inf  # nothing of it is held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope.get("extensions", {}).get(DIRECT)
        if direct is not None and self._renderer.plain:
            self._writer = partial(self._write, direct)
        try:
            await unless_left(receive, self._send(send))
        finally:
            self._call.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        failed: BaseException | None = None
        try:
            async for pieces in self._chunks():
                await send_pieces(send, pieces, more=True)
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # also what libraries raise beside Exception
            failed = error
        await send({"type": "http.response.body", "body": self._last(failed), "more_body": False})

    def _last(self, error: BaseException | None) -> bytes:
        """The end of the stream, which may have failed."""
        return DONE if error is None else event(failure(error).body())

    async def _chunks(self) -> AsyncIterator[Pieces]:
        """The events of the stream that `_write` doesn't write, without [DONE]."""
        renderer = self._renderer
        tail = await renderer.tail(whole=False)
        for choice in await renderer.opening():
            yield self._chunk(choice, tail)
            tail = []
        async for at, output in self._call.outputs(self._writer):
            found = await renderer.choice(at, output, whole=False)
            if found is not None:
                yield self._chunk(found)
        if self._usage:
            yield [self._head, f'],"usage":{renderer.usage.total()}}}\n\n']

    def _write(self, direct: Direct, outputs: Items) -> bool:
        """Write the chunks of `outputs`, unless that must wait for the client or takes long."""
        if not direct.open or sum(len(output.text) for _, output in outputs) > SHORT:
            return False
        pieces: Pieces = []
        for at, output in outputs:
            found = self._renderer.brief(at, output)
            if found is not None:
                pieces += self._chunk(found)
        if pieces:
            direct.write("".join(pieces).encode())
        return True

    def _chunk(self, choice: Choice, tail: Sequence[str] = ()) -> Pieces:
        """The event of a choice. `tail`: what a chunk has beside its choices."""
        usage = ""
        if self._usage:
            so_far = self._renderer.usage.so_far(choice.at, choice.index) if self._continuous else "null"
            usage = f',"usage":{so_far}'
        return [self._head, *choice.pieces, "]", *tail, usage, "}\n\n"]


class WholeAnswer(Response):
    """A response whose JSON was written in pieces; ends its call, if it is the answer to one, once it is sent."""

    media_type = "application/json"

    def __init__(self, pieces: Pieces, headers: dict[str, str], call: Call | None = None) -> None:
        super().__init__(headers=headers)
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces, self._call = pieces, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_pieces(send, self._pieces, more=False)
        finally:
            if self._call is not None:
                self._call.close()


async def respond(call: Call, work: Coroutine[Any, Any, Pieces], headers: dict[str, str], receive: Receive) -> Response:
    """The response of a call, whose pieces are `work`'s; 499, which nobody reads, when the client left."""
    try:
        pieces = await unless_left(receive, work)
        if pieces is not None:
            call.weigh(sum(map(len, pieces)))
            return WholeAnswer(pieces, headers, call)
    except BaseException:
        call.close()
        raise
    call.close()
    return Response(status_code=CLIENT_LEFT)


async def whole(call: Call, renderer: Renderer) -> Pieces:
    """The answer of a call, when all of it is there."""
    pieces = [renderer.head(whole=True)]
    choices = 0
    for at, output in await call.whole():
        found = await renderer.choice(at, output, whole=True)
        if found is not None:
            pieces += ([","] if choices else []) + found.pieces
            choices += 1
    return [*pieces, "]", *await renderer.tail(whole=True), f',"usage":{renderer.usage.total()}}}']
