"""The console's files, and what it is told; how it looks in a browser is for test_console_browser."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asking
import echo_service
import pytest
import seeing
from asking import bearer
from echo_service import Running, Servers
from waiting import wait_until

import quire
from quire.server import console as consoles
from quire.server.console import ENGINE_SHARE, FILES, MAX_WATCHERS, MIN_POLL_SECONDS, OPEN_PATHS

pytestmark = pytest.mark.xdist_group(name="console")

KEY, ADMIN = bearer(asking.KEY), bearer(asking.ADMIN)
FOLDER = Path(quire.__file__).parent / "assets" / "console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Scene = dict[str, Any]


def console_of(running: Running) -> consoles.Console:
    return next(route.endpoint for route in running.app.routes if route.path == "/console/events").__self__


@pytest.fixture
def running(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Its console pauses little, however long a look takes on a busy machine."""
    found = servers(keys=[asking.KEY], admin_keys=[asking.ADMIN])
    monkeypatch.setattr(console_of(found), "engine_share", 1.0)
    return found


def scenes(running: Running, count: int, key: dict[str, str] = KEY) -> list[Scene]:
    """The first `count` events."""
    with running.http.stream("GET", "/console/events", headers=key) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        return [json.loads(next(lines)) for _ in range(count)]


def test_its_files_are_open_and_hold_no_data(running: Running) -> None:
    assert [running.http.get(path).headers["location"] for path in OPEN_PATHS[:2]] == ["console/"] * 2
    for path in OPEN_PATHS[2:]:
        answer = running.http.get(path)
        name = path.rpartition("/")[2] or "index.html"
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert running.http.get("/console/other.js", headers=KEY).status_code == 404


def test_what_it_is_told_needs_the_key(running: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-quire-test-kez"}):
        assert running.http.get("/console/events", headers=headers).status_code == 401
    for key in (KEY, ADMIN):  # a user's and an operator's
        assert running.http.get("/v1/models", headers=key).status_code == 200
        assert scenes(running, 1, key)[0]["groups"]


def test_the_page_asks_nothing_of_other_hosts_and_makes_no_html_of_text() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"index.html", *FILES}
    said = "".join((FOLDER / name).read_text() for name in ("index.html", *FILES))
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\(", said.replace('href="data:,"', ""))
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|\son(?:click|load|error)", said
    )


def test_fields_of_parameters_are_empty_and_say_what_holds_then() -> None:
    fields = dict(re.findall(r'<input id="(\w+)" type="number"(.*?)>', (FOLDER / "index.html").read_text()))
    held = {name: re.findall('placeholder="(.*?)"', field) for name, field in fields.items()}
    default = ["model's default"]
    assert held == {
        "temperature": default, "top_p": default, "max_tokens": ["as many as fit"], "seed": ["none"], "n": ["1"]
    }  # fmt: skip
    assert not any("value=" in field for field in fields.values())


def test_it_is_told_whether_the_model_takes_images(running: Running) -> None:
    assert scenes(running, 1)[0]["images"] is False
    with echo_service.serving(seeing.built()[0]) as found:
        assert scenes(found, 1, {})[0]["images"] is True


def test_bytes_are_those_of_the_metrics(running: Running) -> None:
    for i in range(3):
        body = {"prompt": list(range(40 + i)), "max_tokens": 3 + i, "n": 1 + i}
        assert running.http.post("/v1/completions", json=body, headers=KEY).status_code == 200

        def same() -> Any:
            text = running.http.get("/metrics", headers=KEY).text
            counted = {name: float(value) for name, value in re.findall(r'kv_bytes\{category="(\w+)".*?\} (\S+)', text)}
            [scene] = scenes(running, 1)
            return {name: scene["bytes"][name] for name in counted} == counted and (scene, counted)

        scene, counted = wait_until(same, "the console and the metrics say the same")
        assert counted["cached"] == sum(one["cached"] * one["page_bytes"] for one in scene["groups"])
        assert scene["generated"] >= 3


