"""The routes: OpenAI's API and vLLM's additions over one AsyncLLM."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

import quire
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.errors import InputError
from quire.server.errors import UnknownModel, add_handlers
from quire.server.guards import MAX_BODY, BoundBody, RequireKey, require_admin
from quire.server.metrics import Metrics
from quire.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    Sampling,
    TokenizeRequest,
    chat_params,
    completion_params,
    completion_prompts,
)
from quire.server.proxy import front
from quire.server.render import ChatRenderer, CompletionRenderer, Json, Renderer
from quire.server.request_log import log_request
from quire.server.stream import Call, EventStream, respond
from quire.text.prompts import INLINE_CHARS, Prompt
from quire.vocabulary.params import MAX_LOGPROBS, SamplingParams

WITH_HEAD = ("/health", "/ping", "/metrics", "/version", "/v1/models")


class Service:
    """What the routes do. `names` are the model's names; the first is the one shown."""

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        metrics: Metrics,
        *,
        strict: bool = False,
        max_logprobs: int = MAX_LOGPROBS,
        log_requests: bool = False,
    ) -> None:
        self.llm, self.prompts, self.names, self.metrics = llm, llm.prompts, list(names), metrics
        self.strict, self.max_logprobs, self.log_requests = strict, max_logprobs, log_requests
        self.started = int(time.time())

    # Generation

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        self._check_model(body.model)
        params = completion_params(body, self.prompts.defaults, self.prompts.tokenizer is not None)
        given = completion_prompts(body.prompt)
        prompts = await self._encode(given, body.add_special_tokens)
        call = Call(self.llm, f"cmpl-{uuid.uuid4().hex}")
        renderer = CompletionRenderer(call.id, self.names[0], body, prompts, self.prompts)
        return await self._answer(call, renderer, body, prompts, params, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        params = chat_params(body, self.prompts.defaults, self.prompts.tokenizer is not None)
        prompt = await self._render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        call = Call(self.llm, f"chatcmpl-{uuid.uuid4().hex}")
        renderer = ChatRenderer(call.id, self.names[0], body, [prompt], self.prompts)
        return await self._answer(call, renderer, body, [prompt], params, http)

    async def _answer(
        self,
        call: Call,
        renderer: Renderer,
        body: Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        http: Request,
    ) -> Response:
        await call.submit(prompts, params, salt=body.cache_salt or "", patient=not body.stream)
        if self.log_requests:
            log_request(call.id, prompts, params, http.scope)
        if not body.stream:
            return await respond(call, renderer, http.receive)
        options = body.stream_options
        return EventStream(call, renderer, bool(options is not None and options.include_usage))

    async def _encode(self, given: list[Any], add_special_tokens: bool) -> list[Prompt]:
        def encode() -> list[Prompt]:
            return [self.prompts.prompt(item, add_special_tokens) for item in given]

        size = sum(len(item) for item in given if isinstance(item, str))
        return encode() if size <= INLINE_CHARS else await asyncio.to_thread(encode)

    async def _render(self, messages: Any, add_generation_prompt: bool, kwargs: Mapping[str, Any] | None) -> Prompt:
        # Templates are programs of unknown cost, so always on another thread.
        given = dict(kwargs or {})
        if taken := {"messages", "add_generation_prompt", "self"} & given.keys():
            raise InputError(f"chat_template_kwargs can't set {min(taken)!r}", "chat_template_kwargs")
        return await asyncio.to_thread(self.prompts.chat, messages, add_generation_prompt, **given)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self.names:
            raise UnknownModel(f"the model {model[:60]!r} does not exist; this server has {self.names[0]!r}", "model")

    # Text

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of a conversation."""
        self._check_model(body.model)
        if body.chat_template is not None:
            raise InputError("chat_template can't be set by a request", "chat_template")
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages", "prompt")
        if body.messages is not None:
            prompt = await self._render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        else:
            [prompt] = await self._encode([body.prompt], body.add_special_tokens is not False)
        ids = prompt.ids
        strings = [self.prompts.decode_token(id) for id in ids] if body.return_token_strs else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": self.prompts.max_len, "tokens": ids, "token_strs": strings}
        )

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        self._check_model(body.model)
        tokenizer, vocab = self.prompts.tokenizer, self.llm.engine.limits.vocab_size
        if tokenizer is None:
            raise InputError("this model has no tokenizer", "tokens")
        if bad := next((token for token in body.tokens if not 0 <= token < vocab), None):
            raise InputError(f"token ids are integers from 0 to {vocab - 1}, got {str(bad)[:40]}", "tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    # Registered prefixes (admin routes)

    async def prefixes(self) -> Response:
        """All of them. `computing` ones are found by no request yet."""
        found, ready = await self.llm.prefixes()
        data = [
            {"id": name, "object": "prefix", "tokens": length, "status": "ready" if name in ready else "computing"}
            for name, length in found.items()
        ]
        capacity = self.llm.account.sharing.prefix_capacity
        return JSONResponse({"object": "list", "data": data, "capacity_tokens": capacity})

    async def add_prefix(self, body: PrefixRequest) -> Response:
        """Register a text or token ids; answers once requests find it."""
        if (body.text is None) == (body.token_ids is None):
            raise InputError("give either text or token_ids", "text")
        given = body.text if body.text is not None else body.token_ids
        assert given is not None, "one of the two is given"
        tokens = await self.llm.register_prefix(body.name, given)
        return JSONResponse({"id": body.name, "object": "prefix", "tokens": tokens, "status": "ready"})

    async def drop_prefix(self, name: str) -> Response:
        """Let go of one."""
        await self.llm.release_prefix(name)
        return JSONResponse({"id": name, "object": "prefix", "deleted": True})

    # Facts

    async def models(self) -> Response:
        """The names that this server answers to."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> Json:
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "quire", "root": self.names[0]}
        return {**card, "parent": None, "max_model_len": self.prompts.max_len}

    async def health(self) -> Response:
        """200 while the engine's loop turns and requests are accepted, else 503; the body is empty."""
        state = self.llm.heartbeat()
        return Response(status_code=200 if state.alive and not state.stalled and self.llm.accepting else 503)

    async def version(self) -> Response:
        """quire's version."""
        return JSONResponse({"version": quire.__version__})

    async def load(self) -> Response:
        """Requests in the server."""
        return JSONResponse({"server_load": self.llm.active})

    async def scrape(self) -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


