"""Generated requests over all routes and fields: nothing breaks, nothing hangs, and a neighbour's tokens stay."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import echo_service
import httpx
import pytest
from fuzz_session import Session
from hostile_requests import Wanted, requests
from hypothesis import HealthCheck, Phase, given, settings
from serve_process import ADMIN_KEY, BUSY, KEY, bearer, serving

KEYS = {"user": KEY, "admin": ADMIN_KEY}
LIMITS = ("--dtype", "float32", "--max-model-len", "512", "--kv-tokens", "4096", "--prefix-tokens", "256")


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
        fuzz(Session(port, KEYS), 120, 15.0)  # however busy the machine is
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
