"""Generated requests over all routes and fields: nothing breaks, nothing hangs, and a neighbour's tokens stay. There is
no 5xx but 503, no answer takes long, and errors have OpenAI's shape."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import echo_service
import httpx
import pytest
from hostile_requests import Wanted, requests
from hypothesis import HealthCheck, Phase, given, settings
from serve_process import ADMIN_KEY, BUSY, KEY, bearer, serving

from quire.server.errors import OVERFLOW

OVERFLOW_WORDS = "maximum context length is", "don't fit into the KV memory"

KEYS = {"user": KEY, "admin": ADMIN_KEY}
LIMITS = ("--dtype", "float32", "--max-model-len", "512", "--kv-tokens", "4096", "--prefix-tokens", "256")

SECONDS = 15.0  # for one request, on a machine that is busy
EVERY = 50  # requests between two questions
MAX_ERROR = 4096  # bytes
QUESTIONS = (
    ("/v1/completions", {"prompt": [5, 6, 7, 80], "max_tokens": 12, "temperature": 0, "seed": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "seed": 3}),
)


class Told(NamedTuple):
    """An answer; status 0 if there was none, since the client left or was closed."""

    status: int
    kind: str
    body: bytes
    seconds: float


class Session:
    """`keys` are the keys by name."""

    def __init__(self, port: int, keys: dict[str, str], strict: bool = False) -> None:
        self.port, self.keys, self.strict = port, keys, strict
        self.asked = 0
        self.statuses: Counter[int] = Counter()
        self.refused: list[float] = []
        self.slowest = 0.0
        self._known: list[Any] | None = None

    def try_one(self, wanted: Wanted) -> None:
        """Send it, and check the answer; now and then ask the questions."""
        told = self.ask(wanted)
        self.asked += 1
        self.statuses[told.status] += 1
        self.slowest = max(self.slowest, told.seconds)
        assert told.status < 500 or told.status == 503, told
        assert told.seconds < SECONDS, told
        if 400 <= told.status < 500:
            self.refused.append(told.seconds)
        if told.status >= 400 and wanted.method != "HEAD":
            self._check_error(wanted, told)
        elif told.status == 200 and wanted.leave is None and wanted.method not in ("HEAD", "OPTIONS"):
            check_answer(told)
        if self.asked % EVERY == 1:
            self.question()

    def question(self) -> None:
        found = []
        for path, body in QUESTIONS:
            told = self.post(path, body)
            assert told.status == 200, told
            found.append(json.loads(told.body)["choices"])
        self._known = self._known or found
        assert found == self._known

    def post(self, path: str, body: Any) -> Told:
        head = [f"POST {path} HTTP/1.1", "Content-Type: application/json", f"Authorization: Bearer {self.keys['user']}"]
        return self._send("POST", head, json.dumps(body).encode(), False, None)

    def ask(self, wanted: Wanted) -> Told:
        """Send it over a connection of its own."""
        head = [f"{wanted.method} {wanted.path} HTTP/1.1", *wanted.headers]
        if wanted.kind:
            head.append(f"Content-Type: {wanted.kind}")
        if wanted.key is not None:
            head.append(f"Authorization: Bearer {self.keys.get(wanted.key, 'wrong')}")
        return self._send(wanted.method, head, wanted.body, wanted.chunked, wanted.leave)

    def _send(self, method: str, head: list[str], body: bytes, chunked: bool, leave: int | None) -> Told:
        size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        data = "\r\n".join([*head, "Host: x", "Connection: close", size, "", ""]).encode()
        data += (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n" if chunked else body
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as client:
            answer = http.client.HTTPResponse(client, method=method)
            try:
                client.sendall(data)
                answer.begin()
                text = answer.read() if leave is None else answer.read(leave)
            except TimeoutError as error:
                raise AssertionError(f"no answer within {SECONDS:g} s") from error
            except (OSError, http.client.HTTPException):
                return Told(0, "", b"", time.perf_counter() - began)
            kind = answer.headers.get("content-type", "")
            status = answer.status if leave is None or answer.status != 200 else 0
        return Told(status, kind, text if leave is None else b"", time.perf_counter() - began)

    def _check_error(self, wanted: Wanted, told: Told) -> None:
        if wanted.leave is not None or (not told.body and wanted.path in ("/health", "/ping")):
            return
        assert told.kind == "application/json", told
        assert len(told.body) <= MAX_ERROR, told
        error = json.loads(told.body)["error"]
        assert [*error] == ["message", "type", "param", "code"], told
        overflows = any(words in error["message"] for words in OVERFLOW_WORDS)
        assert error["code"] == (OVERFLOW if overflows else told.status), told
        assert error["message"], told
        param = error["param"]
        if self.strict and param is not None and "there is no field" in error["message"]:
            return
        # A path may lead into a field: messages[0].content[1].image_url
        path = re.fullmatch(r"(\w+)(\[\d+\]|\.\w+)*", param or "")
        assert param is None or param in wanted.fields or (path and path[1] in wanted.fields), told


def check_answer(told: Told) -> None:
    """An answer is JSON, or events to the last one, or text."""
    if told.kind.startswith("text/event-stream"):
        events = told.body.decode().split("\n\n")
        assert events[-1] == "", told
        assert all(event.startswith("data: ") for event in events[:-1]), told
        found = [_json(event[6:]) for event in events[:-1] if event != "data: [DONE]"]
        assert events[-2] == "data: [DONE]" or "error" in found[-1], told
    elif told.kind.startswith("application/json"):
        _json(told.body)
    else:
        assert told.kind.startswith("text/plain") or not told.body, told


def _json(text: str | bytes) -> Any:
    def no(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=no)


def fuzz(session: Session, times: int, seconds: float = 1.0) -> None:
    """The same requests each time, the smallest failing one at the end. Refusals come within so many seconds."""

    @settings(
        max_examples=times,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(requests())
    def run(wanted: Wanted) -> None:
        session.try_one(wanted)

    run()
    session.question()
    assert session.asked >= times * 0.9
    assert len(session.refused) > times / 10
    assert session.statuses[200] > times / 10
    refused = sorted(session.refused)
    shown = [refused[int(share * (len(refused) - 1))] * 1e3 for share in (0.5, 0.99, 1.0)]
    print(f"{session.asked} requests: {dict(sorted(session.statuses.items()))}; slowest {session.slowest:.2f} s")
    print("refused within {:.1f} ms (p50), {:.1f} ms (p99), {:.1f} ms (max)".format(*shown))
    assert refused[-1] < seconds


@contextlib.contextmanager
def neighbours(url: str) -> Iterator[None]:
    """A few clients whose branches don't fit into the memory together, so that there is preemption all along."""
    stop, failed = threading.Event(), []
    body = {"prompt": "Once upon a time", "n": 8, "max_tokens": 120, "ignore_eos": True}

    def work() -> None:
        with httpx.Client(base_url=url, timeout=30, headers=bearer()) as http:
            while not stop.is_set():
                answer = http.post("/v1/completions", json=body)
                if answer.status_code not in (200, 503):
                    failed.append(answer.text)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_few_generated_requests(caplog: pytest.LogCaptureFixture) -> None:
    with echo_service.serving(keys=[KEY], admin_keys=[ADMIN_KEY]) as running:
        port = urlsplit(running.url).port
        assert port
        fuzz(Session(port, KEYS), 60, 15.0)  # however busy the machine is
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("flags", "times"), [((), 1500), (("--strict",), 500)])
def test_generated_requests(flags: tuple[str, ...], times: int) -> None:
    with serving(*LIMITS, *flags) as to:
        with neighbours(to.url):
            fuzz(Session(to.port, KEYS, strict=bool(flags)), times)
        assert to.metric("quire_num_preemptions_total") > 0
        for prefix in httpx.get(f"{to.url}/v1/prefixes", headers=bearer(ADMIN_KEY)).json()["data"]:
            assert httpx.delete(f"{to.url}/v1/prefixes/{prefix['id']}", headers=bearer(ADMIN_KEY)).status_code == 200
        assert to.idle(), [to.metric(name) for name in BUSY]
        assert to.end() == 0
        assert "Traceback" not in to.text, to.text[-4000:]
