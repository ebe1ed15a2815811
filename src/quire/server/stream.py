"""Waiting for outputs on behalf of a client that may leave: whole responses, and server-sent events.

A client that leaves cancels the wait, and with it the requests. A stream ends with exactly one [DONE]; one that fails
midway ends with an error event and no [DONE].
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.async_llm import AsyncLLM
from quire.control.outcomes import Output
from quire.server.errors import failure
from quire.server.render import Json, Renderer, envelope
from quire.text.prompts import Prompt
from quire.text.streams import Delta, Stream
from quire.vocabulary.params import SamplingParams

DONE = b"data: [DONE]\n\n"
CLIENT_LEFT = 499
T = TypeVar("T")


def event(payload: Json) -> bytes:
    """One server-sent event. JSON is ASCII, so an event has no line breaks of its own."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


class Call:
    """The engine requests of one HTTP request, one a prompt: accepted all or none, and ended together."""

    def __init__(self, llm: AsyncLLM, id: str) -> None:
        self.llm, self.id = llm, id
        self.streams: list[Stream] = []

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams, *, salt: str, patient: bool) -> None:
        """Queue all prompts, or none."""
        named = [(f"{self.id}-{at}", prompt.ids) for at, prompt in enumerate(prompts)]
        self.streams = await self.llm.submit_all(named, params, salt=salt, patient=patient)

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(prompt index, Output) as they come. A prompt whose reader is slow is merged, not queued."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                yield 0, output
            return
        queue: asyncio.Queue[tuple[int, Output | Exception | None]] = asyncio.Queue(maxsize=1)
        tasks = [asyncio.create_task(_pump(at, stream, queue)) for at, stream in enumerate(self.streams)]
        try:
            left = len(tasks)
            while left:
                at, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield at, item
        finally:
            for task in tasks:
                task.cancel()

    async def whole(self) -> list[tuple[int, Output]]:
        """All of it: one merged Output for each prompt and branch, in order."""
        deltas: dict[tuple[int, int], Delta] = {}
        async for at, output in self.outputs():
            deltas.setdefault((at, output.branch), Delta()).add(output)
        return [(at, deltas[at, branch].output()) for at, branch in sorted(deltas)]

    def close(self) -> None:
        """Abort what hasn't ended."""
        for stream in self.streams:
            if not stream.done:
                self.llm.abort(stream.id)


async def _pump(at: int, stream: Stream, queue: asyncio.Queue[Any]) -> None:
    try:
        async for output in stream:
            await queue.put((at, output))
        await queue.put((at, None))
    except Exception as error:
        await queue.put((at, error))


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


async def chunks(call: Call, renderer: Renderer, include_usage: bool) -> AsyncIterator[Json]:
    """The payloads of a stream, without [DONE]. With `include_usage` all have a usage, null but for the last one's."""
    usage: Json = {"usage": None} if include_usage else {}
    for choice in renderer.opening():
        yield {**envelope(renderer, [choice], whole=False), **usage}
    async for at, output in call.outputs():
        choice_or_none = renderer.choice(at, output, whole=False)
        if choice_or_none is not None:
            yield {**envelope(renderer, [choice_or_none], whole=False), **usage}
    if include_usage:
        yield {**envelope(renderer, [], whole=False), "usage": renderer.usage.json()}


class EventStream(Response):
    """Sends the chunks of a call; ends the call when it is over, whoever ended it."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, renderer: Renderer, include_usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call, self._chunks = call, chunks(call, renderer, include_usage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._send(send))
        finally:
            self._call.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = DONE
        try:
            async for payload in self._chunks:
                await send({"type": "http.response.body", "body": event(payload), "more_body": True})
        except Exception as error:
            last = event(failure(error).body())
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def respond(call: Call, renderer: Renderer, receive: Receive) -> Response:
    """The whole response of a call; 499, which nobody reads, when the client left."""
    try:
        found = await unless_left(receive, call.whole())
    finally:
        call.close()
    if found is None:
        return Response(status_code=CLIENT_LEFT)
    choices = [renderer.choice(at, output, whole=True) for at, output in found]
    body = {**envelope(renderer, [choice for choice in choices if choice], whole=True), "usage": renderer.usage.json()}
    return Response(json.dumps(body, separators=(",", ":")), media_type="application/json")
