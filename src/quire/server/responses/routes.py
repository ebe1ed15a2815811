"""/v1/responses: OpenAI's newer shape of a chat, which the chat's own path answers, and the responses that are kept."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.errors import InputError
from quire.server.errors import UnknownResponse
from quire.server.events import TypedEventStream, collect_answer
from quire.server.responses.input import NAMES, ResponseRequest, input_items, items_to_conversation, to_chat_request
from quire.server.responses.render import ResponseRenderer
from quire.server.responses.store import ResponseStore, owner_of
from quire.server.streaming import respond

if TYPE_CHECKING:
    from quire.server.service import Service

Json = dict[str, Any]


class ResponseRoutes:
    """The routes, over what `service` has. At most `get` responses are kept."""

    def __init__(self, service: Service, capacity: int = 0) -> None:
        self.service, self.store = service, ResponseStore(capacity)

    async def create(self, body: ResponseRequest, http: Request) -> Response:
        """Answer items with items."""
        service, owner = self.service, owner_of(http)
        items, before = input_items(body), self._previous_items(body, owner)
        talk = items_to_conversation(body.instructions, before, items)
        chat = to_chat_request(body, talk)
        kept = bool(self.store.capacity) and body.store is not False
        conversation = self.store.dump_items([*before, *items]) if kept else b""
        with NAMES.rename_errors(talk):
            asked = await service.prepare_chat("resp", chat)
            id = asked.call.id.replace("-", "_")
            keep = partial(self._store_response, owner, conversation) if kept else None
            renderer = ResponseRenderer(id, service.model_names[0], body, chat, asked, service.token_strings, keep)
            headers = await service.submit(
                asked.call, renderer, chat, [asked.prompt], asked.params, http, NAMES.rename_warnings(asked.warnings)
            )
        if body.stream:
            return TypedEventStream(asked.call, renderer, headers)
        return await respond(asked.call, collect_answer(asked.call, renderer), headers, http.receive)

    async def get(self, name: str, http: Request) -> Response:
        """A response that was kept, whole: a client that asks for its events would find none."""
        if http.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InputError("a response that was kept can't be streamed: leave out stream", "stream")
        return Response(self.store.get(name, owner_of(http)).response, media_type="application/json")

    async def delete(self, name: str, http: Request) -> Response:
        """Forget one."""
        self.store.drop(name, owner_of(http))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def _store_response(self, owner: bytes, before: bytes, response: Json) -> None:
        self.store.put(response["id"], owner, response, before)

    def _previous_items(self, body: ResponseRequest, owner: bytes) -> list[Json]:
        """The items of the conversation that the request goes on with."""
        if body.previous_response_id is None:
            return []
        try:
            found: list[Json] = json.loads(self.store.get(body.previous_response_id, owner).items)
        except UnknownResponse as error:
            raise InputError(f"previous_response_id: {error}", "previous_response_id") from None
        return found
