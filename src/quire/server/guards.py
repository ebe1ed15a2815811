"""ASGI middleware for every route: API and admin keys, and limits on bodies. Only /health needs no key."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import Failure, route_path

OPEN_PATHS = ("/health",)
ADMIN = "quire.admin"  # in a request's scope: True if it has an admin key
CLIENT = "quire.client"  # in a request's scope: see client_of
TRUSTED = "quire.trusted"  # in a request's scope: True if it has a key, or none is needed
MAX_BODY = 8 << 20  # bytes
MAX_BODIES = 256 << 20  # bytes, of all requests in progress
BODY_SECONDS = 60.0  # for a whole body to arrive
MAX_COMMAS = 1 << 18  # in a body, or four per token of the longest prompt
MAX_COLONS_AND_BRACKETS = 1 << 16  # colons and opening brackets in a body, or one per token of the longest prompt
CHARS_PER_SLASH = 32  # characters of base64 per slash, which some clients write as \/
MAX_BACKSLASHES = 1 << 20  # in a body, or eight per token of the longest prompt


def request_keys(scope: Scope) -> list[bytes]:
    """Return the keys of a request: "Authorization: Bearer KEY" and, as Anthropic's clients send it, "x-api-key: KEY".
    A header that occurs twice is ignored."""
    given = [(name, value) for name, value in scope.get("headers", ()) if name in (b"authorization", b"x-api-key")]
    bearers = [value for name, value in given if name == b"authorization"]
    plain = [value.strip() for name, value in given if name == b"x-api-key"]
    scheme, _, key = bearers[0].partition(b" ") if len(bearers) == 1 else (b"", b"", b"")
    return ([key.strip()] if scheme.lower() == b"bearer" else []) + (plain if len(plain) == 1 else [])


class ApiKeyMiddleware:
    """Refuses requests without a key (`request_keys`), except to OPEN_PATHS and `open_paths`. An admin key is also a
    key; `require_admin` checks for it."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str] = (), open_paths: Sequence[str] = ()
    ) -> None:
        self.app, self.open_paths = app, (*OPEN_PATHS, *open_paths)
        self.keys = [key.encode() for key in keys]
        self.admin_keys = [key.encode() for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admin, known = self._match_key(scope, self.admin_keys), self._match_key(scope, self.keys)
        scope[ADMIN], scope[TRUSTED] = bool(admin), bool(not self.keys or known or admin)
        key = known or admin
        scope[CLIENT] = sha256(key).hexdigest()[:32] if key and self.keys else ""
        if scope["type"] == "lifespan" or scope[TRUSTED] or route_path(scope) in self.open_paths:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"WWW-Authenticate": "Bearer"}
            await Failure(401, "a valid API key is required", headers=headers).response(scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    @staticmethod
    def _match_key(scope: Scope, keys: Sequence[bytes]) -> bytes:
        """Return the one of `keys` that a request has, or b""."""
        # Every key is compared, so that the time does not depend on which one is similar.
        matches = [(hmac.compare_digest(key, known), known) for key in request_keys(scope) for known in keys]
        return next((known for equal, known in matches if equal), b"")


def client_of(request: Request) -> str:
    """Return the client for fair sharing: a digest of the API key, or "" without keys."""
    client: str = request.scope.get(CLIENT, "")
    return client


async def require_admin(request: Request) -> None:
    """Raise a 403 without an admin key. A dependency of admin routes: since the route checks, no spelling of the path
    avoids it."""
    if not request.scope.get(ADMIN):
        raise HTTPException(403, "an admin key is required; without one in the server's settings this route is shut")


class CharLimit(NamedTuple):
    """The most of the characters `chars` that a body may have."""

    name: str
    chars: tuple[bytes, ...]
    max_count: int


class BodyLimitMiddleware:
    """Reads the body of a request before the route is called: at most `max_body` bytes, within `seconds`, and at most
    MAX_BODIES for all requests in progress, or a frontend's share of that.

    The time for which parsing JSON holds the interpreter depends on the number of values, not of bytes. So the
    characters that separate and open values are limited, and backslashes, which begin escapes. The limits grow with
    `max_len`, the longest prompt in tokens, and `image_chars`, the most characters of images in a body.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body: int = MAX_BODY,
        max_len: int = 0,
        seconds: float = BODY_SECONDS,
        num_frontends: int = 1,
        image_chars: int = 0,
    ) -> None:
        max_body += image_chars + image_chars // CHARS_PER_SLASH
        self.app, self.max_body, self.seconds, self.num_frontends = app, max_body, seconds, num_frontends
        self.held_bytes = 0
        self.char_limits = (
            CharLimit("commas", (b",",), max(MAX_COMMAS, 4 * max_len)),
            CharLimit("colons and opening brackets", (b":", b"[", b"{"), max(MAX_COLONS_AND_BRACKETS, max_len)),
            CharLimit("backslashes", (b"\\",), max(MAX_BACKSLASHES, 8 * max_len) + image_chars // CHARS_PER_SLASH),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            await self._call_bounded(parts, scope, receive, send)
        finally:
            self.held_bytes -= sum(map(len, parts))

    async def _call_bounded(self, parts: list[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(parts, scope, receive)
        except TimeoutError:
            body = Failure(408, f"the request body did not arrive within {self.seconds:g} s")
        if body is None:
            return  # the client left
        if isinstance(body, Failure):
            headers = {"Connection": "close", **(body.headers or {})}
            await body._replace(headers=headers).response(scope)(scope, receive, send)
            return
        first = True

        async def replay() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self.app(scope, replay, send)

    async def _read(self, parts: list[bytes], scope: Scope, receive: Receive) -> bytes | Failure | None:
        """Read the body. The `parts` are counted in `held_bytes`. Return a Failure if it exceeds a limit, None if the
        client left."""
        too_large = Failure(413, f"the request body may have at most {self.max_body} bytes")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self.max_body:
            return too_large
        size, more, counts = 0, True, [0 for _ in self.char_limits]
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            more = message.get("more_body", False)
            if size > self.max_body:
                return too_large
            counts = [count + sum(map(part.count, kind.chars)) for count, kind in zip(counts, self.char_limits)]
            most = min(MAX_BODIES, max(MAX_BODIES // self.num_frontends, self.max_body))
            if self.held_bytes + len(part) > most:
                full = f"the bodies of requests under way have {self.held_bytes} bytes; the limit is {most}"
                return Failure(503, full, headers={"Retry-After": "1"})
            if self._limit_failure(counts) is None:
                parts.append(part)
                self.held_bytes += len(part)
            else:  # read the rest nevertheless: most clients read the response only after they have sent everything
                self.held_bytes -= sum(map(len, parts))
                parts.clear()
        return self._limit_failure(counts) or b"".join(parts)

    def _limit_failure(self, counts: Sequence[int]) -> Failure | None:
        for count, kind in zip(counts, self.char_limits):
            if count > kind.max_count:
                return Failure(413, f"the request body may have at most {kind.max_count} {kind.name}, got {count}")
        return None
