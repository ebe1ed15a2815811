"""The OpenAPI document is true: schemathesis sends what it allows and what it doesn't, and compares every answer with
it; the list of routes and the answers of clients' own requests are compared here. Routes that aren't called as FastAPI
calls them answer the same."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from asking import CALL, HERMES, MARKERS, SAID, linked, saying
from echo_service import Running
from fastapi.routing import APIRoute
from pydantic import BaseModel

import quire.server.app
from quire.async_llm import AsyncLLM
from quire.server.app import create_app
from quire.server.response_models import STATUS_DESCRIPTIONS, Chunk, MessageStreamEvent, ResponseStreamEvent

ALWAYS = ("POST /ping", "GET /health", "GET /metrics", "GET /v1/models", "GET /v1/prefixes", "GET /version")
# No schema says which names are; the echo has no embeddings, and this server stores no responses.
NEVER = ("GET /v1/models/{name}", "POST /v1/prefixes", "DELETE /v1/prefixes/{name}", "POST /v1/embeddings",
         "POST /pooling", "POST /score", "POST /rerank", "GET /v1/responses/{name}", "DELETE /v1/responses/{name}",
         "GET /v1/responses/{name}/input_items", "POST /v1/responses/{name}/cancel")  # fmt: skip
SETTINGS = Path(__file__).with_name("schemathesis.toml")


def explored(running: Running, examples: int, folder: Path) -> None:
    """Run all checks of schemathesis; its report is the message of a failure."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(SETTINGS), "run", f"{running.url}/openapi.json",
        "--checks", "all", "--max-examples", str(examples), "--seed", "1", "--continue-on-failure", "--no-color",
        "--request-timeout", "20", "--header", "Authorization: Bearer admin",
        "--report", "json", "--report-json-path", "report.json",
        # Nothing else is answered while it sleeps: test_sleep_http.py.
        "--exclude-path-regex", "/(sleep|wake_up|is_sleeping)$",
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=3000)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "30 selected / 33 total" in found.stdout, "the document has other operations than this test knows"
    for name, rates in json.loads((folder / "report.json").read_text())["valid_rates"].items():
        accepted, rejected = (sum(rate[kind] for rate in rates.values()) for kind in ("accepted", "rejected"))
        assert accepted or name in NEVER, (name, rates)
        assert not (name in ALWAYS and rejected), (name, rates)


@pytest.mark.parametrize("examples", [2, pytest.param(400, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_schemathesis_finds_nothing(examples: int, tmp_path: Path) -> None:
    model = echo_service.built(kv_tokens=4096, prefix_tokens=256)
    with echo_service.serving(model, keys=["user"], admin_keys=["admin"]) as running:
        explored(running, examples, tmp_path)
        assert running.http.get("/health").status_code == 200


def document(running: Running) -> dict[str, Any]:
    return running.http.get("/openapi.json").json()


def test_every_route_is_there_with_its_statuses(echo: Running) -> None:
    found = document(echo)
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
    }
    assert len(operations) == 35
    for operation in operations.values():
        codes = set(operation["responses"])
        assert "422" not in codes
        assert codes <= {"200", *map(str, STATUS_DESCRIPTIONS)}
    assert "HTTPValidationError" not in found["components"]["schemas"]
    assert "securitySchemes" not in found["components"]  # this server asks for no key


def test_requests_name_their_ranges(echo: Running) -> None:
    fields = document(echo)["components"]["schemas"]["CompletionRequest"]["properties"]
    assert (fields["n"]["minimum"], fields["n"]["maximum"]) == (1, 128)
    assert (fields["temperature"]["minimum"], fields["temperature"]["maximum"]) == (0, 100)
    assert fields["logprobs"]["maximum"] == 20


def test_chunks_are_as_described(echo: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "once"}], "logprobs": True, "top_logprobs": 2}
    completion = {"prompt": [5, 6], "logprobs": 2, "echo": True}
    seen = 0
    for path, body in (("completions", completion), ("chat/completions", chat)):
        options = {"include_usage": True, "continuous_usage_stats": True}
        given = {**body, "max_tokens": 5, "n": 2, "stream": True, "stream_options": options, "return_token_ids": True}
        for line in echo.http.post(f"/v1/{path}", json=given).text.split("\n\n"):
            if line and line != "data: [DONE]":
                Chunk.model_validate(json.loads(line.removeprefix("data: ")), strict=True)
                seen += 1
    assert seen >= 8  # chunks may be merged


def test_events_are_as_described() -> None:
    """Those of a thought, a text and calls; the document has their schemas."""
    tools = [{"name": "weather"}]
    asked: dict[str, Any] = {"model": "echo", "stream": True, "max_tokens": 500}
    asked["messages"] = [{"role": "user", "content": "Weather?"}]
    bodies: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
        "/v1/responses": (
            ResponseStreamEvent,
            {
                "input": "Weather?",
                "stream": True,
                "top_logprobs": 1,
                "tools": [{"type": "function", **tools[0]}, {"type": "custom", "name": "shell"}],
            },
        ),
        "/v1/messages": (
            MessageStreamEvent,
            asked | {"tools": [{**tools[0], "input_schema": {"type": "object"}}]},
        ),
    }
    with saying("<think></think>" + HERMES, MARKERS) as talker:
        running = talker.running
        talker.say(f"<think>\nHm.\n</think>\n\n{SAID}" + (CALL % "ls").replace("weather", "shell"))
        schemas = document(running)["components"]["schemas"]
        for path, (model, body) in bodies.items():
            kinds = set()
            for line in httpx.post(running.url + path, json=body).text.strip().split("\n\n"):
                event = json.loads(line.partition("data: ")[2])
                model.model_validate(event, strict=True)
                kinds.add(event["type"])
            described = set(schemas[model.__name__]["discriminator"]["mapping"])
            ends = {"error", "response.failed", "response.incomplete"}
            assert kinds == described - ends
            for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(schemas)):
                assert name in schemas


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
