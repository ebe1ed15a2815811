"""What an operator does to a running server: cached prefixes forgotten, and what the server tells of itself."""

from __future__ import annotations

from typing import Any

import echo_service
import pytest
from asking import ADMIN, KEY, as_admin, bearer, cached
from echo_service import Placement, Running, Servers

from quire.config import EngineConfig
from quire.server.response_models import CacheReset, ServerInfo, TokenizerInfo

pytestmark = pytest.mark.xdist_group(name="care")

PROMPT = list(range(100, 140))
SETTINGS: dict[str, Any] = {
    "model": {"echo": {"pause": 0.002}, "prefix_tokens": 40},
    "config": EngineConfig.of(model="tiny", page_size=4, retention="slack"),
    "keys": [KEY], "admin_keys": [ADMIN], "server_info": True, "tokenizer_info": True,
}  # fmt: skip


@pytest.fixture
def shop(servers: Servers) -> Running:
    return servers(**SETTINGS)


def test_a_reset_forgets_what_nobody_uses(servers: Servers, placement: Placement) -> None:
    with as_admin(servers(**SETTINGS, placement=placement)) as http:
        http.post("/reset_prefix_cache")
        assert [cached(http, PROMPT), cached(http, PROMPT)] == [0, 36]
        answer = http.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"pages": 10})
        CacheReset.model_validate(answer.json(), strict=True)
        assert [cached(http, PROMPT), cached(http, PROMPT)] == [0, 36]
        answer = http.post("/reset_prefix_cache?reset_running_requests=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reset_running_requests")


def test_what_a_server_tells_of_itself(shop: Running) -> None:
    found = shop.http.get("/server_info", headers=bearer(ADMIN)).json()
    ServerInfo.model_validate(found, strict=True)
    assert found["config"] == SETTINGS["config"].flat()
    assert (found["config"]["page_size"], found["config"]["retention"]) == (4, "slack")
    assert found["notices"] == ["an echo"]
    told = shop.http.get("/tokenizer_info", headers=bearer(KEY)).json()
    TokenizerInfo.model_validate(told, strict=True)
    assert told["eos_token"] == "<|end|>"
    assert told["added_tokens_decoder"]["0"]["content"] == "<|end|>"
    assert told["chat_template"] == echo_service.TEMPLATE


@pytest.mark.parametrize("path", ["POST /reset_prefix_cache", "GET /server_info", "GET /v1/prefixes"])
def test_a_key_is_not_enough(shop: Running, path: str) -> None:
    method, path = path.split()
    for headers, status in (({}, 401), (bearer(f"{ADMIN}x"), 401), (bearer(KEY), 403), (bearer(ADMIN), 200)):
        assert shop.http.request(method, path, headers=headers).status_code == status


def test_without_flags_there_is_nothing_told(servers: Servers) -> None:
    running = servers(admin_keys=[ADMIN])
    for path in ("/server_info", "/tokenizer_info"):
        assert running.http.get(path, headers=bearer(ADMIN)).status_code == 404
    assert running.http.post("/reset_prefix_cache").status_code == 403
