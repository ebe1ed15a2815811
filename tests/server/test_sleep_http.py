"""Sleep and wake-up over HTTP: who is refused meanwhile and how, what is there again afterwards, and bad input."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from asking import ADMIN, KEY, as_admin, bearer, cached
from echo_service import Echo, Placement, Running, Servers
from waiting import wait_until

from quire.config import EngineConfig
from quire.errors import InputError, NotIdle, StartupError
from quire.protocol.sampling_params import SamplingParams
from quire.server.response_models import CacheReset, ServerInfo, SleepStatus, TokenizerInfo

pytestmark = pytest.mark.xdist_group(name="sleep_http")

PROMPT = list(range(100, 140))
LONG = {"prompt": PROMPT, "max_tokens": 80, "seed": 1, "ignore_eos": True, "logprobs": 0}
AWAKE = {"is_sleeping": False, "level": 0, "away": []}


@pytest.fixture
def shop(servers: Servers, loose_brake: Path, placement: Placement) -> Running:
    model = {"echo": {"pause": 0.005, "brake": str(loose_brake)}, "prefix_tokens": 40}
    return servers(model, keys=[KEY], admin_keys=[ADMIN], placement=placement)


@pytest.fixture
def http(shop: Running) -> Iterator[httpx.Client]:
    with as_admin(shop) as client:
        client.post("/reset_prefix_cache")
        yield client
        client.post("/wake_up")
        assert client.get("/is_sleeping").json() == AWAKE
        assert shop.llm.active == 0


def slept(http: httpx.Client, query: str = "") -> dict[str, Any]:
    answer = http.post(f"/sleep{query}")
    assert answer.status_code == 200, answer.text
    SleepStatus.model_validate(answer.json(), strict=True)
    assert http.get("/is_sleeping").json() == answer.json()
    return dict(answer.json())


def begun(shop: Running, http: httpx.Client, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """A request that runs for 0.4 s, braked for 16."""
    return echo_service.begun(shop, pool, lambda: http.post("/v1/completions", json=LONG))


def refusal_to(http: httpx.Client) -> httpx.Response | None:
    """The answer to a short request, unless it is served."""
    answer = http.post("/v1/completions", json={**LONG, "max_tokens": 1})
    return None if answer.status_code == 200 else answer


@pytest.mark.parametrize("level", [1, 2])
def test_a_night(shop: Running, http: httpx.Client, level: int) -> None:
    assert http.post("/v1/prefixes", json={"name": "rules", "token_ids": PROMPT[:22]}).status_code == 200
    assert [cached(http, PROMPT), cached(http, PROMPT)] == [22, 36]
    assert slept(http, f"?level={level}") == {"is_sleeping": True, "level": level, "away": ["weights", "kv_cache"]}
    steps = shop.llm.metrics.stats.steps
    for path, body in (("completions", LONG), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        answer = http.post(f"/v1/{path}", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert f"level {level}" in answer.json()["error"]["message"]
    assert http.post("/v1/prefixes", json={"name": "more", "token_ids": PROMPT[:8]}).status_code == 503
    assert [entry["status"] for entry in http.get("/v1/prefixes").json()["data"]] == ["computing"]
    assert http.get("/health").status_code == 200
    assert http.post("/tokenize", json={"prompt": "once"}).status_code == 200
    assert shop.llm.metrics.stats.steps == steps, "something was computed"
    state = 'sleep_state="' + ("weights_offloaded", "discard_all")[level - 1] + '"} 1.0'
    assert state in http.get("/metrics").text
    assert http.post("/wake_up").json() == AWAKE
    assert cached(http, PROMPT[22:]) == 0
    assert [cached(http, PROMPT), cached(http, PROMPT)] == [22, 36], "the registered prefix is there, and nothing else"
    assert http.get("/v1/prefixes").json()["data"][0]["status"] == "ready"
    assert 'sleep_state="awake"} 1.0' in http.get("/metrics").text
    assert http.delete("/v1/prefixes/rules").status_code == 200


def test_in_two_steps_and_deeper(http: httpx.Client) -> None:
    assert slept(http)["level"] == 1
    assert slept(http)["level"] == 1
    assert slept(http, "?level=2")["level"] == 2
    assert slept(http, "?level=1")["level"] == 2, "weights that are dropped stay so"
    answer = http.post("/wake_up?tags=kv_cache")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tags")
    half = {"is_sleeping": True, "level": 2, "away": ["kv_cache"]}
    assert http.post("/wake_up?tags=weights").json() == half
    assert http.post("/v1/completions", json=LONG).status_code == 503
    assert http.post("/wake_up?tags=weights").json() == half
    assert http.post("/wake_up?tags=weights&tags=kv_cache").json() == AWAKE
    assert http.post("/wake_up").json() == AWAKE
    cached(http, PROMPT)


def test_a_prefix_is_let_go_asleep(http: httpx.Client) -> None:
    assert http.post("/v1/prefixes", json={"name": "rules", "token_ids": PROMPT[:22]}).status_code == 200
    slept(http)
    assert http.delete("/v1/prefixes/rules").status_code == 200
    assert http.delete("/v1/prefixes/rules").status_code == 404
    http.post("/wake_up")
    assert cached(http, PROMPT) == 0


def test_with_requests_under_way(shop: Running, http: httpx.Client, loose_brake: Path) -> None:
    whole = http.post("/v1/completions", json=LONG).json()["choices"][0]["logprobs"]["tokens"]
    with ThreadPoolExecutor(4) as pool:
        loose_brake.touch()
        running = begun(shop, http, pool)
        answer = http.post("/sleep")
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "ConflictError")
        assert "1 requests run and 0 wait" in answer.json()["error"]["message"]
        waiting = pool.submit(http.post, "/sleep?level=2&mode=wait")
        refused = wait_until(lambda: refusal_to(http), "requests are refused")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert "about to sleep" in refused.json()["error"]["message"]
        assert http.post("/sleep?mode=wait").status_code == 409, "one sleep is awaited"
        loose_brake.unlink()
        assert running.result().json()["choices"][0]["logprobs"]["tokens"] == whole
        assert waiting.result().json()["level"] == 2
        assert http.post("/wake_up").json() == AWAKE

        loose_brake.touch()
        running = begun(shop, http, pool)
        assert http.post("/sleep?mode=abort").json()["level"] == 1
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"
        assert http.post("/wake_up").json() == AWAKE

        running = begun(shop, http, pool)
        waiting = pool.submit(http.post, "/sleep?mode=wait")
        wait_until(lambda: refusal_to(http), "requests are refused")
        assert http.post("/wake_up").json() == AWAKE
        loose_brake.unlink()
        assert (waiting.result().status_code, running.result().status_code) == (409, 200)


def test_a_wake_up_that_fails_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Echo, tags: Any) -> None:
        raise StartupError("a secret of the checkpoint")

    with echo_service.serving(admin_keys=[ADMIN], placement="thread") as running, as_admin(running) as http:
        wanted = cached(http, PROMPT)
        status = slept(http)
        with monkeypatch.context() as patched:
            patched.setattr(Echo, "wake", fail)
            answer = http.post("/wake_up")
        assert answer.status_code == 503, answer.text
        assert "secret" not in answer.text
        assert "a secret of the checkpoint" in caplog.text
        assert http.get("/is_sleeping").json() == status
        assert http.post("/wake_up").json() == AWAKE
        assert cached(http, PROMPT) == wanted


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"), ("/sleep?level=0", "level"), ("/sleep?level=", "level"),
        ("/sleep?level=one", "level"), (f"/sleep?level={'9' * 5000}", "level"), ("/sleep?mode=keep", "mode"),
        ("/sleep?depth=1", "depth"), ("/wake_up?tags=weight", "tags"), ("/wake_up?tags=weights&tags=", "tags"),
        (f"/wake_up?{'&'.join(['tags=weights'] * 17)}", "tags"), ("/wake_up?tag=weights", "tag"),
    ],
)  # fmt: skip
def test_what_is_no_sleep(servers: Servers, path: str, param: str) -> None:
    with as_admin(servers(keys=[KEY], admin_keys=[ADMIN])) as http:
        answer = http.post(path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert len(answer.content) < 1000
        assert http.get("/is_sleeping").json() == AWAKE


def test_in_python(shop: Running, http: httpx.Client) -> None:
    async def night() -> None:
        assert not await shop.llm.is_sleeping()
        for wrong in ({"level": 3}, {"level": True}, {"level": "1"}, {"mode": "x"}):
            with pytest.raises(InputError):
                await shop.llm.sleep(**wrong)
        stream = await shop.llm.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
        with pytest.raises(NotIdle):
            await shop.llm.sleep()
        assert (await shop.llm.sleep(2, "abort"))["level"] == 2
        assert [output.finish_reason async for output in stream][-1] == "abort"
        with pytest.raises(Exception, match="sleeps") as refused:
            await shop.llm.submit(PROMPT, SamplingParams(max_tokens=1))
        assert refused.type.__name__ in ("Asleep", "Overloaded")  # over a wire it is the latter
        assert not (await shop.llm.wake_up(["weights", "kv_cache"]))["away"]

    asyncio.run(night())


# Cached prefixes forgotten, and what the server tells of itself

SETTINGS: dict[str, Any] = {
    "model": {"echo": {"pause": 0.002}, "prefix_tokens": 40},
    "config": EngineConfig.of(model="tiny", page_size=4, retention="slack"),
    "keys": [KEY], "admin_keys": [ADMIN], "server_info": True, "tokenizer_info": True,
}  # fmt: skip


@pytest.fixture
def informed(servers: Servers) -> Running:
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


def test_what_a_server_tells_of_itself(informed: Running) -> None:
    found = informed.http.get("/server_info", headers=bearer(ADMIN)).json()
    ServerInfo.model_validate(found, strict=True)
    assert found["config"] == SETTINGS["config"].flat()
    assert (found["config"]["page_size"], found["config"]["retention"]) == (4, "slack")
    assert found["notices"] == ["an echo"]
    told = informed.http.get("/tokenizer_info", headers=bearer(KEY)).json()
    TokenizerInfo.model_validate(told, strict=True)
    assert told["eos_token"] == "<|end|>"
    assert told["added_tokens_decoder"]["0"]["content"] == "<|end|>"
    assert told["chat_template"] == echo_service.TEMPLATE


@pytest.mark.parametrize("path", ["POST /reset_prefix_cache", "GET /server_info", "GET /v1/prefixes"])
def test_a_key_is_not_enough(informed: Running, path: str) -> None:
    method, path = path.split()
    for headers, status in (({}, 401), (bearer(f"{ADMIN}x"), 401), (bearer(KEY), 403), (bearer(ADMIN), 200)):
        assert informed.http.request(method, path, headers=headers).status_code == status


def test_without_flags_there_is_nothing_told(servers: Servers) -> None:
    running = servers(admin_keys=[ADMIN])
    for path in ("/server_info", "/tokenizer_info"):
        assert running.http.get(path, headers=bearer(ADMIN)).status_code == 404
    assert running.http.post("/reset_prefix_cache").status_code == 403
