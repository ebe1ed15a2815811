"""/v1/messages: Anthropic's form of a chat, which is answered as a chat request."""

from __future__ import annotations

from functools import partial

from fastapi import Request
from starlette.responses import JSONResponse, Response

from quire.server.anthropic.input import NAMES, CountTokensRequest, MessageRequest, TranslatedMessages
from quire.server.anthropic.render import MessageRenderer
from quire.server.generation import Generation
from quire.server.service import Service


class MessageRoutes:
    """The routes of /v1/messages."""

    def __init__(self, service: Service) -> None:
        self.service, self.resolver = service, service.resolver

    async def create(self, body: MessageRequest, http: Request) -> Response:
        """Answer messages with one."""
        translated = TranslatedMessages(body, self.resolver)
        with NAMES.rename_errors(translated.conversation):
            generation = await self._resolve(translated)
            renderer = partial(MessageRenderer, max_tokens=body.max_tokens)
            return await self.service.answer(generation, renderer, http)

    async def count(self, body: CountTokensRequest) -> Response:
        """Return the number of tokens of a request's prompt."""
        translated = TranslatedMessages(body, self.resolver)
        with NAMES.rename_errors(translated.conversation):
            generation = await self._resolve(translated, min_output=None)
            prompts = generation.prompts
            headers = self.resolver.warning_headers(translated.chat_request, prompts, generation.warnings)
        return JSONResponse({"input_tokens": len(prompts[0].ids)}, headers=headers)

    async def _resolve(self, translated: TranslatedMessages, min_output: int | None = 1) -> Generation:
        """Return the request as a chat, with Anthropic's names in its warnings. `min_output` is that of `chat`."""
        generation = await self.resolver.chat("msg", translated.chat_request, min_output)
        return NAMES.rename_warnings(generation, translated.conversation)
