"""Request ids, HEAD, pages of other origins: what stands around the application."""

from __future__ import annotations

import logging
import re

import httpx
import pytest
from asking import bearer
from echo_service import Running, Servers

from quire.config import EngineConfig

pytestmark = pytest.mark.xdist_group(name="proxy")

KEY = bearer("sk-test")
PAGE = "https://app.example"
PREFLIGHT = {
    "Origin": PAGE, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}  # fmt: skip


@pytest.fixture
def browsers(servers: Servers) -> Running:
    return servers(keys=["sk-test"], allowed_origins=[PAGE, "http://localhost:3000"])


def body(**more: object) -> dict[str, object]:
    return {"prompt": "a", "max_tokens": 2, **more}


@pytest.mark.parametrize("id", ["a", "7f9-Z_!~", "x" * 128])
def test_a_sane_request_id_comes_back(echo: Running, id: str) -> None:
    headers = {"X-Request-Id": id}
    for answer in (
        echo.http.get("/health", headers=headers),
        echo.http.get("/nothing", headers=headers),
        echo.http.post("/v1/completions", json=body(), headers=headers),
        echo.http.post("/v1/completions", json=body(stream=True), headers=headers),
        echo.http.post("/v1/completions", json=body(n="x"), headers=headers),
        echo.http.post("/v1/completions", content=b"x" * (9 << 20), headers=headers),
        echo.http.put("/v1/models", headers=headers),
    ):
        assert answer.headers.get_list("x-request-id") == [id], answer


@pytest.mark.parametrize("ids", [[b""], [b"x" * 129], [b"a b"], [b"a\tb"], ["é".encode()], [b"\x7f"], [b"a", b"b"]])
def test_any_other_is_replaced(http: httpx.Client, ids: list[bytes]) -> None:
    headers = [(b"X-Request-Id", id) for id in ids]
    made = [http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
    assert made[0] != made[1]


def test_refusals_and_defects_have_ids_too(
    browsers: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"X-Request-Id": "mine", "Origin": PAGE}
    refused = browsers.http.get("/v1/models", headers=headers)
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")

    def broken() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(browsers.llm, "heartbeat", broken)
    defect = browsers.http.get("/health", headers=headers)
    assert (defect.status_code, defect.headers["x-request-id"]) == (500, "mine")
    for answer in (refused, defect):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/version", "/v1/models"])
def test_head(echo: Running, path: str) -> None:
    head, get = echo.http.head(path), echo.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert head.headers["x-request-id"]
    assert echo.http.head("/v1/completions").status_code == 405


def test_a_preflight_carries_no_key(browsers: Running) -> None:
    answer = browsers.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    asked = browsers.http.post("/v1/completions", json=body(), headers={**KEY, "Origin": PAGE})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    without = browsers.http.post("/v1/completions", json=body(), headers={"Origin": PAGE})
    assert without.status_code == 401
    other = {**PREFLIGHT, "Origin": "https://evil.example"}
    assert browsers.http.options("/v1/completions", headers=other).status_code == 400
    answer = browsers.http.get("/v1/models", headers={**KEY, "Origin": other["Origin"]})
    assert "access-control-allow-origin" not in answer.headers
    assert browsers.http.head("/metrics").status_code == 401


def test_without_the_flag_there_is_no_cors(servers: Servers, echo: Running) -> None:
    assert echo.http.options("/v1/completions", headers=PREFLIGHT).status_code == 405
    answer = echo.http.get("/v1/models", headers={"Origin": PAGE})
    assert not any("access-control" in name for name in answer.headers)
    locked = servers(keys=["sk-quire-test-key"])
    assert locked.http.options("/v1/completions", headers=PREFLIGHT).status_code == 401
    answer = httpx.get(f"{servers(allowed_origins=['*']).url}/v1/models", headers={"Origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == "*"


def test_requests_are_logged_without_their_text(
    servers: Servers, echo: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.server")
    url = servers(log_requests=True, config=EngineConfig()).url
    asked = body(prompt="secret words", stop=["a\nb"], seed=7)
    answer = httpx.post(f"{url}/v1/completions", json=asked, headers={"X-Request-Id": "mine"})
    httpx.post(f"{url}/v1/completions", json=body(n=0))
    asked = body(stop=["a\n" * 100] * 16, allowed_token_ids=[*range(500)], skip_special_tokens=False)
    httpx.post(f"{url}/v1/completions", json=asked)
    echo.http.post("/v1/completions", json=body())
    line, long = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert line.startswith(f"request {answer.json()['id']} (X-Request-Id mine): 1 prompts, ")
    assert "max_tokens=2" in line
    assert "seed=7" in line
    assert "secret" not in line
    assert "allowed_token_ids=(0, 1, 2, 3, 4, 5, ...), max_tokens=2, skip_special_tokens=False" in long
    assert "automaton" not in long
    assert "\n" not in line + long
