"""The ASGI application: routes and middleware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp

import quire
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.server import response_models as models
from quire.server.admin import AdminRoutes
from quire.server.anthropic.routes import MessageRoutes
from quire.server.console import FILES, OPEN_PATHS, PAGE, Console
from quire.server.embeddings import EmbeddingRoutes
from quire.server.errors import add_handlers
from quire.server.generation import RequestResolver
from quire.server.guards import MAX_BODY, ApiKeyMiddleware, BodyLimitMiddleware, require_admin
from quire.server.metrics import Metrics
from quire.server.options import ServeOptions
from quire.server.outer_middleware import wrap_app
from quire.server.plain_route import PlainRoute
from quire.server.request_params import RequestRules
from quire.server.response_models import finish_openapi, query_parameters, route_responses
from quire.server.responses.routes import ResponseRoutes
from quire.server.server_group import ServerGroup
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.server.traces import RequestTracer

ALIAS_PATHS = {"/score": ("/v1/score",), "/rerank": ("/v1/rerank", "/v2/rerank")}  # paths that Cohere's clients use
HEAD_PATHS = ("/health", "/ping", "/metrics", "/version", "/v1/models")


class App(FastAPI):
    """FastAPI with its own OpenAPI document. `wrap` adds the outermost middleware, which also sees the responses to
    failures."""

    def __init__(self, wrap: Callable[[ASGIApp], ASGIApp], requires_keys: bool, **options: Any) -> None:
        self.wrap, self.requires_keys = wrap, requires_keys
        super().__init__(**options)
        self.router.route_class = PlainRoute

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. It is made once."""
        if self.openapi_schema is None:
            self.openapi_schema = finish_openapi(super().openapi(), self.requires_keys)
        return self.openapi_schema

    def build_middleware_stack(self) -> ASGIApp:
        return self.wrap(super().build_middleware_stack())


