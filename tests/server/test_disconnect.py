"""Clients that leave: in the queue, during the prompt, while decoding; streamed or not. Every page comes back."""

from __future__ import annotations

import json
import socket

import pytest
from asking import connect
from echo_service import Placement, Running, Servers
from waiting import wait_until

pytestmark = pytest.mark.xdist_group(name="disconnect")


@pytest.fixture
def slow(servers: Servers, placement: Placement) -> Running:
    """Steps of 30 ms, 8 prompt tokens a step, four sequences at once."""
    model = {"echo": {"pause": 0.03}, "max_num_seqs": 4, "max_num_batched_tokens": 8, "kv_tokens": 2048}
    return servers(model, placement=placement)


def asked(running: Running, body: dict[str, object]) -> socket.socket:
    """Send a completion request and don't read."""
    data = json.dumps(body).encode()
    client = connect(running)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def drawn(running: Running) -> int:
    """The tokens that the engine has drawn; exact when it is idle."""
    return running.llm.metrics.stats.generated_tokens


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", [{"n": 1}, {"n": 4}, {"n": 2, "best_of": 4}, {"n": 2, "beam_width": 4}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_pages_come_back(slow: Running, phase: str, stream: bool, kind: dict[str, int]) -> None:
    if stream and "best_of" in kind:
        kind = {"n": 4, "best_of": 4}  # others can't be streamed
    assert slow.idle()
    aborted, before = slow.metric("quire_aborted_requests_total"), drawn(slow)
    leavers = 1
    clients = []
    if phase == "queued":
        first = {"prompt": [9] * 4, "max_tokens": 200, "n": 4, "ignore_eos": True, "stream": stream}
        clients.append(asked(slow, first))
        wait_until(lambda: slow.llm.running == 1, "the first request runs")
        leavers = 2
    prompt = [3 + len(kind) + kind["n"]] * (200 if phase == "prefill" else 4)  # 200 tokens: 25 steps
    body = {"prompt": prompt, "max_tokens": 40, **kind, "ignore_eos": True, "stream": stream}
    clients.append(asked(slow, body))
    if phase == "queued":
        wait_until(lambda: slow.llm.queued == 1, "the second request waits")
    elif phase == "prefill":
        wait_until(lambda: slow.llm.running == 1, "the request runs")
    else:
        wait_until(lambda: drawn(slow) > before, "tokens are drawn")
    for client in reversed(clients):
        client.close()
    assert slow.idle(), "requests or pages are left"
    assert slow.metric("quire_aborted_requests_total") == aborted + leavers
    assert phase != "prefill" or drawn(slow) == before, "the client left too late"
