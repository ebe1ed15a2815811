"""Middleware around the whole application, also for failures: an X-Request-Id on every response, the path prefix of a
proxy, HTTP counters, and CORS."""

from __future__ import annotations

import uuid

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.counters import CountHttpMiddleware, HttpCounters

REQUEST_ID = "quire.request_id"  # in a request's scope
REQUEST_ID_HEADER = b"x-request-id"
MAX_ID_CHARS = 128  # characters
METHODS = ("GET", "HEAD", "POST", "DELETE")


def request_id(scope: Scope) -> str:
    """Return the client's X-Request-Id if it sent one of 1 to 128 visible ASCII characters, else a new one."""
    given = [value for name, value in scope["headers"] if name == REQUEST_ID_HEADER]
    if len(given) == 1 and 0 < len(given[0]) <= MAX_ID_CHARS and all(0x21 <= byte <= 0x7E for byte in given[0]):
        return str(given[0].decode("ascii"))
    return uuid.uuid4().hex


class RequestIdMiddleware:
    """Sets the request's id in its scope and in its response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[REQUEST_ID] = id = request_id(scope)
        header = (REQUEST_ID_HEADER, id.encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self.app(scope, receive, named)


class RootPathMiddleware:
    """Serves the same routes under `root`, such as "/x". A proxy may remove this prefix from paths or leave it. Inner
    applications see full paths, and `root` as ASGI's root_path."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.root and scope["type"] == "http":
            path = scope["path"]
            whole = path if path.startswith(self.root + "/") else self.root + path
            scope["root_path"], scope["path"] = self.root, whole  # in place: outer middleware reads the inner changes
        await self.app(scope, receive, send)


def wrap_app(
    app: ASGIApp, counters: HttpCounters, root_path: str = "", allowed_origins: tuple[str, ...] = ()
) -> ASGIApp:
    """Return `app` inside all of this middleware. Without `allowed_origins` pages of other origins get no permission,
    not even for preflight requests."""
    if allowed_origins:
        # Outside the check of keys, since a preflight has none. No browser credentials: a page sends its own key.
        app = CORSMiddleware(
            app, allowed_origins, METHODS, allow_headers=("*",), expose_headers=("X-Request-Id", "Retry-After")
        )
    return RequestIdMiddleware(RootPathMiddleware(CountHttpMiddleware(app, counters), root_path))
