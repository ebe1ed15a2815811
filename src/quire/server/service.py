"""The routes of OpenAI's API and vLLM's additions, for one AsyncLLM.

A request to generate text goes one way: the route parses its body (plain_route.py), a RequestResolver resolves it
(generation.py), `Service.answer` submits it and streams its outputs through a renderer, or returns them whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Scope

import quire
from quire.async_llm import AsyncLLM
from quire.errors import InputError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import PARAM_NAME
from quire.server.answer_size import AnswerBudget, AnswerSize
from quire.server.errors import Failure
from quire.server.generation import Generation, RequestResolver
from quire.server.guards import TRUSTED, client_of
from quire.server.json_pieces import WritePace, ids_json, texts_json
from quire.server.metrics import Metrics
from quire.server.outer_middleware import REQUEST_ID
from quire.server.render import ChatRenderer, CompletionRenderer, Renderer, RenderSettings
from quire.server.request_models import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    TokenizeRequest,
    warning_header,
)
from quire.server.request_params import structured_field
from quire.server.server_group import ServerGroup
from quire.server.streaming import EngineCall, EventStream, JsonPiecesResponse, respond
from quire.text.input_processor import Prompt
from quire.text.tools import read_tools

if TYPE_CHECKING:
    from quire.server.traces import RequestTracer

MAX_PARAM_CHARS = 500  # characters of parameters
R = TypeVar("R", bound=Renderer)
log = logging.getLogger("quire.server")


class Service:
    """The routes. `log_requests` logs each request. `server_group` is the whole server, of which this is one
    frontend. `tracer` exports a span of each request."""

    def __init__(
        self,
        llm: AsyncLLM,
        resolver: RequestResolver,
        metrics: Metrics,
        log_requests: bool,
        server_group: ServerGroup,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.llm, self.resolver, self.input_processor = llm, resolver, llm.prompts
        self.metrics, self.log_requests, self.tracer = metrics, log_requests, tracer
        self.render_settings = RenderSettings(resolver.model_names[0], llm.prompts)
        self.server_group, self.answer_budget = server_group, AnswerBudget(server_group.num_frontends)
        server_group.set_engine(llm, metrics)

    # Generation

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        return await self.answer(await self.resolver.completion(body), CompletionRenderer, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        return await self.answer(await self.resolver.chat("chatcmpl", body), ChatRenderer, http)

    async def chat_batch(self, body: BatchChatRequest, http: Request) -> Response:
        """Answer several conversations, each with one choice."""
        return await self.answer(await self.resolver.chat("chatcmpl", body), ChatRenderer, http)

    async def answer(
        self, generation: Generation, new_renderer: Callable[[Generation, RenderSettings], Renderer], http: Request
    ) -> Response:
        """Submit a resolved request and return the answer: a stream of its outputs, or all of them."""
        call, renderer, headers = await self.start(generation, new_renderer, http)
        if generation.request.stream:
            return EventStream(call, renderer, headers)
        return await respond(call, renderer.whole(call.outputs()), headers, http.receive)

    async def start(
        self, generation: Generation, new_renderer: Callable[[Generation, RenderSettings], R], http: Request
    ) -> tuple[EngineCall, R, dict[str, str]]:
        """Submit a resolved request. Return the call, the renderer of its outputs, and the headers of the answer."""
        id, request, prompts, params, size, _, _, warnings = generation
        headers = self.resolver.warning_headers(request, prompts, warnings)
        renderer = new_renderer(generation, self.render_settings)
        try:
            call = await self.submit(id, prompts, params, size, request, http, final_only=not request.stream)
        except InputError as error:
            if error.param == PARAM_NAME:  # the engine's name of the field
                error.param = structured_field(request)
            raise
        return call, renderer, headers

    async def submit(
        self, id: str, prompts: list[Prompt], params: SamplingParams, size: AnswerSize, body: Any, http: Request,
        final_only: bool = True,
    ) -> EngineCall:  # fmt: skip
        """Queue the prompts of a request. Return the call, whose outputs are the answer. `final_only`: no output is
        read before the last one."""
        call = EngineCall(self.llm, id, self.answer_budget, size)
        trace = None if self.tracer is None else self.tracer.start(http.headers)
        salt, client = body.cache_salt or "", client_of(http)
        try:
            await call.submit(prompts, params, salt=salt, final_only=final_only, client=client, trace=trace)
        except Exception as error:
            if trace is not None:
                trace.on_refusal(id, error)
            raise
        if self.log_requests:
            log_request(id, prompts, params, http.scope)
        return call

    # Text

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Return the token ids of a prompt or of a conversation."""
        self.resolver.check(body)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages", "prompt")
        truncation = self.resolver.truncation(body)
        if body.prompt is None:
            prompt = await self.resolver.render_chat(body, truncation, read_tools(body.tools or []))
        else:
            special = body.add_special_tokens is not False
            [prompt] = await self.input_processor.process_prompts([body.prompt], special, truncation)
        pace = WritePace(self.render_settings.writer_turns)
        pieces = [f'{{"count":{len(prompt.ids)},"max_model_len":{self.input_processor.max_len},"tokens":']
        pieces += [*await ids_json(prompt.ids, pace), ',"token_strs":']
        texts = map(self.input_processor.id_to_token, prompt.ids)
        pieces += await texts_json(texts, pace) if body.return_token_strs else ["null"]
        return JsonPiecesResponse([*pieces, "}"], self.resolver.warning_headers(body, [prompt]))

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        self.resolver.check(body)
        tokenizer, vocab = self.input_processor.tokenizer, self.llm.limits.vocab_size
        if tokenizer is None:
            raise InputError("this model has no tokenizer", "tokens")

        def decode() -> str:
            if bad := next((token for token in body.tokens if not 0 <= token < vocab), None):
                raise InputError(f"token ids are integers from 0 to {vocab - 1}, got {str(bad)[:40]}", "tokens")
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        text = await self.input_processor.offload(len(body.tokens), decode)
        return JSONResponse({"prompt": text}, headers=warning_header(body))

    # Registered prefixes (admin routes)

    async def prefixes(self) -> Response:
        """Return all registered prefixes. Requests do not find those with the status `computing` yet."""
        prefixes, ready = await self.llm.prefixes()
        data = [
            {"id": name, "object": "prefix", "tokens": length, "status": "ready" if name in ready else "computing"}
            for name, length in prefixes.items()
        ]
        capacity = self.llm.account.sharing.prefix_capacity
        return JSONResponse({"object": "list", "data": data, "capacity_tokens": capacity})

    async def add_prefix(self, body: PrefixRequest) -> Response:
        """Register a text or token ids. Returns once requests can find the prefix."""
        self.resolver.check(body)
        if (body.text is None) == (body.token_ids is None):
            raise InputError("give either text or token_ids", "text")
        given = body.text if body.text is not None else body.token_ids
        assert given is not None, "one of the two is given"
        try:
            tokens = await self.llm.register_prefix(body.name, given)
        except InputError as error:
            if error.param in ("prompt", "prefix"):  # the engine's names of the field
                error.param = "text" if body.text is not None else "token_ids"
            raise
        registered = {"id": body.name, "object": "prefix", "tokens": tokens, "status": "ready"}
        return JSONResponse(registered, headers=warning_header(body))

    async def release_prefix(self, name: str) -> Response:
        """Release a registered prefix."""
        await self.llm.release_prefix(name)
        return JSONResponse({"id": name, "object": "prefix", "deleted": True})

    # State of the server

    async def models(self) -> Response:
        """Return the names of the model."""
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.resolver.model_names]})

    async def model(self, name: str) -> Response:
        """Return one of the model's names."""
        self.resolver.check_model(name)
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.server_group.start_time, "owned_by": "quire"}
        return {
            **card,
            "root": self.resolver.model_names[0],
            "parent": None,
            "max_model_len": self.input_processor.max_len,
        }

    async def health(self, http: Request) -> Response:
        """Return 200 if the engine's loop runs and requests are accepted, else 503. The reason is sent only to clients
        with a key, or if none is needed, since it may contain internal details."""
        state, other = self.llm.heartbeat(), self.server_group.problem()
        if state.alive and not state.stalled and self.llm.accepting and not other:
            return Response()
        if not http.scope.get(TRUSTED):
            return Response(status_code=503)
        reason = state.why if not state.alive or state.stalled else ""
        reason = reason or other or "the server is shutting down: no request is accepted"
        return Failure(503, reason).response(http.scope)

    async def version(self) -> Response:
        """Return quire's version."""
        return JSONResponse({"version": quire.__version__})

    async def load(self) -> Response:
        """Return the number of requests in the server."""
        return JSONResponse({"server_load": await self.server_group.load()})

    async def scrape(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return PlainTextResponse(await self.server_group.scrape(), media_type=CONTENT_TYPE_LATEST)


def log_request(id: str, prompts: Sequence[Prompt], params: SamplingParams, scope: Scope) -> None:
    """Log a request that was queued. Values from the client are logged as their repr, which is shortened, so that they
    cannot forge a log line."""
    values = [(field, getattr(params, field.name)) for field in fields(params) if field.repr]
    shown = ", ".join(f"{field.name}={short(value)}" for field, value in values if value != field.default)
    tokens, images = sum(len(prompt.ids) for prompt in prompts), sum(len(prompt.images) for prompt in prompts)
    sizes = f"{len(prompts)} prompts, {tokens} tokens" + f", {images} images" * bool(images)
    text = "request %s (X-Request-Id %s): %s; %s"
    log.info(text, id, scope.get(REQUEST_ID, "-"), sizes, shown[:MAX_PARAM_CHARS] or "no parameters")
