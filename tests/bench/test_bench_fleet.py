"""Client processes against a server of a known pace: they give back what it does, and lose nothing. Bounds on times are
exact where the server's pace is one, and generous where the machine has a say."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from paced import Paced, serving
from waiting import wait_until

from quire.bench.client import Client
from quire.bench.drive import Load
from quire.bench.fleet import EACH, clients_for
from quire.bench.workloads import parse
from quire.errors import QuireError, StartupError

OPENSSL = shutil.which("openssl")


def measured(paced: Paced, workload: str, load: Load, clients: int) -> dict[str, Any]:
    with serving(paced) as url, Client(url, clients) as client:
        return client.run(parse(workload).jobs(100, seed=4), load)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_known_pace_is_given_back(clients: int) -> None:
    paced = Paced(first=0.4, gap=0.1)
    times = tuple(0.01 * i for i in range(12))
    run = measured(paced, "fixed:7:6@12", Load(times), clients)
    assert (run["requests"], run["prompt_tokens"], run["output_tokens"], run["chunks"]) == (12, 84, 72, 72)
    assert (run["refused"], run["failed"], run["other_lengths"]) == ({}, {}, 0)
    assert len(run["clients"]) == clients
    assert 0.399 <= run["ttft_s"]["p50"] <= 0.8
    assert run["tpot_s"]["p50"] == pytest.approx(0.1, rel=0.5)
    assert run["itl_s"]["mean"] == pytest.approx(0.1, rel=0.5)
    assert run["inter_token_s"] == run["itl_s"]
    assert run["inter_token_from"] == "one token a chunk"
    assert run["e2e_s"]["p50"] == pytest.approx(0.9, rel=0.5)
    assert run["seconds"] >= 0.11 + 0.4 + 5 * 0.1 - 0.001
    assert run["sent_late_s"]["p50"] >= 0
    assert run["as_vllm"]["median_ttft_ms"] <= 1000 * run["ttft_s"]["p50"]


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    paced = Paced(first=0.03, gap=0.0, crowd=5)
    run = measured(paced, "fixed:5:2@40", Load(concurrency=5), 3)
    assert (run["requests"], paced.requests, paced.most) == (40, 40, 5)
    assert paced.connections <= 5 + 3  # kept open from request to request; the others are for models and metrics
    assert run["seconds"] >= 8 * 0.029
    assert run["sent_late_s"]["max"] == 0


def test_a_broken_answer_is_a_failure_of_its_own() -> None:
    run = measured(Paced(first=0.01, gap=0.01, drop=4), "fixed:5:3@12", Load(concurrency=2), 1)
    assert (run["attempted"], run["requests"]) == (12, 9)
    assert run["failed"] == {"the connection was closed in an answer": 3}
    assert run["output_tokens"] == 27


def test_nobody_answers() -> None:
    with serving(Paced(0.01, 0.0)) as url:
        client = Client(url, 1)
    with client, pytest.raises(QuireError, match="answered no request: no connection"):
        client.run(parse("fixed:5:3@2").jobs(100), Load(concurrency=1))


@pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = str(tmp_path / "key"), str(tmp_path / "cert")
    command = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-nodes", "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with serving(Paced(0.01, 0.001), context) as url:
        with pytest.raises(StartupError, match="no server answers"):
            Client(url)  # a certificate that nobody signed
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        with Client(url, 1) as client:
            run = client.run(parse("fixed:3000:9@6").jobs(100), Load(concurrency=3))
    assert (run["requests"], run["prompt_tokens"], run["output_tokens"], run["chunks"]) == (6, 18_000, 54, 54)


def test_how_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert clients_for(1000, Load(concurrency=8)) == 1
    assert clients_for(1000, Load((0.0,) * 1000)) == 8
    assert clients_for(2 * EACH + 1, Load((0.0,) * (2 * EACH + 1))) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert clients_for(1000, Load((0.0,) * 1000)) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_client_that_dies_is_an_error(number: int) -> None:
    """At once, though the other one still has much to wait for."""
    paced, load = Paced(60.0, 0.0), Load((0.0, 0.0))
    with serving(paced) as url, Client(url, 2) as client:
        process = client._fleet_for(2, load)._processes[number]

        def kill() -> None:
            wait_until(lambda: paced.under_way == 2, "both requests are under way")
            process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(QuireError, match=f"client process {number + 1} of 2 ended with status -9"):
            client.run(parse("fixed:5:3@2").jobs(100), load)
        thread.join()


def test_clients_end_with_the_process_that_started_them() -> None:
    """Also when it is killed in the middle of a run."""
    paced = Paced(first=60.0, gap=0.0)
    with serving(paced) as url:
        command = [sys.executable, "-m", "quire", "bench", "serve", "--url", url, "--workload", "fixed:5:3@4"]
        parent = subprocess.Popen([*command, "--clients", "2"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until(lambda: paced.under_way == 4, "all requests are under way")
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until(
            lambda: not any(child.is_running() and child.status() != "zombie" for child in children),
            "the clients have ended",
        )
