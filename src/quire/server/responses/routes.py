"""/v1/responses: OpenAI's newer form of a chat, answered as a chat request; stored responses; and responses in the
background. Both are in memory, limited in number and size. The oldest stored response is dropped first."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from quire.errors import InputError, Overloaded, PromptTooLong
from quire.server.adapter import Conversation
from quire.server.errors import UnknownResponse
from quire.server.generation import Generation
from quire.server.guards import request_keys
from quire.server.json_pieces import dump_pieces
from quire.server.responses.input import (
    NAMES,
    ResponseRequest,
    droppable_items,
    input_items,
    items_to_conversation,
    to_chat_request,
)
from quire.server.responses.render import ResponseRenderer, new_id, replay
from quire.server.service import Service
from quire.server.streaming import EVENT_STREAM_HEADERS, EngineCall, EventStream
from quire.text.chat_messages import MAX_MESSAGES

Json = dict[str, Any]
MAX_STORED_BYTES = 256 << 20  # of all stored responses and their conversations
MAX_CONVERSATION = 16 << 20  # bytes of the conversation before a stored response
MAX_LISTED = 100  # items of a response in one answer
EVENTS_AT_ONCE = 256  # events of a log that are sent together


class StoredResponse(NamedTuple):
    """A response, as JSON. `input` has the items that it answers, also those of the responses before it; `output` has
    the items of its output by id. `events` are those of a stream in the background, else none."""

    owner: bytes
    response: bytes
    input: bytes
    output: dict[str, bytes]
    is_background: bool
    events: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return len(self.response) + len(self.input) + sum(map(len, (*self.output.values(), *self.events)))

    @property
    def items(self) -> bytes:
        """Return all items of the conversation as JSON. The list in `input` is not empty."""
        return b",".join([self.input[:-1], *self.output.values()]) + b"]"


def owner_of(http: Request) -> bytes:
    """Return the owner of a request's responses: a digest of its keys, or of its Authorization header if it has no
    keys."""
    other = http.headers.get("authorization", "").encode("latin-1")
    return sha256(b"\0".join(request_keys(http.scope) or [other])).digest()


class ResponseStore:
    """At most `capacity` responses, of MAX_STORED_BYTES together. With capacity 0 nothing is stored. A response is only
    found by its owner."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity, self.bytes = capacity, 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._ids_by_item: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, id: str) -> bool:
        return id in self._responses

    def dump_items(self, items: list[Json]) -> bytes:
        """Return the items of a conversation as JSON, to be stored. Raise InputError if they are too large."""
        data = json.dumps(items, separators=(",", ":")).encode()
        if len(data) > MAX_CONVERSATION:
            raise InputError(
                f"the conversation has {len(data)} bytes, and one that is stored may have {MAX_CONVERSATION}: "
                "set store to false",
                "store",
            )
        return data

    def put(self, owner: bytes, previous_items: bytes, response: Json) -> None:
        """Store a response of `owner`. `previous_items` is the JSON of the items that it answers, a list that is not
        empty."""
        # `default` drops log-probabilities (RawJsonList): a later request does not read them
        output = {
            str(item.get("id")): json.dumps(item, separators=(",", ":"), default=lambda _: []).encode()
            for item in response["output"]
        }
        if response["id"] in self._responses:
            self._drop(response["id"])
        data, is_background = "".join(dump_pieces(response)).encode(), bool(response.get("background"))
        stored = StoredResponse(owner, data, previous_items, output, is_background)
        self._responses[response["id"]] = stored
        for item in output:
            self._ids_by_item[item] = response["id"]
        self.bytes += stored.size
        self._limit()

    def put_events(self, id: str, events: Sequence[bytes]) -> None:
        """Store the events of a response, unless it was dropped."""
        if id in self._responses:
            self._responses[id] = self._responses[id]._replace(events=events)
            self.bytes += sum(map(len, events))
            self._limit()

    def _limit(self) -> None:
        """Drop the oldest responses beyond the limits."""
        while len(self._responses) > self.capacity or self.bytes > MAX_STORED_BYTES:
            self._drop(next(iter(self._responses)))

    def _drop(self, id: str) -> None:
        dropped = self._responses.pop(id)
        self.bytes -= dropped.size
        for item in dropped.output:
            self._ids_by_item.pop(item, None)

    def resolve_reference(self, item: Json, owner: bytes) -> Json:
        """Return the output item of a stored response of `owner` that `item`, an item_reference, names. Return any
        other `item` unchanged."""
        id = item.get("id")
        if item.get("type") != "item_reference" or not isinstance(id, str) or id not in self._ids_by_item:
            return item
        stored = self._responses[self._ids_by_item[id]]
        referenced: Json = json.loads(stored.output[id]) if stored.owner == owner else item
        return referenced

    def get(self, id: str, owner: bytes) -> StoredResponse:
        """Return a response of `owner`. Raise UnknownResponse if there is none."""
        if not self.capacity:
            raise UnknownResponse("this server stores no responses: start it with --store-responses")
        stored = self._responses.get(id)
        if stored is None or stored.owner != owner:
            raise UnknownResponse(f"there is no response {id[:80]!r}; it may be one of those dropped for newer ones")
        return stored

    def drop(self, id: str, owner: bytes) -> None:
        """Delete a response of `owner`. Raise UnknownResponse if there is none."""
        self.get(id, owner)
        self._drop(id)


