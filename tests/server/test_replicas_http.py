"""`quire serve --replicas` with the bundled model: one server in front of two engines."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from served_process import SERVE, served
from waiting import wait_until

pytestmark = pytest.mark.full


def test_two_replicas_are_one_server(tmp_path: Path) -> None:
    """Both compute; one that is killed is left out; then the server drains and ends."""
    flags = ("--replicas", "2", "--device", "cpu", "--kv-tokens", "4096", "--router", "round-robin")
    with served(tmp_path, *flags, command=SERVE) as server:
        server.ready()
        assert "2 replicas, each:" in server.text
        texts = [server.complete() for _ in range(4)]
        assert len(set(texts)) == 1

        def metrics() -> str:
            return httpx.get(f"{server.url}/metrics", timeout=60).text

        for i in range(2):
            assert f'quire_engine_up{{engine="{i}",model_name="tiny"}} 1.0' in metrics()
        engines = [one for one in server.processes() if "quire.startup.engine_program" in one.cmdline()]
        assert len(engines) == 2
        engines[1].kill()
        wait_until(lambda: 'quire_engine_up{engine="1",model_name="tiny"} 0.0' in metrics(), "it is known to be gone")
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert [server.complete() for _ in range(2)] == texts[:2]
        server.process.send_signal(signal.SIGTERM)
        assert server.child.wait(60) == 0, server.text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--fronts", "2"), "--replicas is 2, and --fronts is 2. One frontend routes the requests of all replicas"),
        (("--engine-process", "off"), "--replicas is 2, and --engine-process is off"),
    ],
)
def test_what_can_not_be_combined(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with served(tmp_path, "--replicas", "2", *flags, command=SERVE) as server:
        assert server.child.wait(60) == 2
        assert said in server.text
