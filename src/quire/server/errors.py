"""Failures as HTTP responses of at most 4 KiB: in OpenAI's format, {"error": {"message", "type", "param", "code"}}, or
for /v1/messages in Anthropic's, {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import (
    EngineDead,
    InputError,
    NotIdle,
    Overloaded,
    PrefixesFull,
    PrefixTaken,
    PromptTooLong,
    UnknownPrefix,
)
from quire.server.metrics import Metrics
from quire.server.request_models import wrong_type_error

MAX_MESSAGE = 1000
MAX_PARAM = 100
OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    414: "UriTooLongError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
MESSAGES_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
}
OVERFLOW = "context_length_exceeded"  # OpenAI's code of a prompt that is too long
ANSWERED_ERROR = "quire.answered_error"  # in a request's scope: the exception that was answered and logged
LAST_ANSWER_SECONDS = 1.0  # to send the response to an exception that ends a request
log = logging.getLogger("quire.server")


class Failure(NamedTuple):
    """An error response: its status, message and headers."""

    code: int
    message: str
    param: str | None = None
    headers: dict[str, str] | None = None
    details: dict[str, Any] | None = None  # a field of Anthropic's format that its clients act on
    reason: str | None = None  # OpenAI's code of an error that its clients act on
    anthropic_message: str | None = None  # the message in Anthropic's format, if it differs

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kind = OPENAI_TYPES.get(self.code, "BadRequestError" if self.code < 500 else "InternalServerError")
        param = None if self.param is None else _printable(self.param, MAX_PARAM)
        message = _printable(self.message, MAX_MESSAGE)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.reason or self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's format, which has no param: the message names the field."""
        field = (self.param or "").partition(".")[0].partition("[")[0]
        message = self.message if field in self.message else f"{field}: {self.message}"
        message = self.anthropic_message or message
        kind = ANTHROPIC_TYPES.get(self.code, "invalid_request_error" if self.code < 500 else "api_error")
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": _printable(message, MAX_MESSAGE), **details}}

    def response(self, scope: Scope) -> JSONResponse:
        """Return the response to the request of `scope`, in the format of its route."""
        path = route_path(scope)
        theirs = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
        return JSONResponse(self.anthropic_body() if theirs else self.body(), self.code, self.headers)


def route_path(scope: Scope) -> str:
    """Return the path of a request, without --root-path."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _printable(text: str, limit: int) -> str:
    """Return `text`, which may come from the client, cut to `limit` characters and without lone surrogates."""
    return text.encode("utf-8", "replace").decode()[:limit]


class UnknownModel(InputError):
    """A request names a model that is not served."""


class UnknownField(InputError):
    """A strict server does not know a field. The name is the client's."""


class UnknownResponse(InputError):
    """No response with that id is stored for this client."""


class ThreadsUnsupported(InputError):
    """A request asks the server to store its messages. Anthropic's client sends all messages after this error."""

    details: ClassVar[dict[str, Any]] = {"error_code": "thread_unsupported_request"}


STATUS_CODES: dict[type[InputError], int] = {
    UnknownModel: 404, UnknownResponse: 404, UnknownPrefix: 404, PrefixTaken: 409, PrefixesFull: 413, NotIdle: 409,
}  # fmt: skip


def to_failure(error: BaseException) -> Failure:
    """Return the failure that a client sees for an exception: no paths, addresses or tracebacks."""
    if isinstance(error, PromptTooLong):
        anthropic = f"prompt is too long: {error.length} > {error.limit} maximum" if error.length else None
        return Failure(400, str(error), error.param, reason=OVERFLOW, anthropic_message=anthropic)
    if isinstance(error, InputError):
        details = error.details if isinstance(error, ThreadsUnsupported) else None
        return Failure(STATUS_CODES.get(type(error), 400), str(error), error.param, details=details)
    if isinstance(error, Overloaded):
        return Failure(503, str(error), headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, EngineDead):
        return Failure(503, "the engine stopped: requests in progress are lost", headers={"Retry-After": "10"})
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        wrong = body_error(first) or wrong_type_error(first["loc"], first["msg"])
        return Failure(400, str(wrong), wrong.param)
    if isinstance(error, HTTPException) and (error.status_code, error.detail) == (404, "Not Found"):
        return Failure(404, "there is nothing at this path; /openapi.json lists the routes")
    if isinstance(error, asyncio.CancelledError):
        return Failure(503, "the server is shutting down", headers={"Connection": "close"})
    if isinstance(error, HTTPException):
        return Failure(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    log.error("a request failed", exc_info=error)
    return Failure(500, "internal error")


@contextmanager
def rename_param(param: str, name: str) -> Iterator[None]:
    """Return a context manager in which errors about the fields `param` and max_tokens are about `name`, the client's
    field."""
    try:
        yield
    except InputError as error:
        if error.param in (param, "max_tokens"):
            error.param = name
        raise


def body_error(error: Mapping[str, Any]) -> InputError | None:
    """Return the error for a body that is not a JSON object, or None for other errors. curl's -d alone sends a form,
    which FastAPI does not parse."""
    if error["type"] == "json_invalid":
        reason = f"{error['ctx']['error']} at character {error['loc'][-1]}"
        return InputError(f"the request body is not valid JSON: {reason[:200]}")
    if error["type"] == "model_attributes_type" and error["loc"] == ("body",):
        return InputError("the request body must be a JSON object, sent with Content-Type: application/json")
    return None


def add_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Answer every exception in the format of its route, and count invalid requests."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        request.scope[ANSWERED_ERROR] = error
        failure = to_failure(error)
        if failure.code == 405:  # Starlette names the methods of one route only
            failure = failure._replace(headers={"Allow": ", ".join(sorted(_methods(app, request.scope)))})
        metrics.invalid += 400 <= failure.code < 500
        return failure.response(request.scope)

    for kind in (InputError, Overloaded, EngineDead, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _methods(app: FastAPI, scope: Scope) -> set[str]:
    """Return the methods of the first path in the order of routes that matches."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return {method for route in routes if route.path == routes[0].path for method in route.methods or ()}


class CatchAllMiddleware:
    """The outermost ASGI middleware. An exception that ends a request is logged once and answered in the format of its
    route; a response that has begun is cut off. `on_exit_request` is called for SystemExit and KeyboardInterrupt."""

    def __init__(self, app: ASGIApp, on_exit_request: Callable[[], object]) -> None:
        self.app, self.on_exit_request = app, on_exit_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except BaseException as error:  # Rust's panics are not Exceptions
            if scope.get(ANSWERED_ERROR) is not error:
                await self._answer_error(error, scope, receive, send)

    async def _answer_error(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            log.error("%s in a request ends the server", type(error).__name__)
            self.on_exit_request()
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling():
            error = RuntimeError("something waited for was cancelled, the request was not")
        # A response that has begun raises RuntimeError at the start of another one.
        with suppress(RuntimeError, TimeoutError):
            async with asyncio.timeout(LAST_ANSWER_SECONDS):
                await to_failure(error).response(scope)(scope, receive, send)
