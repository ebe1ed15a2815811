"""/v1/messages: Anthropic's shape of a chat, which the chat's own path answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.server.anthropic.input import NAMES, CountTokensRequest, MessageRequest, TranslatedMessages
from quire.server.anthropic.render import MessageRenderer
from quire.server.events import TypedEventStream, collect_answer
from quire.server.streaming import respond

if TYPE_CHECKING:
    from quire.server.service import Service


class MessageRoutes:
    """The routes, over what `service` has."""

    def __init__(self, service: Service) -> None:
        self.service = service
        template = service.input_processor.chat_template
        self._variables = template.variables if template is not None else frozenset()
        self._has_reasoning = service.reasoning.format is not None

    async def create(self, body: MessageRequest, http: Request) -> Response:
        """Answer messages with one."""
        service, asking = self.service, TranslatedMessages(body, self._variables, self._has_reasoning)
        with NAMES.rename_errors(asking.conversation):
            asked = await service.prepare_chat("msg", asking.chat_request)
            id = asked.call.id.replace("-", "_")
            renderer = MessageRenderer(
                id, service.model_names[0], asking.chat_request, asked, service.token_strings, body.max_tokens
            )
            headers = await service.submit(
                asked.call,
                renderer,
                asking.chat_request,
                [asked.prompt],
                asked.params,
                http,
                NAMES.rename_warnings(asked.warnings),
            )
        if body.stream:
            return TypedEventStream(asked.call, renderer, headers)
        return await respond(asked.call, collect_answer(asked.call, renderer), headers, http.receive)

    async def count(self, body: CountTokensRequest) -> Response:
        """How many tokens the prompt of such messages has."""
        asking = TranslatedMessages(body, self._variables, self._has_reasoning)
        with NAMES.rename_errors(asking.conversation):
            asked = await self.service.prepare_chat("msg", asking.chat_request)
            headers = self.service.warning_headers(
                asking.chat_request, [asked.prompt], NAMES.rename_warnings(asked.warnings)
            )
        return JSONResponse({"input_tokens": len(asked.prompt.ids)}, headers=headers)