class App(FastAPI):
    """FastAPI behind `front`, which is around its answers to failures too."""

    def __init__(self, front: Callable[[ASGIApp], ASGIApp], **options: Any) -> None:
        self.front = front
        super().__init__(**options)

    def build_middleware_stack(self) -> ASGIApp:
        return self.front(super().build_middleware_stack())


def create_app(
    llm: AsyncLLM,
    names: Sequence[str],
    *,
    keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    root_path: str = "",
    allowed_origins: Sequence[str] = (),
    metrics_prefix: str = "quire",
    config: EngineConfig | None = None,
    strict: bool = False,
    max_logprobs: int = MAX_LOGPROBS,
    log_requests: bool = False,
) -> FastAPI:
    """The ASGI application over `llm`, which stays the caller's to close. `keys`: API keys; none leaves it open.
    `admin_keys` open the admin routes; none shuts them. `root_path`: a prefix that paths may have. `allowed_origins`:
    whose pages may ask from a browser. `metrics_prefix` and `config`: see Metrics. `strict` refuses unknown fields;
    `max_logprobs` is the most that a request may ask for; `log_requests` logs each."""
    metrics = Metrics(names[0], metrics_prefix, config)
    metrics.watch(llm)
    service = Service(llm, names, metrics, strict=strict, max_logprobs=max_logprobs, log_requests=log_requests)
    before = partial(front, counts=metrics.http, root_path=root_path, allowed_origins=tuple(allowed_origins))
    app = App(before, title="quire", version=quire.__version__, docs_url=None, redoc_url=None)
    add_routes(app, service)
    add_handlers(app, metrics)
    app.add_middleware(BoundBody, max_body=max_body)
    app.add_middleware(RequireKey, keys=keys, admin_keys=admin_keys)  # around the other: added last
    return app


def add_routes(app: FastAPI, service: Service) -> None:
    """Every path, and who answers it. HEAD is there for who asks whether a server is up, and in no document."""
    for method, path, route in (
        ("POST", "/v1/completions", service.completions),
        ("POST", "/v1/chat/completions", service.chat),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.model),
        ("POST", "/tokenize", service.tokenize),
        ("POST", "/detokenize", service.detokenize),
        ("GET", "/health", service.health),
        ("GET", "/ping", service.health),
        ("POST", "/ping", service.health),
        ("GET", "/version", service.version),
        ("GET", "/load", service.load),
        ("GET", "/metrics", service.scrape),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None)
        if method == "GET" and path in WITH_HEAD:
            app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)
    for method, path, admin_route in (
        ("GET", "/v1/prefixes", service.prefixes),
        ("POST", "/v1/prefixes", service.add_prefix),
        ("DELETE", "/v1/prefixes/{name}", service.drop_prefix),
    ):
        app.add_api_route(
            path, admin_route, methods=[method], response_model=None, dependencies=[Depends(require_admin)]
        )
