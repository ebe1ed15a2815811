"""Routes that aren't called as FastAPI calls them: what they answer, and what the document says, is the same."""

from __future__ import annotations

import asyncio
from typing import Any

import echo_service
import httpx
import pytest
from asking import linked
from fastapi.routing import APIRoute

import quire.server.app
from quire.async_llm import AsyncLLM
from quire.server.app import create_app
from quire.server.routes import PlainRoute

JSON = {"Content-Type": "application/json"}
BODIES: list[tuple[bytes, dict[str, str]]] = [
    (b"", JSON), (b" ", JSON), (b"{", JSON), (b"null", JSON), (b"[]", JSON), (b'"a"', JSON), (b"3", JSON),
    (b"{}", JSON), (b"\xff", JSON), (b'{"prompt": "\xff"}', JSON), (b"[" * 5000, JSON), (b"9" * 5000, JSON),
    (b'{"prompt": NaN}', JSON), (b'{"prompt": "a", "prompt": 3}', JSON), (b'{"prompt": ["a", 3]}', JSON),
    (b'{"prompt": "a", "n": "3"}', JSON), (b'{"prompt": "a", "n": 1.0}', JSON), (b'{"messages": 3}', JSON),
    (b'{"prompt": "a", "max_tokens": 1}', {}), (b'{"prompt": "a"}', {"Content-Type": "text/plain"}),
    (b'{"prompt": "a", "max_tokens": 1e400}', JSON), (b'{"prompt": "\\ud800"}', JSON), (b"\xef\xbb\xbf{}", JSON),
    (b'{"prompt": "a", "max_tokens": 1}', {"Content-Type": "application/x-www-form-urlencoded"}),
    (b'{"prompt": "a", "n": null}', {"Content-Type": "Application/JSON; charset=utf-8"}),
    *((b'{"prompt": "a", "n": []}', {"Content-Type": f"application/{kind}"}) for kind in ("vnd.api+json", "jsonl")),
    *((b'{"prompt": "a", "n": []}', {"Content-Type": kind}) for kind in ("json", "text/json", "multipart/form-data")),
    (b'{"prompt": 3}'.decode().encode("utf-16"), JSON), (b'{"tokens": [1, "a"]}', JSON), (b'{"tokens": [1]}', JSON),
]  # fmt: skip


async def answers(llm: AsyncLLM) -> list[tuple[int, Any]]:
    """To all bodies, at all routes that take one; and to one with none."""
    found = []
    app = create_app(llm, ["echo"], admin_keys=["k"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/prefixes"):
            for body, headers in BODIES:
                answer = await http.post(path, content=body, headers=headers)
                told = answer.json()
                found.append((answer.status_code, told.get("error", answer.status_code)))
        for path in ("/health?a=b", "/v1/models", "/version", "/openapi.json", "/v1/models/none", "/v1/prefixes"):
            answer = await http.get(path)
            found.append((answer.status_code, {**answer.json(), "data": 0} if answer.content else None))
    return found


def test_answers_are_fastapis(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(echo_service.built(), "thread") as llm:
        ours = asyncio.run(answers(llm))
        monkeypatch.setattr(quire.server.app, "PlainRoute", APIRoute)
        theirs = asyncio.run(answers(llm))
    assert ours == theirs
    assert {status for status, _ in ours} == {200, 400, 403, 404}


def test_which_routes_are_plain() -> None:
    with linked(echo_service.built(), "thread") as llm:
        app = create_app(llm, ["echo"])
    admin = {"/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"}
    fastapis = {route.path for route in app.routes if isinstance(route, PlainRoute) and route.needs_fastapi}
    assert fastapis == {"/v1/models/{name:path}", "/v1/prefixes", "/v1/prefixes/{name}", "/v1/responses/{name}", *admin}
