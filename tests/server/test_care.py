"""What an operator does to a running server: cached prefixes forgotten, and what the server tells of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import echo_service
import httpx
import pytest
from asking import ADMIN, KEY, bearer, cached, tokens_of
from echo_service import Placement, Running, Servers

from quire.config import EngineConfig
from quire.server.schemas import Emptied, ServerInfo, TokenizerInfo

pytestmark = pytest.mark.xdist_group(name="care")

HEADERS = bearer(ADMIN)
PROMPT = list(range(100, 140))


SETTINGS: dict[str, Any] = {
    "model": {"echo": {"pause": 0.002}, "prefix_tokens": 40}, "config": EngineConfig(model="tiny", page_size=4),
    "keys": [KEY], "admin_keys": [ADMIN], "server_info": True, "tokenizer_info": True,
}  # fmt: skip


@pytest.fixture
def shop(servers: Servers) -> Running:
    return servers(**SETTINGS)


@pytest.fixture
def http(shop: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shop.url, timeout=20, headers=HEADERS) as client:
        yield client


@pytest.fixture
def placed_http(servers: Servers, placement: Placement) -> Iterator[httpx.Client]:
    running = servers(**SETTINGS, placement=placement)
    with httpx.Client(base_url=running.url, timeout=20, headers=HEADERS) as client:
        yield client


def test_a_reset_forgets_what_nobody_uses(placed_http: httpx.Client) -> None:
    http = placed_http
    http.post("/reset_prefix_cache")
    assert [cached(http, PROMPT), cached(http, PROMPT)] == [0, 36]
    answer = http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"pages": 10})
    Emptied.model_validate(answer.json(), strict=True)
    assert [cached(http, PROMPT), cached(http, PROMPT)] == [0, 36]


def test_a_reset_disturbs_nobody_who_runs(placed_http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": True, "logprobs": 0}
    http, pieces, resets = placed_http, [], []
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += choices[0]["logprobs"]["tokens"]
                if not resets:
                    resets.append(http.post("/reset_prefix_cache").status_code)
                    resets.append(cached(http, PROMPT))
    assert resets == [200, 0], "what ran before the reset was found"
    assert pieces == [echo_service.tokenizer().convert_id(token) for token in tokens_of(PROMPT, 1, 0, 60)]


def test_what_a_server_tells_of_itself(shop: Running, http: httpx.Client) -> None:
    found = http.get("/server_info").json()
    ServerInfo.model_validate(found, strict=True)
    assert (found["config"]["model"], found["config"]["page_size"]) == ("tiny", 4)
    assert found["notices"] == ["an echo"]
    told = httpx.get(f"{shop.url}/tokenizer_info", headers=bearer(KEY)).json()
    TokenizerInfo.model_validate(told, strict=True)
    assert told["eos_token"] == "<|end|>"
    assert told["added_tokens_decoder"]["0"]["content"] == "<|end|>"
    assert told["chat_template"] == echo_service.TEMPLATE


@pytest.mark.parametrize("path", ["POST /reset_prefix_cache", "GET /server_info", "GET /v1/prefixes"])
def test_a_key_is_not_enough(shop: Running, path: str) -> None:
    method, path = path.split()
    for headers, status in (({}, 401), (bearer(f"{ADMIN}x"), 401), (bearer(KEY), 403), (HEADERS, 200)):
        assert httpx.request(method, shop.url + path, headers=headers).status_code == status


def test_what_is_asked_beside_is_refused(http: httpx.Client) -> None:
    answer = http.post("/reset_prefix_cache?reset_running_requests=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reset_running_requests")


def test_without_flags_there_is_nothing_told(servers: Servers) -> None:
    running = servers(admin_keys=[ADMIN])
    for path in ("/server_info", "/tokenizer_info"):
        assert httpx.get(running.url + path, headers=HEADERS).status_code == 404
    assert httpx.post(f"{running.url}/reset_prefix_cache").status_code == 403
