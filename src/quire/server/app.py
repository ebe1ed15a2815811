"""The routes of the server, and what is around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp

import quire
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.server.admin import AdminRoutes
from quire.server.anthropic.routes import MessageRoutes
from quire.server.console import FILES, OPEN_PATHS, PAGE, Console
from quire.server.embeddings import EmbeddingRoutes
from quire.server.errors import add_handlers
from quire.server.guards import MAX_BODY, ApiKeyMiddleware, BodyLimitMiddleware, require_admin
from quire.server.metrics import Metrics
from quire.server.outer_middleware import wrap_app
from quire.server.plain_route import PlainRoute
from quire.server.request_params import RequestRules
from quire.server.response_models import finish_openapi, query_parameters, route_responses
from quire.server.responses.routes import ResponseRoutes
from quire.server.server_group import ServerGroup
from quire.server.service import Service

ALIAS_PATHS = {"/score": ("/v1/score",), "/rerank": ("/v1/rerank", "/v2/rerank")}  # where Cohere's clients ask
HEAD_PATHS = ("/health", "/ping", "/metrics", "/version", "/v1/models")


class App(FastAPI):
    """FastAPI behind `wrap`, which is around its answers to failures too, and with a document of its own."""

    def __init__(self, wrap: Callable[[ASGIApp], ASGIApp], requires_keys: bool, **options: Any) -> None:
        self.wrap, self.requires_keys = wrap, requires_keys
        super().__init__(**options)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = finish_openapi(super().openapi(), self.requires_keys)
        return self.openapi_schema

    def build_middleware_stack(self) -> ASGIApp:
        return self.wrap(super().build_middleware_stack())


def create_app(
    llm: AsyncLLM,
    model_names: Sequence[str],
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
    server_group: ServerGroup | None = None,
    tool_format: str | None = None,
    reasoning_format: str | None = None,
    console: bool = True,
    store_responses: int = 0,
    server_info: bool = False,
    tokenizer_info: bool = False,
) -> FastAPI:
    """The ASGI application over `llm`, which stays the caller's to close. `keys`: API keys; none leaves it open.
    `admin_keys` open the admin routes; none shuts them. `root_path`: a prefix that paths may have. `allowed_origins`:
    whose pages may ask from a browser. `metrics_prefix` and `config`: see Metrics. `strict` refuses unknown fields;
    `max_logprobs` is the most that a request may ask for; `log_requests` logs each; `server_group` are the fronts that
    this is one of. `tool_format` is how the model writes calls of tools, `reasoning_format` how it writes thoughts;
    None: as its template says. `console`: there is one (server.console). `server_info`, `tokenizer_info`: the routes of
    these names are there. At most `store_responses` of /v1/responses are kept."""
    metrics = Metrics(model_names[0], metrics_prefix, config)
    metrics.attach(llm)
    terms = RequestRules(llm.prompts.defaults, llm.prompts.tokenizer is not None, max_logprobs, strict)
    service = Service(llm, model_names, metrics, terms, log_requests, server_group, tool_format, reasoning_format)
    before = partial(wrap_app, counters=metrics.http, root_path=root_path, allowed_origins=tuple(allowed_origins))
    app = App(before, bool(keys), title="quire", version=quire.__version__, docs_url=None, redoc_url=None)
    add_routes(app, service, store_responses)
    add_admin_routes(app, AdminRoutes(llm, config), server_info, tokenizer_info)
    if console:
        add_console(app, Console(llm, metrics, service.server_group.num_frontends))
    add_handlers(app, metrics)
    sight, share = llm.prompts.image_loader, service.server_group.num_frontends
    pictures = sight.limits.max_body_chars if sight is not None else 0
    app.add_middleware(
        BodyLimitMiddleware, max_body=max_body, max_len=llm.prompts.max_len, num_frontends=share, image_chars=pictures
    )
    open = OPEN_PATHS if console else ()
    app.add_middleware(
        ApiKeyMiddleware, keys=keys, admin_keys=admin_keys, open_paths=open
    )  # around the other: added last
    return app


def add_routes(app: FastAPI, service: Service, store_responses: int = 0) -> None:
    """Every path, and who answers it. HEAD is there for who asks whether a server is up, and like second paths of one
    route in no document."""
    app.router.route_class = PlainRoute
    embeddings, answers, messages = (
        EmbeddingRoutes(service),
        ResponseRoutes(service, store_responses),
        MessageRoutes(service),
    )
    for method, path, route in (
        ("POST", "/v1/completions", service.completions),
        ("POST", "/v1/chat/completions", service.chat),
        ("POST", "/v1/responses", answers.create),
        ("GET", "/v1/responses/{name}", answers.get),
        ("DELETE", "/v1/responses/{name}", answers.delete),
        ("POST", "/v1/messages", messages.create),
        ("POST", "/v1/messages/count_tokens", messages.count),
        ("POST", "/v1/embeddings", embeddings.embeddings),
        ("POST", "/score", embeddings.score),
        ("POST", "/rerank", embeddings.rerank),
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
        app.add_api_route(path, route, methods=[method], response_model=None, responses=route_responses(method, path))
        if method == "GET" and path in HEAD_PATHS:
            app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)
        for other in ALIAS_PATHS.get(path, ()):
            app.add_api_route(other, route, methods=[method], response_model=None, include_in_schema=False)
    _add_admin_route(app, "GET", "/v1/prefixes", service.prefixes)
    _add_admin_route(app, "POST", "/v1/prefixes", service.add_prefix)
    _add_admin_route(app, "DELETE", "/v1/prefixes/{name}", service.release_prefix)


def _add_admin_route(app: FastAPI, method: str, path: str, route: Callable[..., Any]) -> None:
    """A route for admin keys."""
    app.add_api_route(
        path,
        route,
        methods=[method],
        response_model=None,
        responses=route_responses(method, path),
        dependencies=[Depends(require_admin)],
        openapi_extra=query_parameters(method, path),
    )


def add_admin_routes(app: FastAPI, admin: AdminRoutes, server_info: bool, tokenizer_info: bool) -> None:
    """What an operator does and asks."""
    _add_admin_route(app, "POST", "/reset_prefix_cache", admin.reset_prefix_cache)
    _add_admin_route(app, "POST", "/sleep", admin.sleep)
    _add_admin_route(app, "POST", "/wake_up", admin.wake_up)
    _add_admin_route(app, "GET", "/is_sleeping", admin.is_sleeping)
    if server_info:
        _add_admin_route(app, "GET", "/server_info", admin.server_info)
    if tokenizer_info:
        path = "/tokenizer_info"
        app.add_api_route(path, admin.tokenizer_info, methods=["GET"], responses=route_responses("GET", path))


def add_console(app: FastAPI, console: Console) -> None:
    """The page, its files, and what it is told; in no document."""
    paths = {
        "/": console.page,
        PAGE: console.page,
        f"{PAGE}/": console.page,
        **{f"{PAGE}/{name}": console.file for name in FILES},
    }
    for path, route in {**paths, f"{PAGE}/events": console.events}.items():
        app.add_api_route(path, route, methods=["GET"], response_model=None, include_in_schema=False)