class EventLog:
    """The events of a stream in the background, by sequence number. They are held until the stream ends, so that
    several clients can follow it. `hold_bytes` counts them, and may raise Overloaded."""

    def __init__(self, hold_bytes: Callable[[int], None]) -> None:
        self.events: list[bytes] = []
        self._hold_bytes, self._rest = hold_bytes, b""
        self._has_ended, self._changed = False, asyncio.Event()

    async def send(self, message: Message) -> None:
        """Add a part of the stream, an ASGI message. The part may end within an event."""
        part = message.get("body", b"")
        if message.get("more_body"):  # the last event, which may be about this error, is always added
            self._hold_bytes(len(part))
        *events, self._rest = (self._rest + part).split(b"\n\n")
        self.events += [event + b"\n\n" for event in events]
        self._wake()

    def end(self) -> None:
        """End the streams of all clients that follow."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from number `start` on, until the stream ends."""
        while True:
            changed, events = self._changed, self.events[start : start + EVENTS_AT_ONCE]
            if events:
                start += len(events)
                yield b"".join(events)
            elif self._has_ended:
                return
            else:
                await changed.wait()


class BackgroundRun(NamedTuple):
    """A response that is generated in the background. `items` is the JSON of the items that it answers. `log` has the
    events of one that is streamed."""

    owner: bytes
    items: bytes
    call: EngineCall
    renderer: ResponseRenderer
    task: asyncio.Task[None]
    log: EventLog | None

    def to_json(self) -> str:
        """Return the response so far as JSON."""
        is_queued = any(stream.record.scheduled_time is None for stream in self.call.streams)
        return "".join(dump_pieces(self.renderer.response("queued" if is_queued else "in_progress")))


