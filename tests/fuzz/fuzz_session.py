"""Requests to one server and what must hold for every answer: no 5xx but 503, none that takes long, errors in OpenAI's
shape, and the same tokens for the same question all along."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections import Counter
from typing import Any, NamedTuple

from hostile_requests import Wanted

SECONDS = 15.0  # for one request, on a machine that is busy
EVERY = 50  # requests between two questions
MAX_ERROR = 4096  # bytes
QUESTIONS = (
    ("/v1/completions", {"prompt": [5, 6, 7, 80], "max_tokens": 12, "temperature": 0, "seed": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "seed": 3},
    ),
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
        assert error["code"] == told.status, told
        assert error["message"], told
        param = error["param"]
        if self.strict and param is not None and "there is no field" in error["message"]:
            return
        assert param is None or param in wanted.fields, told


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
