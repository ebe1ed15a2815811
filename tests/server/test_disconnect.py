"""Clients that leave: in the queue, during the prompt, while decoding; streamed or not. Every page comes back."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import echo_service
import pytest
from echo_service import Echo, Running


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    """Steps of 30 ms, 8 prompt tokens a step, four sequences at once."""
    model = echo_service.built(Echo(pause=0.03), max_num_seqs=4, max_num_batched_tokens=8, kv_tokens=2048)
    with echo_service.serving(model) as running:
        yield running


def connect(running: Running, body: dict[str, object]) -> socket.socket:
    """Send a completion request and don't read."""
    data = json.dumps(body).encode()
    url = urlsplit(running.url)
    client = socket.create_connection((url.hostname, url.port), timeout=30)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def until(condition: object, seconds: float = 30.0) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


@pytest.mark.share(6)
@pytest.mark.parametrize("kind", [{"n": 1}, {"n": 4}, {"n": 2, "best_of": 4}, {"n": 2, "beam_width": 4}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_pages_come_back(slow: Running, phase: str, stream: bool, kind: dict[str, int]) -> None:
    if stream and "best_of" in kind:
        kind = {"n": 4, "best_of": 4}  # others can't be streamed
    engine = slow.engine
    assert slow.idle()
    aborted = slow.metric("quire_aborted_requests_total")
    leavers = 1
    clients = []
    if phase == "queued":
        clients.append(
            connect(slow, {"prompt": [9] * 4, "max_tokens": 200, "n": 4, "ignore_eos": True, "stream": stream})
        )
        assert until(lambda: len(engine.scheduler.running) == 1)
        leavers = 2
    prompt = [3 + len(kind) + kind["n"]] * (200 if phase == "prefill" else 4)  # 200 tokens: 25 steps
    body = {"prompt": prompt, "max_tokens": 40, **kind, "ignore_eos": True, "stream": stream}
    clients.append(connect(slow, body))
    if phase == "queued":
        assert until(lambda: len(engine.scheduler.waiting) == 1)
    elif phase == "prefill":
        assert until(lambda: len(engine.scheduler.running) == 1)
        assert all(request.first_token is None for request in engine.requests.values())
    else:
        assert until(lambda: any(request.first_token for request in list(engine.requests.values())))
    for client in reversed(clients):
        client.close()
    assert slow.idle(), "requests or pages are left"
    assert slow.metric("quire_aborted_requests_total") == aborted + leavers
    engine.scheduler.memory.check()


def test_slow_reader_gets_one_merged_delta(slow: Running) -> None:
    """A client that doesn't read doesn't stop the others, and loses nothing."""
    client = connect(slow, {"prompt": [5], "max_tokens": 60, "ignore_eos": True, "stream": True})
    assert until(lambda: slow.llm.facts.stats.generated_tokens and not slow.llm.active)
    client.sendall(b"")
    raw = b""
    while b"[DONE]" not in raw:
        raw += client.recv(65536)
    client.close()
    assert raw.count(b"[DONE]") == 1
