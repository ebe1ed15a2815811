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
from quire.core.outputs import BranchOutput
from quire.protocol.sampling_params import SamplingParams
from quire.server.answer_size import AnswerBudget, AnswerSize
from quire.server.direct_writer import DIRECT_EXTENSION, DirectWriter
from quire.server.errors import to_failure
from quire.server.json_pieces import SHORT_CHARS, JsonPieces
from quire.server.output_queue import IndexedOutputs, OutputQueue, TryWrite
from quire.server.render import ChoicePieces, Renderer
from quire.text.input_processor import Prompt
from quire.text.output_stream import OutputStream

PART_CHARS = 1 << 16  # characters sent at once
MANY_TOKENS = 256  # tokens of an output that are worth a turn of the event loop
DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
T = TypeVar("T")
Json = dict[str, Any]


def sse_event(payload: Json) -> bytes:
    """One server-sent event. JSON is ASCII, so an event has no line breaks of its own."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


async def send_pieces(send: Send, pieces: Iterable[str], more: bool) -> None:
    """Send text as a body, or with `more` as a part of one: PART characters at once, at the client's pace."""
    part: list[str] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= PART_CHARS:
            await send({"type": "http.response.body", "body": "".join(part).encode(), "more_body": True})
            part, size = [], 0
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": "".join(part).encode(), "more_body": more})


class EngineCall:
    """The engine requests of one HTTP request, one a prompt: accepted all or none, and ended together. Until then its
    answer's `size` counts in `budget`."""

    def __init__(self, llm: AsyncLLM, id: str, budget: AnswerBudget, size: AnswerSize) -> None:
        self.llm, self.id = llm, id
        self.streams: list[OutputStream] = []
        self._budget, self._size, self._bytes = budget, size, 0

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, salt: str, final_only: bool, client: str
    ) -> None:
        """Queue all prompts of a client, or none."""
        self._budget.reserve(self._size)
        named = [(f"{self.id}-{at}", prompt.ids) for at, prompt in enumerate(prompts)]
        pixels = [one for prompt in prompts for one in prompt.pixels]
        media = [prompt.images for prompt in prompts] if pixels else ()
        try:
            self.streams = await self.llm.submit_all(
                named, params, salt=salt, patient=final_only, media=media, pixels=pixels, client=client
            )
        except BaseException:
            self._budget.release(self._size)
            raise

    def outputs(self, writer: TryWrite | None = None) -> OutputQueue:
        """(prompt index, Output) as they come, but what `writer` writes. A prompt whose reader is slow is merged, not
        queued."""
        return OutputQueue(self.streams, writer)

    async def collect(self) -> list[tuple[int, BranchOutput]]:
        """All of it: one Output for each prompt and branch, in order. For patient streams."""
        found: list[tuple[int, BranchOutput]] = []
        async for at, output in self.outputs():
            found.append((at, output))
            if len(output.tokens) > MANY_TOKENS:
                await asyncio.sleep(0)
        return sorted(found, key=lambda item: (item[0], item[1].branch))

    def hold_bytes(self, bytes: int) -> None:
        """The answer was written and has so many bytes, which are held until it is sent. Overloaded if all that are
        held are too many."""
        self._budget.add_bytes(bytes)
        self._bytes = bytes

    def close(self) -> None:
        """Abort what hasn't ended; nothing of the answer is held any more."""
        if self.streams:
            self._budget.release(self._size, self._bytes)
        for stream in self.streams:
            if not stream.done:
                self.llm.abort(stream.id)
        self.streams = []


async def _wait_disconnect(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with `work` cancelled, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_disconnect(receive))
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

    def __init__(
        self, call: EngineCall, renderer: Renderer, headers: dict[str, str], usage: bool, continuous: bool
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._call, self._renderer, self._usage, self._continuous = call, renderer, usage, usage and continuous
        self._head = f"data: {renderer.head(whole=False)}"
        self._try_writer: TryWrite | None = None
        renderer.pace.max_bytes = math.inf  # nothing of it is held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope.get("extensions", {}).get(DIRECT_EXTENSION)
        if direct is not None and self._renderer.is_text_only:
            self._try_writer = partial(self._try_write, direct)
        try:
            await cancel_on_disconnect(receive, self._send(send))
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
        await send({"type": "http.response.body", "body": self._final_event(failed), "more_body": False})

    def _final_event(self, error: BaseException | None) -> bytes:
        """The end of the stream, which may have failed."""
        return DONE if error is None else sse_event(to_failure(error).body())

    async def _chunks(self) -> AsyncIterator[JsonPieces]:
        """The events of the stream that `_try_write` doesn't write, without [DONE]."""
        renderer = self._renderer
        tail = await renderer.extra_members(whole=False)
        for choice in await renderer.opening_choices():
            yield self._chunk(choice, tail)
            tail = []
        async for at, output in self._call.outputs(self._try_writer):
            found = await renderer.choice(at, output, whole=False)
            if found is not None:
                yield self._chunk(found)
        if self._usage:
            yield [self._head, f'],"usage":{renderer.usage.total_json()}}}\n\n']

    def _try_write(self, direct: DirectWriter, outputs: IndexedOutputs) -> bool:
        """Write the chunks of `outputs`, unless that must wait for the client or takes long."""
        if not direct.is_open or sum(len(output.text) for _, output in outputs) > SHORT_CHARS:
            return False
        pieces: JsonPieces = []
        for at, output in outputs:
            found = self._renderer.choice_nowait(at, output)
            if found is not None:
                pieces += self._chunk(found)
        if pieces:
            direct.write("".join(pieces).encode())
        return True

    def _chunk(self, choice: ChoicePieces, tail: Sequence[str] = ()) -> JsonPieces:
        """The event of a choice. `tail`: what a chunk has beside its choices."""
        usage = ""
        if self._usage:
            so_far = self._renderer.usage.choice_json(choice.at, choice.index) if self._continuous else "null"
            usage = f',"usage":{so_far}'
        return [self._head, *choice.pieces, "]", *tail, usage, "}\n\n"]


class JsonPiecesResponse(Response):
    """A response whose JSON was written in pieces; ends its call, if it is the answer to one, once it is sent."""

    media_type = "application/json"

    def __init__(self, pieces: JsonPieces, headers: dict[str, str], call: EngineCall | None = None) -> None:
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


async def respond(
    call: EngineCall, work: Coroutine[Any, Any, JsonPieces], headers: dict[str, str], receive: Receive
) -> Response:
    """The response of a call, whose pieces are `work`'s; 499, which nobody reads, when the client left."""
    try:
        pieces = await cancel_on_disconnect(receive, work)
        if pieces is not None:
            call.hold_bytes(sum(map(len, pieces)))
            return JsonPiecesResponse(pieces, headers, call)
    except BaseException:
        call.close()
        raise
    call.close()
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def render_whole(call: EngineCall, renderer: Renderer) -> JsonPieces:
    """The answer of a call, when all of it is there."""
    pieces = [renderer.head(whole=True)]
    choices = 0
    for at, output in await call.collect():
        found = await renderer.choice(at, output, whole=True)
        if found is not None:
            pieces += ([","] if choices else []) + found.pieces
            choices += 1
    return [*pieces, "]", *await renderer.extra_members(whole=True), f',"usage":{renderer.usage.total_json()}}}']
