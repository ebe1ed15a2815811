"""/v1/responses: OpenAI's newer form of a chat, which is answered as a chat request, and the stored responses."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.errors import InputError
from quire.server.errors import UnknownResponse
from quire.server.responses.input import NAMES, ResponseRequest, input_items, items_to_conversation, to_chat_request
from quire.server.responses.render import ResponseRenderer
from quire.server.responses.store import ResponseStore, owner_of
from quire.server.service import Service

Json = dict[str, Any]


class ResponseRoutes:
    """The routes of /v1/responses. At most `capacity` responses are stored."""

    def __init__(self, service: Service, capacity: int = 0) -> None:
        self.service, self.store = service, ResponseStore(capacity)

    async def create(self, body: ResponseRequest, http: Request) -> Response:
        """Answer a list of items with items."""
        service, owner = self.service, owner_of(http)
        items, previous = input_items(body), self._previous_items(body, owner)
        conversation = items_to_conversation(body.instructions, previous, items)
        chat = to_chat_request(body, conversation)
        on_complete = None
        if self.store.capacity and body.store is not False:
            on_complete = partial(self.store.put, owner, self.store.dump_items([*previous, *items]))
        with NAMES.rename_errors(conversation):
            generation = NAMES.rename_warnings(await service.resolver.chat("resp", chat))
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
