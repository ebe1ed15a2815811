"""/v1/responses: OpenAI's newer form of a chat, which is answered as a chat request, and the stored responses. These
are in memory; their number and size are limited, and the oldest is dropped first."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.errors import InputError
from quire.server.errors import UnknownResponse
from quire.server.guards import request_keys
from quire.server.responses.input import NAMES, ResponseRequest, input_items, items_to_conversation, to_chat_request
from quire.server.responses.render import ResponseRenderer
from quire.server.service import Service

Json = dict[str, Any]
MAX_STORED_BYTES = 256 << 20  # of all stored responses and their conversations
MAX_CONVERSATION = 16 << 20  # bytes of the conversation before a stored response


class StoredResponse(NamedTuple):
    """A response as JSON, and the items of the conversation, including the response's output."""

    owner: bytes
    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return len(self.response) + len(self.items)


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

    def __len__(self) -> int:
        return len(self._responses)

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
        output = [json.dumps(item, separators=(",", ":")) for item in response["output"]]
        items = b",".join([previous_items[:-1], *(item.encode() for item in output)]) + b"]"
        stored = StoredResponse(owner, json.dumps(response, separators=(",", ":")).encode(), items)
        self._responses[response["id"]] = stored
        self.bytes += stored.size
        while len(self._responses) > self.capacity or self.bytes > MAX_STORED_BYTES:
            _, dropped = self._responses.popitem(last=False)
            self.bytes -= dropped.size

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
        self.bytes -= self.get(id, owner).size
        del self._responses[id]


class ResponseRoutes:
    """The routes of /v1/responses. At most `capacity` responses are stored."""

    def __init__(self, service: Service, capacity: int = 0) -> None:
        self.service, self.store = service, ResponseStore(capacity)

    async def create(self, body: ResponseRequest, http: Request) -> Response:
        """Answer a list of items with items."""
        service, owner = self.service, owner_of(http)
        items, previous = input_items(body), self._previous_items(body, owner)
        conversation, left_out = items_to_conversation(body.instructions, previous, items)
        chat = to_chat_request(body, conversation, left_out)
        on_complete = None
        if self.store.capacity and body.store is not False:
            on_complete = partial(self.store.put, owner, self.store.dump_items([*previous, *items]))
        with NAMES.rename_errors(conversation):
            generation = NAMES.rename_warnings(await service.resolver.chat("resp", chat), conversation)
            renderer = partial(ResponseRenderer, body=body, on_complete=on_complete)
            return await service.answer(generation, renderer, http)

    async def get(self, name: str, http: Request) -> Response:
        """Return a stored response. It cannot be streamed, since its events are not stored."""
        if http.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InputError("a response that was kept can't be streamed: leave out stream", "stream")
        return Response(self.store.get(name, owner_of(http)).response, media_type="application/json")

    async def delete(self, name: str, http: Request) -> Response:
        """Delete a stored response."""
        self.store.drop(name, owner_of(http))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def _previous_items(self, body: ResponseRequest, owner: bytes) -> list[Json]:
        """Return the items of the conversation that the request continues."""
        if body.previous_response_id is None:
            return []
        try:
            items: list[Json] = json.loads(self.store.get(body.previous_response_id, owner).items)
        except UnknownResponse as error:
            raise InputError(f"previous_response_id: {error}", "previous_response_id") from None
        return items
