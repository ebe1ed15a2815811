"""/v1/responses: OpenAI's newer shape of a chat, which the chat's own path answers, and the responses that are kept."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.errors import InputError
from quire.server.errors import UnknownResponse
from quire.server.response_input import NAMES, ResponseRequest, as_chat, items_of, read_items
from quire.server.response_render import ResponseRenderer
from quire.server.response_store import Store, owner_of
from quire.server.said import SayingStream, whole_said
from quire.server.stream import respond

if TYPE_CHECKING:
    from quire.server.service import Service

Json = dict[str, Any]


class Responses:
    """The routes, over what `service` has. At most `stored` responses are kept."""

    def __init__(self, service: Service, stored: int = 0) -> None:
        self.service, self.store = service, Store(stored)

    async def create(self, body: ResponseRequest, http: Request) -> Response:
        """Answer items with items."""
        service, owner = self.service, owner_of(http)
        items, before = items_of(body), self._before(body, owner)
        talk = read_items(body.instructions, before, items)
        chat = as_chat(body, talk)
        kept = bool(self.store.count) and body.store is not False
        conversation = self.store.check([*before, *items]) if kept else b""
        with NAMES.used(talk):
            asked = await service.asked("resp", chat)
            id = asked.call.id.replace("-", "_")
            keep = partial(self._keep, owner, conversation) if kept else None
            renderer = ResponseRenderer(id, service.names[0], body, chat, asked, service.words, keep)
            headers = await service.queue(
                asked.call, renderer, chat, [asked.prompt], asked.params, http, NAMES.told(asked.said)
            )
        if body.stream:
            return SayingStream(asked.call, renderer, headers)
        return await respond(asked.call, whole_said(asked.call, renderer), headers, http.receive)

    async def stored(self, name: str, http: Request) -> Response:
        """A response that was kept, whole: a client that asks for its events would find none."""
        if http.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InputError("a response that was kept can't be streamed: leave out stream", "stream")
        return Response(self.store.get(name, owner_of(http)).response, media_type="application/json")

    async def drop(self, name: str, http: Request) -> Response:
        """Forget one."""
        self.store.drop(name, owner_of(http))
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def _keep(self, owner: bytes, before: bytes, response: Json) -> None:
        self.store.put(response["id"], owner, response, before)

    def _before(self, body: ResponseRequest, owner: bytes) -> list[Json]:
        """The items of the conversation that the request goes on with."""
        if body.previous_response_id is None:
            return []
        try:
            found: list[Json] = json.loads(self.store.get(body.previous_response_id, owner).items)
        except UnknownResponse as error:
            raise InputError(f"previous_response_id: {error}", "previous_response_id") from None
        return found