def test_latencies_are_those_of_the_metrics(running: Running) -> None:
    before = scenes(running, 2)[1]["latencies"]
    body = {"prompt": list(range(30)), "max_tokens": 5, "ignore_eos": True}
    assert running.http.post("/v1/completions", json=body, headers=KEY).status_code == 200
    after = scenes(running, 2)[1]["latencies"]
    assert [after[kind][0] - before[kind][0] for kind in ("first", "between")] == [1, 4]
    text = running.http.get("/metrics", headers=KEY).text
    for kind, name in (("first", "time_to_first_token_seconds"), ("between", "inter_token_latency_seconds")):
        counted = [float(value) for value in re.findall(rf"quire_{name}_(?:count|sum){{.*?}} (\S+)", text)]
        assert after[kind] == counted


def test_looks_take_a_small_share_of_the_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    took, busy, scene = [0.001], [1.0], scenes(running, 1)[0]

    async def told() -> str:
        return json.dumps({**scene, "took": took[0], "busy": busy[0]})

    def pauses() -> float:
        began = time.monotonic()
        scenes(running, 4)  # the first may be there
        return time.monotonic() - began

    monkeypatch.setattr(running.llm, "look", told)
    console = console_of(running)
    monkeypatch.setattr(console, "engine_share", ENGINE_SHARE)
    assert pauses() >= 2 * took[0] / ENGINE_SHARE * 0.9 > 2 * MIN_POLL_SECONDS
    busy[0] = 0.5  # others leave the engine half of a core
    assert pauses() >= 2 * took[0] / ENGINE_SHARE / 0.5 * 0.9
    busy[0] = 1.0  # each of two fronts looks half as often
    monkeypatch.setattr(console, "engine_share", consoles.Console(running.llm, console.metrics, 2).engine_share)
    assert pauses() >= 2 * took[0] / ENGINE_SHARE * 2 * 0.9


def test_watchers_are_bounded_and_nobody_looks_for_nobody(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    console = console_of(running)
    wait_until(lambda: not console.num_watchers, "nobody watches")
    monkeypatch.setattr(consoles, "MAX_WATCHERS", 1)
    with running.http.stream("GET", "/console/events", headers=KEY, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = running.http.get("/console/events", headers=KEY)
        assert refused.status_code == 503
        assert "the console has 1 clients, which is the limit" in refused.json()["error"]["message"]
    wait_until(lambda: console._poll_task.done(), "the last look has ended")
    number, steps = console.snapshot_number, json.loads(console.latest_snapshot)["steps"]
    time.sleep(3 * MIN_POLL_SECONDS)  # in which further looks would come
    assert console.snapshot_number == number
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    assert running.http.post("/v1/completions", json=body, headers=KEY).status_code == 200
    assert scenes(running, 1)[0]["steps"] > steps  # who comes then is told nothing of before
    assert MAX_WATCHERS > 1


def test_a_stream_ends_after_its_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look after it: these are at most half a second apart here."""
    monkeypatch.setattr(consoles, "MAX_STREAM_SECONDS", 0.1)
    assert running.http.get("/console/events", headers=KEY, timeout=30).text.endswith("\n\n")


def test_requests_are_told_without_their_text(loose_brake: Path) -> None:
    loose_brake.touch()
    runner = echo_service.Echo(brake=str(loose_brake))
    with echo_service.serving(echo_service.built(runner)) as found, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "once upon a time", "request_id": "mine", "max_tokens": 200, "ignore_eos": True}
        asked = pool.submit(found.http.post, "/v1/completions", json=body)
        scene = wait_until(lambda: next((one for one in scenes(found, 1) if one["requests"]), None), "it is told")
        loose_brake.unlink()
        assert asked.result().status_code == 200
    assert "mine" in json.dumps(scene["requests"])
    assert "upon" not in json.dumps(scene)


def test_without_a_console() -> None:
    with echo_service.serving(console=False) as found:
        assert {found.http.get(path).status_code for path in (*OPEN_PATHS, "/console/events")} == {404}