def create_app(
    llm: AsyncLLM,
    model_names: Sequence[str],
    options: ServeOptions | None = None,
    *,
    keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    config: EngineConfig | None = None,
    server_group: ServerGroup | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Return the ASGI application for `llm`. The caller closes `llm` and `tracer`.

    `keys`: the API keys; without any the server is open. `admin_keys` open the admin routes; without any these are
    closed. `config`: see Metrics. `server_group`: the frontends of the server that this one belongs to.
    `tracer` exports a span of each request.
    """
    options, server_group, prompts = options or ServeOptions(), server_group or ServerGroup(), llm.prompts
    metrics = Metrics(llm, model_names[0], options.metrics_prefix, config)
    rules = RequestRules(prompts.defaults, prompts.tokenizer is not None, options.max_logprobs, options.strict)
    resolver = RequestResolver(prompts, model_names, rules, options.tool_call_parser, options.reasoning_parser)
    service = Service(llm, resolver, metrics, options.log_requests, server_group, tracer)
    wrap = partial(
        wrap_app, counters=metrics.http, root_path=options.root_path, allowed_origins=options.allowed_origins
    )
    app = App(wrap, bool(keys), title="quire", version=quire.__version__, docs_url=None, redoc_url=None)
    add_routes(app, service, options.store_responses)
    add_admin_routes(app, service, AdminRoutes(llm, config), options)
    if options.console:
        add_console(app, Console(llm, metrics, server_group.num_frontends))
    add_handlers(app, metrics)
    app.add_middleware(
        BodyLimitMiddleware,
        max_body=max_body,
        max_len=prompts.max_len,
        num_frontends=server_group.num_frontends,
        image_chars=prompts.image_loader.limits.max_body_chars if prompts.image_loader is not None else 0,
    )
    open_paths = OPEN_PATHS if options.console else ()  # the middleware that is added last is the outer one
    app.add_middleware(ApiKeyMiddleware, keys=keys, admin_keys=admin_keys, open_paths=open_paths)
    return app


def add_routes(app: FastAPI, service: Service, store_responses: int = 0) -> None:
    """Add all routes but those of operators. HEAD routes, for clients that check whether the server is up, and second
    paths of a route are not in the OpenAPI document."""
    embeddings, messages = EmbeddingRoutes(service), MessageRoutes(service)
    responses = ResponseRoutes(service, store_responses)
    for method, path, route, model in (
        ("POST", "/v1/completions", service.completions, models.Completion),
        ("POST", "/v1/chat/completions", service.chat, models.ChatCompletion),
        ("POST", "/v1/chat/completions/batch", service.chat_batch, models.ChatCompletion),
        ("POST", "/v1/responses", responses.create, models.ResponsesResponse),
        # before the routes of a name, which its path matches too
        ("POST", "/v1/responses/input_tokens", responses.count, models.InputTokens),
        ("GET", "/v1/responses/{name}", responses.get, models.ResponsesResponse),
        ("DELETE", "/v1/responses/{name}", responses.delete, models.DeletedResponse),
        ("POST", "/v1/responses/{name}/cancel", responses.cancel, models.ResponsesResponse),
        ("GET", "/v1/responses/{name}/input_items", responses.list_items, models.InputItemList),
        ("POST", "/v1/messages", messages.create, models.MessagesResponse),
        ("POST", "/v1/messages/count_tokens", messages.count, models.CountTokensResponse),
        ("POST", "/v1/embeddings", embeddings.embeddings, models.EmbeddingResponse),
        ("POST", "/pooling", embeddings.pooling, models.PoolingResponse),
        ("POST", "/score", embeddings.score, models.ScoreResponse),
        ("POST", "/rerank", embeddings.rerank, models.RerankResponse),
        ("POST", "/generative_scoring", embeddings.generative_scoring, models.GenerativeScoringResponse),
        ("GET", "/v1/models", service.models, models.ModelList),
        ("GET", "/v1/models/{name:path}", service.model, models.ModelCard),
        ("POST", "/tokenize", service.tokenize, models.TokenizeResponse),
        ("POST", "/detokenize", service.detokenize, models.DetokenizeResponse),
        ("GET", "/health", service.health, None),
        ("GET", "/ping", service.health, None),
        ("POST", "/ping", service.health, None),
        ("GET", "/version", service.version, models.VersionResponse),
        ("GET", "/load", service.load, models.ServerLoad),
        ("GET", "/metrics", service.scrape, None),
    ):
        _add_route(app, method, path, route, model)
        if method == "GET" and path in HEAD_PATHS:
            app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)
        for other in ALIAS_PATHS.get(path, ()):
            app.add_api_route(other, route, methods=[method], response_model=None, include_in_schema=False)


def add_admin_routes(app: FastAPI, service: Service, admin: AdminRoutes, options: ServeOptions) -> None:
    """Add the routes of operators, which need an admin key, and /tokenizer_info, which does not."""
    for method, path, route, model in (
        ("GET", "/v1/prefixes", service.prefixes, models.PrefixList),
        ("POST", "/v1/prefixes", service.add_prefix, models.RegisteredPrefix),
        ("DELETE", "/v1/prefixes/{name}", service.release_prefix, models.DeletedPrefix),
        ("POST", "/reset_prefix_cache", admin.reset_prefix_cache, models.CacheReset),
        ("POST", "/sleep", admin.sleep, models.SleepStatus),
        ("POST", "/wake_up", admin.wake_up, models.SleepStatus),
        ("GET", "/is_sleeping", admin.is_sleeping, models.SleepStatus),
        *((("GET", "/server_info", admin.server_info, models.ServerInfo),) if options.server_info else ()),
    ):
        more = {"dependencies": [Depends(require_admin)], "openapi_extra": query_parameters(method, path)}
        _add_route(app, method, path, route, model, **more)
    if options.tokenizer_info:
        _add_route(app, "GET", "/tokenizer_info", admin.tokenizer_info, models.TokenizerInfo)


def _add_route(
    app: FastAPI, method: str, path: str, route: Callable[..., Any], model: type[BaseModel] | None, **more: Any
) -> None:
    responses = route_responses(method, path, model)
    app.add_api_route(path, route, methods=[method], response_model=None, responses=responses, **more)


def add_console(app: FastAPI, console: Console) -> None:
    """Add the routes of the console: its page, files and events. They are not in the OpenAPI document."""
    paths = {
        "/": console.page,
        PAGE: console.page,
        f"{PAGE}/": console.page,
        **{f"{PAGE}/{name}": console.file for name in FILES},
    }
    for path, route in {**paths, f"{PAGE}/events": console.events}.items():
        app.add_api_route(path, route, methods=["GET"], response_model=None, include_in_schema=False)
