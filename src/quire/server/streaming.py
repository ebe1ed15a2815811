"""Wait for outputs for a client that may leave, and send them as whole responses or server-sent events.

If the client leaves, the wait and its engine requests are cancelled. A stream ends with one [DONE]; one that fails ends
with an error event and no [DONE].
"""

from __future__ import annotations

import asyncio
import json
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
MANY_TOKENS = 256  # tokens of an output, above which the event loop gets a turn
DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
T = TypeVar("T")
Json = dict[str, Any]


def sse_event(payload: Json) -> bytes:
    """Return a server-sent event. The JSON is ASCII, so it has no line breaks."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


async def send_pieces(send: Send, pieces: Iterable[str], more: bool) -> None:
    """Send text as a body, or with `more` as a part of one, PART_CHARS characters at once. Waits while the client reads
    slowly."""
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
    """The engine requests of one HTTP request, one per prompt. They are accepted together or not at all, and end
    together. The answer's `size` is reserved in `budget` from `submit` to `close`."""

    def __init__(self, llm: AsyncLLM, id: str, budget: AnswerBudget, size: AnswerSize) -> None:
        self.llm, self.id = llm, id
        self.streams: list[OutputStream] = []
        self._budget, self._size, self._bytes = budget, size, 0

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, salt: str, final_only: bool, client: str
    ) -> None:
        """Queue all prompts, or none."""
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
        """Return an async iterator of (prompt index, output). `writer` may write outputs itself, which are then left
        out. The outputs of a prompt are merged while the reader is slow."""
        return OutputQueue(self.streams, writer)

    async def collect(self) -> list[tuple[int, BranchOutput]]:
        """Return all outputs, one per prompt and branch, in order. For final-only streams."""
        outputs: list[tuple[int, BranchOutput]] = []
        async for at, output in self.outputs():
            outputs.append((at, output))
            if len(output.tokens) > MANY_TOKENS:
                await asyncio.sleep(0)
        return sorted(outputs, key=lambda item: (item[0], item[1].branch))

    def hold_bytes(self, bytes: int) -> None:
        """Count the bytes of the written answer until it is sent. Raise Overloaded if the limit of all answers is
        exceeded."""
        self._budget.add_bytes(bytes)
        self._bytes = bytes

    def close(self) -> None:
        """Abort requests that have not ended, and release the answer's size."""
        if self.streams:
            self._budget.release(self._size, self._bytes)
        for stream in self.streams:
            if not stream.done:
                self.llm.abort(stream.id)
        self.streams = []


async def _wait_disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client leaves first, cancel it and return None."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, disconnect)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(Response):
    """A response that streams the chunks of a call, and closes the call at its end. With `usage` every chunk has a
    usage: null except in the last one, or with `continuous` that of the choice so far."""

    media_type = "text/event-stream"

    def __init__(
        self, call: EngineCall, renderer: Renderer, headers: dict[str, str], usage: bool, continuous: bool
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._call, self._renderer, self._usage, self._continuous = call, renderer, usage, usage and continuous
        self._head = f"data: {renderer.head(whole=False)}"
        self._try_writer: TryWrite | None = None

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
        except BaseException as error:  # Rust's panics are not Exceptions
            failed = error
        await send({"type": "http.response.body", "body": self._final_event(failed), "more_body": False})

    def _final_event(self, error: BaseException | None) -> bytes:
        """Return the last event of the stream: [DONE], or the error."""
        return DONE if error is None else sse_event(to_failure(error).body())

    async def _chunks(self) -> AsyncIterator[JsonPieces]:
        """Yield the events of the stream that `_try_write` does not write, without [DONE]."""
        renderer = self._renderer
        tail = await renderer.extra_members(whole=False)
        for opening in await renderer.opening_choices():
            yield self._chunk(opening, tail)
            tail = []
        async for at, output in self._call.outputs(self._try_writer):
            choice = await renderer.choice(at, output, whole=False)
            if choice is not None:
                yield self._chunk(choice)
        if self._usage:
            yield [self._head, f'],"usage":{renderer.usage.total_json()}}}\n\n']

    def _try_write(self, direct: DirectWriter, outputs: IndexedOutputs) -> bool:
        """Write the chunks of `outputs`. Return False if that would have to wait for the client, or would take long."""
        if not direct.is_open or sum(len(output.text) for _, output in outputs) > SHORT_CHARS:
            return False
        pieces: JsonPieces = []
        for at, output in outputs:
            choice = self._renderer.choice_nowait(at, output)
            if choice is not None:
                pieces += self._chunk(choice)
        if pieces:
            direct.write("".join(pieces).encode())
        return True

    def _chunk(self, choice: ChoicePieces, tail: Sequence[str] = ()) -> JsonPieces:
        """Return the event of a choice. `tail` is JSON that follows the choices."""
        usage = ""
        if self._usage:
            so_far = self._renderer.usage.choice_json(choice.at, choice.index) if self._continuous else "null"
            usage = f',"usage":{so_far}'
        return [self._head, *choice.pieces, "]", *tail, usage, "}\n\n"]


class JsonPiecesResponse(Response):
    """A response of JSON in pieces. If it answers a `call`, the call is closed after it is sent."""

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
    """Return the response of a call, with the JSON that `work` returns. If the client leaves, return a 499, which is
    not sent."""
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
    """Return the whole answer of a call, once it is complete."""
    pieces = [renderer.head(whole=True)]
    choices = 0
    for at, output in await call.collect():
        choice = await renderer.choice(at, output, whole=True)
        if choice is not None:
            pieces += ([","] if choices else []) + choice.pieces
            choices += 1
    return [*pieces, "]", *await renderer.extra_members(whole=True), f',"usage":{renderer.usage.total_json()}}}']
