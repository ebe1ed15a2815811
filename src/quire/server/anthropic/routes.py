"""/v1/messages: Anthropic's form of a chat, which is answered as a chat request."""

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
    """The routes of /v1/messages."""

    def __init__(self, service: Service) -> None:
        self.service = service
        template = service.input_processor.chat_template
        self._variables = template.variables if template is not None else frozenset()
        self._has_reasoning = service.reasoning.format is not None

    async def create(self, body: MessageRequest, http: Request) -> Response:
        """Answer messages with one."""
        service, translated = self.service, TranslatedMessages(body, self._variables, self._has_reasoning)
        chat = translated.chat_request
        with NAMES.rename_errors(translated.conversation):
            prepared = await service.prepare_chat("msg", chat)
            call, id = prepared.call, prepared.call.id.replace("-", "_")
            renderer = MessageRenderer(
                id, service.model_names[0], chat, prepared, service.token_strings, service.writer_turns,
                body.max_tokens,
            )  # fmt: skip
            warnings = NAMES.rename_warnings(prepared.warnings)
            headers = await service.submit(call, renderer, chat, [prepared.prompt], prepared.params, http, warnings)
        if body.stream:
            return TypedEventStream(call, renderer, headers)
        return await respond(call, collect_answer(call, renderer), headers, http.receive)

    async def count(self, body: CountTokensRequest) -> Response:
        """Return the number of tokens of the prompt for such messages."""
        translated = TranslatedMessages(body, self._variables, self._has_reasoning)
        with NAMES.rename_errors(translated.conversation):
            prepared = await self.service.prepare_chat("msg", translated.chat_request)
            warnings = NAMES.rename_warnings(prepared.warnings)
            headers = self.service.warning_headers(translated.chat_request, [prepared.prompt], warnings)
        return JSONResponse({"input_tokens": len(prepared.prompt.ids)}, headers=headers)