class ResponseRoutes:
    """The routes of /v1/responses. At most `capacity` responses are stored, and as many are in the background."""

    def __init__(self, service: Service, capacity: int = 0) -> None:
        self.service, self.store = service, ResponseStore(capacity)
        self._runs: dict[str, BackgroundRun] = {}

    async def create(self, body: ResponseRequest, http: Request) -> Response:
        """Answer a list of items with items."""
        owner, store, items = owner_of(http), None, b""
        stores = self.store.capacity > 0 and body.store is not False
        if body.background and not stores:
            how = "start the server with --store-responses, and leave out store"
            raise InputError(f"background needs a response that is stored: {how}", "background")
        previous, given = self._previous_items(body, owner), self._given_items(body, owner)
        generation, conversation = await self._resolve(body, previous, given)
        if stores:
            items = self.store.dump_items(with_ids([*previous, *given]))
            store = partial(self.store.put, owner, items)
        with NAMES.rename_errors(conversation):
            new_renderer = partial(ResponseRenderer, body=body, store=store)
            if not body.background:
                return await self.service.answer(generation, new_renderer, http)
            call, renderer, headers = await self.service.start(generation, new_renderer, http)
        held = len(items) + sum(len(run.items) for run in self._runs.values())
        if len(self._runs) >= self.store.capacity or held > MAX_STORED_BYTES:
            call.close()
            limit = f"{self.store.capacity} (--store-responses), with {MAX_STORED_BYTES} bytes of items"
            raise Overloaded(f"{len(self._runs)} responses are in the background; the limit is {limit}")
        log = EventLog(call.hold_bytes) if body.stream else None
        task = asyncio.create_task(self._run(call, renderer, log))
        run = self._runs[renderer.id] = BackgroundRun(owner, items, call, renderer, task, log)
        if log is not None:
            return event_stream(log.follow(0), headers)
        return Response(run.to_json(), headers=headers, media_type="application/json")

    async def count(self, body: ResponseRequest, http: Request) -> Response:
        """Return the number of tokens of a request's prompt."""
        owner = owner_of(http)
        previous, given = self._previous_items(body, owner), self._given_items(body, owner)
        generation, _ = await self._resolve(body, previous, given, min_output=None)
        headers = self.service.resolver.warning_headers(generation.request, generation.prompts, generation.warnings)
        tokens = len(generation.prompts[0].ids)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens}, headers=headers)

    async def get(
        self, name: str, http: Request, stream: bool = False, starting_after: Annotated[int, Query(ge=-1)] = -1
    ) -> Response:
        """Return a stored response, or one in the background. With `stream`, return its events, without those up to
        number `starting_after`."""
        owner = owner_of(http)
        run = self._find_run(name, owner)
        data = self.store.get(name, owner).response if run is None else run.to_json()
        if not stream:
            return Response(data, media_type="application/json")
        run = self._runs.get(name)  # it may be stored before its last events
        if run is not None and run.log is not None:
            return event_stream(run.log.follow(starting_after + 1), {})
        if name not in self.store:
            how = "leave out stream, or make the response with stream: true"
            raise InputError(f"a response that has not ended can't be streamed: {how}", "stream")
        stored = self.store.get(name, owner)
        if stored.events:
            return Response(b"".join(stored.events[starting_after + 1 :]), media_type="text/event-stream")
        work = partial(replay, stored.response, starting_after)
        events = await self.service.input_processor.offload(len(stored.response), work)
        return Response(events, media_type="text/event-stream")

    async def list_items(
        self,
        name: str,
        http: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Return the items that a response answers, also those of the responses before it."""
        owner = owner_of(http)
        run = self._find_run(name, owner)
        items = json.loads(run.items if run is not None else self.store.get(name, owner).input)
        items = items if order == "asc" else items[::-1]
        start = next((i for i, item in enumerate(items, 1) if item["id"] == after), 0)
        if after is not None and not start:
            raise InputError(f"after is {after[:80]!r}, which is not the id of an item", "after")
        page, more = items[start : start + limit], len(items) > start + limit
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        found = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
        return Response(json.dumps(found), media_type="application/json")  # in ASCII: a text may have half a pair

    async def cancel(self, name: str, http: Request) -> Response:
        """Cancel a response in the background, unless it has ended. Return the response."""
        owner = owner_of(http)
        run = self._find_run(name, owner)
        if run is not None:
            self._abort(name)
            self.store.put(owner, run.items, run.renderer.response("cancelled"))
        stored = self.store.get(name, owner)
        if not stored.is_background:
            raise InputError("only a response that was made with background: true can be cancelled", "background")
        return Response(stored.response, media_type="application/json")

    async def delete(self, name: str, http: Request) -> Response:
        """Delete a stored response, or abort one in the background."""
        owner = owner_of(http)
        if self._find_run(name, owner) is not None:
            self._abort(name)
        else:
            self.store.drop(name, owner)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _run(self, call: EngineCall, renderer: ResponseRenderer, log: EventLog | None) -> None:
        """Wait for the outputs of a response in the background. The renderer stores it. The events of a stream go to
        `log`."""
        try:
            if log is None:
                await renderer.whole(call.outputs())
            else:
                await EventStream(call, renderer, {}).send_events(log.send)
                self.store.put_events(renderer.id, log.events)
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # Rust's panics are not Exceptions
            renderer.final_event(error)
        finally:
            call.close()
            self._runs.pop(renderer.id, None)
            if log is not None:
                log.end()

    def _find_run(self, name: str, owner: bytes) -> BackgroundRun | None:
        """Return the response in the background, unless it is another owner's or stored already."""
        run = self._runs.get(name)
        return run if run is not None and run.owner == owner and name not in self.store else None

    def _abort(self, name: str) -> None:
        run = self._runs.pop(name)
        run.task.cancel()
        run.call.close()  # the task does so only if it has begun
        if run.log is not None:
            run.log.end()

    async def _resolve(
        self, body: ResponseRequest, previous: Sequence[Json], given: Sequence[Json], min_output: int | None = 1
    ) -> tuple[Generation, Conversation]:
        """Return the request as a chat, and its conversation. With truncation "auto", drop as few of the first items as
        make the prompt fit. The number is found by bisection; each try renders and tokenizes the conversation.
        `min_output` is that of `RequestResolver.chat`."""
        items = [*previous, *given]
        resolve = partial(self._resolve_items, body, items, len(previous), min_output)
        droppable = droppable_items(items) if body.truncation == "auto" else []
        longest = self.service.input_processor.max_len - (body.max_output_tokens or 1)
        high, best = len(droppable), None
        # The lower bound, mostly 0, is tried first: most conversations fit.
        number = low = min(max(len(items) + 1 - MAX_MESSAGES, 0), high)
        while low < high:
            resolved = None
            with suppress(PromptTooLong):
                resolved = await resolve({*droppable[:number]})
            if resolved is not None and len(resolved[0].prompts[0].ids) <= longest:
                best, high = resolved, number
            else:
                low = number + 1
            number = (low + high) // 2
        return best or await resolve({*droppable})

    async def _resolve_items(
        self,
        body: ResponseRequest,
        items: Sequence[Json],
        num_previous: int,
        min_output: int | None,
        dropped: Collection[int],
    ) -> tuple[Generation, Conversation]:
        """Return the request for the items without those `dropped`, and its conversation."""
        conversation, left_out = items_to_conversation(body.instructions, items, num_previous, dropped)
        chat = to_chat_request(body, conversation, left_out)
        with NAMES.rename_errors(conversation):
            generation = await self.service.resolver.chat("resp", chat, min_output)
            generation = NAMES.rename_warnings(generation, conversation)
        if dropped:
            text = f"truncation: the prompt was too long, and {len(dropped)} of its items were dropped"
            generation = generation._replace(warnings=[*generation.warnings, text])
        return generation, conversation

    def _given_items(self, body: ResponseRequest, owner: bytes) -> list[Json]:
        """Return the items of the input, with references to stored items resolved."""
        return [self.store.resolve_reference(item, owner) for item in input_items(body)]

    def _previous_items(self, body: ResponseRequest, owner: bytes) -> list[Json]:
        """Return the items of the conversation that the request continues."""
        if body.previous_response_id is None:
            return []
        if self._find_run(body.previous_response_id, owner) is not None:
            raise InputError("previous_response_id: this response has not ended", "previous_response_id")
        try:
            items: list[Json] = json.loads(self.store.get(body.previous_response_id, owner).items)
        except UnknownResponse as error:
            raise InputError(f"previous_response_id: {error}", "previous_response_id") from None
        return items


def event_stream(events: AsyncIterator[bytes], headers: dict[str, str]) -> Response:
    """Return a response that streams events."""
    return StreamingResponse(events, headers=EVENT_STREAM_HEADERS | headers, media_type="text/event-stream")


def with_ids(items: Sequence[Json]) -> list[Json]:
    """Return the items as they are listed, each with an id of its own."""
    listed: dict[str, Json] = {}
    for item in items:
        one = to_listed_item(item if item.get("id") not in listed else {**item, "id": None})
        listed[one["id"]] = one
    return [*listed.values()]


def to_listed_item(item: Json) -> Json:
    """Return an item of the input as it is listed: with an id and a type, and the content of a message as parts."""
    listed = {"type": "message", **item}
    kind, content = listed["type"], listed.get("content")
    if not isinstance(listed.get("id"), str):
        listed["id"] = new_id({"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(str(kind), "item"))
    if kind == "message" and isinstance(content, str):
        is_output = listed.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        listed["content"] = [{**part, "text": content}]
    return listed
