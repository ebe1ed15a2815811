"""/v1/messages: Anthropic's shape of a chat, which the chat's own path answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.server.message_input import NAMES, Asking, CountRequest, MessageRequest
from quire.server.message_render import MessageRenderer
from quire.server.said import SayingStream, whole_said
from quire.server.stream import respond

if TYPE_CHECKING:
    from quire.server.service import Service


class AnthropicMessages:
    """The routes, over what `service` has."""

    def __init__(self, service: Service) -> None:
        self.service = service
        template = service.prompts.chat_template
        self._variables = template.variables if template is not None else frozenset()
        self._thinks = service.reasoning.format is not None

    async def create(self, body: MessageRequest, http: Request) -> Response:
        """Answer messages with one."""
        service, asking = self.service, Asking(body, self._variables, self._thinks)
        with NAMES.used(asking.talk):
            asked = await service.asked("msg", asking.chat)
            id = asked.call.id.replace("-", "_")
            renderer = MessageRenderer(id, service.names[0], asking.chat, asked, service.words, body.max_tokens)
            headers = await service.queue(
                asked.call, renderer, asking.chat, [asked.prompt], asked.params, http, NAMES.told(asked.said)
            )
        if body.stream:
            return SayingStream(asked.call, renderer, headers)
        return await respond(asked.call, whole_said(asked.call, renderer), headers, http.receive)

    async def count(self, body: CountRequest) -> Response:
        """How many tokens the prompt of such messages has."""
        asking = Asking(body, self._variables, self._thinks)
        with NAMES.used(asking.talk):
            asked = await self.service.asked("msg", asking.chat)
            headers = self.service.headers(asking.chat, [asked.prompt], NAMES.told(asked.said))
        return JSONResponse({"input_tokens": len(asked.prompt.ids)}, headers=headers)
