"""Wait for outputs for a client that may leave, and send them as whole responses or server-sent events.

If the client leaves, the wait and its engine requests are cancelled. A stream ends with one [DONE]; one that fails ends
with an error event and no [DONE].
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.async_llm import AsyncLLM
from quire.protocol.sampling_params import SamplingParams
from quire.server.answer_size import AnswerBudget, AnswerSize
from quire.server.direct_writer import DIRECT_EXTENSION, DirectWriter
from quire.server.json_pieces import JsonPieces
from quire.server.output_queue import IndexedOutputs, OutputQueue, TryWrite
from quire.server.render import Renderer
from quire.text.input_processor import Prompt
from quire.text.output_stream import OutputStream, RequestTrace

PART_CHARS = 1 << 16  # characters sent at once
CLIENT_CLOSED_REQUEST = 499
EVENT_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
T = TypeVar("T")


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
        self, prompts: Sequence[Prompt], params: SamplingParams, *, salt: str, final_only: bool, client: str,
        trace: RequestTrace | None,
    ) -> None:  # fmt: skip
        """Queue all prompts, or none."""
        self._budget.reserve(self._size)
        named = [(f"{self.id}-{at}", prompt.ids) for at, prompt in enumerate(prompts)]
        pixels = [one for prompt in prompts for one in prompt.pixels]
        media = [prompt.images for prompt in prompts] if pixels else ()
        try:
            self.streams = await self.llm.submit_all(
                named, params, salt=salt, patient=final_only, media=media, pixels=pixels, client=client,
                trace=trace,
            )  # fmt: skip
        except BaseException:
            self._budget.release(self._size)
            raise

    def outputs(self, writer: TryWrite | None = None) -> OutputQueue:
        """Return an async iterator of (prompt index, output). `writer` may write outputs itself, which are then left
        out. The outputs of a prompt are merged while the reader is slow."""
        return OutputQueue(self.streams, writer)

    def hold_bytes(self, bytes: int) -> None:
        """Count bytes of the written answer until the call is closed. Raise Overloaded if the limit of all answers is
        exceeded."""
        self._budget.add_bytes(bytes)
        self._bytes += bytes

    def close(self) -> None:
        """Abort requests that have not ended, and release the answer's size."""
        if self.streams:
            self._budget.release(self._size, self._bytes)
        for stream in self.streams:
            if not stream.done:
                self.llm.abort(stream.id)
        self.streams = []


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client leaves first, cancel it and return None."""

    async def wait_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnect())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for unfinished in (one for one in (task, disconnect) if not one.done()):
            unfinished.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await unfinished


class EventStream(Response):
    """A response that streams the events of a call, and closes the call at its end."""

    media_type = "text/event-stream"

    def __init__(self, call: EngineCall, renderer: Renderer, headers: dict[str, str]) -> None:
        super().__init__(headers=EVENT_STREAM_HEADERS | headers)
        del self.headers["content-length"]
        self._call, self._renderer = call, renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope.get("extensions", {}).get(DIRECT_EXTENSION)
        writer = partial(self._try_write, direct) if direct is not None and self._renderer.is_text_only else None
        try:
            await cancel_on_disconnect(receive, self.send_events(send, writer))
        finally:
            self._call.close()

    async def send_events(self, send: Send, writer: TryWrite | None = None) -> None:
        """Send the response. `writer` may write outputs itself."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        failed: BaseException | None = None
        try:
            for pieces in await self._renderer.opening_events():
                await send_pieces(send, pieces, more=True)
            async for at, output in self._call.outputs(writer):  # without those that `writer` writes
                choice = await self._renderer.choice(at, output, whole=False)
                if choice is not None:
                    await send_pieces(send, self._renderer.event(choice), more=True)
            if pieces := self._renderer.closing_events():
                await send_pieces(send, pieces, more=True)
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # Rust's panics are not Exceptions
            failed = error
        await send({"type": "http.response.body", "body": self._renderer.final_event(failed), "more_body": False})

    def _try_write(self, direct: DirectWriter, outputs: IndexedOutputs) -> bool:
        """Write the events of `outputs`. Return False if that would have to wait for the client, or would take long."""
        if not direct.is_open or not self._renderer.can_write_now(outputs):
            return False
        pieces: JsonPieces = []
        for at, output in outputs:
            choice = self._renderer.choice_nowait(at, output)
            if choice is not None:
                pieces += self._renderer.event(choice)
        if pieces:
            direct.write("".join(pieces).encode())
        return True


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
