"""The API key covers every route but /health; bodies and headers are bounded however they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator

import httpx
import pytest
from asking import KEY, bearer, connect, openai_of
from echo_service import Running, Servers
from openai import AuthenticationError
from starlette.types import Message, Receive, Scope, Send

from quire.server import guards
from quire.server.console import OPEN_PATHS as CONSOLE
from quire.server.guards import MAX_BACKSLASHES, MAX_COLONS_AND_BRACKETS, MAX_COMMAS, BodyLimitMiddleware

pytestmark = pytest.mark.xdist_group(name="guards")

HEADERS = {**bearer(KEY), "Content-Type": "application/json"}
ADMIN = ("/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping")  # beside those of prefixes


@pytest.fixture
def locked(servers: Servers) -> Running:
    return servers(keys=[KEY, "another"], max_body=10_000)


def test_every_route_needs_the_key(locked: Running) -> None:
    """Iterates the application's own routes, so that a new one can't be forgotten."""
    seen = 0
    for route in locked.app.routes:
        for method in route.methods:
            if method == "HEAD":
                continue
            path = route.path.replace("{name:path}", "echo").replace("{name}", "none")
            if path in CONSOLE:  # files without data
                continue
            status = locked.http.request(method, path).status_code
            assert status == (200 if path == "/health" else 401), (method, path)
            with locked.http.stream(method, path, headers=bearer(KEY)) as allowed:
                wanted = (403,) if "prefixes" in path or path in ADMIN else (200, 400)
                if path.startswith("/v1/responses/none"):
                    wanted = (404,)
                assert allowed.status_code in wanted, (method, path)
            seen += 1
    assert seen >= 20


def test_why_it_is_ill_is_told_to_who_has_a_key(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locked.http.get("/health").content == b""
    monkeypatch.setattr(locked.llm, "accepting", False)
    answer = locked.http.get("/health")
    assert (answer.status_code, answer.content) == (503, b"")
    answer = locked.http.get("/health", headers={"x-api-key": KEY})
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    for method in ("GET", "POST"):
        assert locked.http.request(method, "/ping", headers=bearer(KEY)).status_code == 503


def test_wrong_keys_and_paths_like_health(locked: Running) -> None:
    for header in ("", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"):
        answer = locked.http.get("/v1/models", headers={"Authorization": header})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), header
    assert locked.http.get("/v1/models", headers=bearer("another")).status_code == 200
    with openai_of(locked, "wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()
    for path in ("/health/", "//health", "/v1/../health", "/HEALTH", "/nothing", "/health?x=/metrics"):
        with connect(locked) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert raw.recv(1000).split()[1] == (b"200" if path.startswith("/health?") else b"401"), path


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_a_root_path_is_stripped_or_not_and_opens_nothing_else(servers: Servers, prefix: str) -> None:
    url = servers(keys=[KEY], root_path="/api").url + prefix
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/models/echo", "/api/health", "/health/api", "/apihealth"):
        assert httpx.get(url + path).status_code == 401 or (prefix, path) == ("", "/api/health"), path
    with httpx.Client(base_url=url, headers=HEADERS) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "echo"
        assert client.get("/v1/models/parrot").json()["id"] == "parrot"
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/api"}]
    assert httpx.get(f"{url}/apiv1/models", headers=HEADERS).status_code == 404


def test_a_key_in_the_query_opens_nothing_and_is_not_logged(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for query in (f"api_key={KEY}", f"key={KEY}", f"Authorization=Bearer%20{KEY}", f"access_token={KEY}"):
        for path in ("/v1/models", "/metrics", "/nothing"):
            assert locked.http.get(f"{path}?{query}").status_code == 401
    answer = locked.http.get(f"/nothing?key={KEY}", headers=HEADERS)
    assert answer.status_code == 404
    assert KEY not in answer.text
    others = ("httpx", "httpcore", "uvicorn.access")  # what the client sends; the access log, which is off
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith(others)]
    assert not [line for line in logged if KEY in line]


def dense(commas: int, opened: int) -> bytes:
    """JSON with so many commas, and colons and brackets: a field that is too long, beside much that is unknown."""
    rest = (b"[" * 900 + b"]" * 900 + b",") * ((opened - 3) // 900) + b"[" * ((opened - 3) % 900)
    body = b'{"prompt":[%s' % rest + b"]" * ((opened - 3) % 900)
    left = commas - body.count(b",")
    return body + b"1" * (body[-1:] in b",[") + b",1" * left + b"]}"


def escaped(escapes: int) -> bytes:
    """JSON with so many escapes: a string is parsed in pieces, from one to the next."""
    return b'{"prompt":"%s"}' % (b"\\n" * escapes)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("body", "marks", "limit", "name"),
    [
        (lambda count: dense(count, 3), b",", MAX_COMMAS, "commas"),
        (lambda count: dense(1000, count), b":[{", MAX_COLONS_AND_BRACKETS, "colons and opening brackets"),
        (escaped, b"\\", MAX_BACKSLASHES, "backslashes"),
    ],
    ids=["commas", "opened", "escapes"],
)
def test_bodies_of_too_many_values(
    http: httpx.Client, body: Callable[[int], bytes], marks: bytes, limit: int, name: str, chunked: bool
) -> None:
    """What is parsed is bounded by what it holds, whatever its bytes are; what is sent is read to its end."""

    def post(body: bytes) -> httpx.Response:
        content = (body[at : at + 99_999] for at in range(0, len(body), 99_999)) if chunked else body
        return http.post("/v1/completions", content=content, headers=HEADERS)

    most, more = body(limit), body(limit + 1)
    json.loads(most)
    assert sum(most.count(mark) for mark in marks) == limit
    assert post(most).json()["error"]["param"] == "prompt"
    for sent in (more, more + b" " * 4_000_000):
        answer = post(sent)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == f"the request body may have at most {limit} {name}, got {limit + 1}"


def test_longer_models_read_more_values(locked: Running) -> None:
    limits = BodyLimitMiddleware(locked.app, max_len=1 << 20).char_limits
    assert [kind.max_count for kind in limits] == [1 << 22, 1 << 20, 1 << 23]


def test_endless_chunked_body_is_cut(locked: Running) -> None:
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        while sent < 50_000_000:
            sent += 4096
            yield b"x" * 4096

    with contextlib.suppress(httpx.TransportError):
        locked.http.post("/v1/completions", content=pieces(), headers=HEADERS)
    assert sent < 50_000_000, "the server read on and on"


async def status(bound: BodyLimitMiddleware, *parts: bytes) -> int:
    """Return the status of the response to a body in these parts."""
    left, statuses = [*parts], list[int]()

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await bound({"type": "http", "path": "/", "headers": []}, receive, send)
    [only] = statuses
    return only


def test_a_body_that_does_not_come_is_a_408() -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError("it is waited for")

    async def ask(path: str) -> list[Message]:
        sent = list[Message]()

        async def send(message: Message) -> None:
            sent.append(message)

        bound = BodyLimitMiddleware(accept, seconds=0.05)
        await bound({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        return sent

    for path, name in (("/v1/completions", "RequestTimeoutError"), ("/v1/messages", "timeout_error")):
        start, body = asyncio.run(ask(path))
        assert start["status"] == 408
        assert json.loads(body["body"])["error"]["type"] == name


async def accept(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_bodies_under_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 60 bytes, while the others are being answered; the third finds room when one has gone."""
    monkeypatch.setattr(guards, "MAX_BODIES", 130)
    done = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await done.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    bound, body = BodyLimitMiddleware(slow), b"x" * 60

    async def all_of_them() -> None:
        first = [asyncio.create_task(status(bound, body)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await status(bound, body) == 503
        done.set()
        assert await asyncio.gather(*first) == [200, 200]
        assert await status(bound, body) == 200

    asyncio.run(all_of_them())
    assert bound.held_bytes == 0


def test_parts_of_a_body_are_bounded_together() -> None:
    bound = BodyLimitMiddleware(accept, max_body=100)
    assert asyncio.run(status(bound, b"x" * 50, b"x" * 50)) == 200
    assert asyncio.run(status(bound, b"x" * 50, b"x" * 50, b"x")) == 413
    assert bound.held_bytes == 0


def test_a_refused_body_of_too_many_values_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MAX_COMMAS", 9)
    bound = BodyLimitMiddleware(accept)
    assert asyncio.run(status(bound, b"," * 6, b"," * 6, b"," * 6)) == 413
    assert bound.held_bytes == 0
