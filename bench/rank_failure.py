"""Kill or stop a rank of a server while clients read their streams: report when and how each stream ended, the
responses of `/health`, and the resources left. Or kill a rank under a load, with restart: report the outcome of all
requests.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from quire.errors import QuireError

CLIENTS = 32
STREAMING = 2.0  # seconds in which all clients stream before the fault
GONE = 60.0  # seconds within which a server must end
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def measured(flags: Sequence[str], how: str, max_tokens: int, seconds: float) -> dict[str, Any]:
    """Start `quire serve` with `flags` and send SIGNALS[how] to a rank while it streams. Raise QuireError if the server
    is not ready within `seconds`."""
    with serving(flags, seconds) as (server, port, log):
        clients = [Stream(port, max_tokens) for _ in range(CLIENTS)]
        end = time.monotonic() + seconds
        while not all(client.chunks for client in clients):
            if time.monotonic() > end or server.poll() is not None or any(client.ended for client in clients):
                raise QuireError(f"not all clients were served: {log.read_text()[-500:]}")
            time.sleep(0.05)
        time.sleep(STREAMING)
        processes, ranks = psutil.Process(server.pid).children(recursive=True), ranks_of(server)
        if ended := [client for client in clients if client.ended]:
            raise QuireError(f"{len(ended)} clients ended before the fault: {ended[0].error or 'all tokens came'}")
        began = time.monotonic()
        ranks[-1].send_signal(SIGNALS[how])
        for client in clients:
            client.thread.join(max(began + GONE - time.monotonic(), 0.0))
        health = _health(port)
        _, left = psutil.wait_procs(processes, max(began + GONE - time.monotonic(), 0.0))
        gone = time.monotonic() - began
        with suppress(subprocess.TimeoutExpired):
            server.wait(GONE)
        ends = sorted(client.ended - began for client in clients if client.ended)
        cause = next((line for line in log.read_text().splitlines() if " rank " in line), "")
        return {
            "how": how, "clients": CLIENTS,
            "ended": len(ends), "with_an_error": sum(bool(client.error) for client in clients),
            "first_end_s": ends[0] if ends else None, "last_end_s": ends[-1] if ends else None,
            "said": next((client.error for client in clients if client.error), ""), "health": health,
            "processes_left": len(left), "all_gone_s": gone, "status": server.poll(), "log": cause[:300],
        }  # fmt: skip


def restarted(flags: Sequence[str], workload: str, rate: float, after: float, seconds: float) -> dict[str, Any]:
    """Start `quire serve` with `flags` and --on-rank-failure restart, send it a workload of `rate` requests a second,
    and kill a rank after `after` seconds, when a request runs. Return the results of `quire bench serve`, how long
    /health was not 200, and the metrics of ranks. Raise QuireError if this takes longer than `seconds`."""
    end = time.monotonic() + seconds
    given = (*flags, "--on-rank-failure", "restart")
    with serving(given, seconds) as (server, port, log), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "served.json"
        asked = ("--url", f"http://127.0.0.1:{port}", "--workload", workload, "--rate", f"{rate:g}", "--repeat", "1",
                 "--warmup", "0", "--out", str(out))  # fmt: skip
        load = subprocess.Popen(
            [sys.executable, "-m", "quire", "bench", "serve", *asked], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _until(lambda: _metric(port, "num_requests_running") > 0, end, "no request ran")
            time.sleep(after)
            while (running := _metric(port, "num_requests_running")) == 0 and time.monotonic() < end:
                time.sleep(0.01)
            ranks_of(server)[-1].send_signal(signal.SIGKILL)
            began = time.monotonic()
            _until(lambda: not _health(port).startswith("200"), began + GONE, "/health doesn't know")
            said = _health(port)
            _until(lambda: _health(port).startswith("200"), end, "ranks were not started anew")
            back = time.monotonic() - began
            _, error = load.communicate(timeout=max(end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired as late:
            raise QuireError(f"not all requests ended in {seconds:.0f} s") from late
        finally:
            load.kill()
        if load.returncode:
            raise QuireError(f"the load failed: {error.decode(errors='replace')[-300:]}")
        [result] = json.loads(out.read_text())["results"]
        lines = [line for line in _page(port, "/metrics")[1].splitlines() if "rank" in line and line[0] != "#"]
        cause = next((line for line in log.read_text().splitlines() if "started anew" in line), "")
        return {"running": running, "killed_after_s": after, "rate": rate, "back_s": back, "health": said,
                "metrics": lines, "log": cause[:300], "served": result}  # fmt: skip


def _until(true: Callable[[], bool], end: float, else_: str) -> None:
    while not true():
        if time.monotonic() > end:
            raise QuireError(else_)
        time.sleep(0.05)


def _metric(port: int, name: str) -> float:
    """Return the sum of a gauge's samples."""
    found = re.findall(rf"^\w*:?{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", _page(port, "/metrics")[1], re.M)
    return sum(map(float, found))


def ranks_of(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a server's ranks. Raise QuireError if it has none."""
    every = psutil.Process(server.pid).children(recursive=True)
    ranks = [one for one in every if "quire.startup.rank_program" in one.cmdline()]
    if not ranks:
        raise QuireError("the server has no ranks")
    return ranks


@contextmanager
def serving(flags: Sequence[str], seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Run a server on a free port; on exit it is killed if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        said, log = Path(folder) / "out", Path(folder) / "err"
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
        with said.open("wb") as out, log.open("wb") as err:
            child = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            end = time.monotonic() + seconds
            while not (found := re.search(r"^curl http://[0-9.]+:(\d+)", said.read_text(), re.M)):
                if child.poll() is not None or time.monotonic() > end:
                    raise QuireError(f"the server did not start: {log.read_text()[-500:]}")
                time.sleep(0.1)
            yield child, int(found[1]), log
        finally:
            child.kill()
            child.wait()


class Stream:
    """A client that reads one completion, on a thread of its own. It requests token ids, as the model may have no
    tokenizer."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self.chunks, self.ended, self.error = 0, 0.0, ""
        self._port, self._max_tokens = port, max_tokens
        self.thread = threading.Thread(target=self._read, name="quire-client", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10 * GONE)
        asked = {"prompt": [10 + i for i in range(16)], "max_tokens": self._max_tokens, "ignore_eos": True,
                 "stream": True, "return_token_ids": True}  # fmt: skip
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), _headers())
            answer = connection.getresponse()
            for line in answer:
                if b'"error"' in line:
                    self.error = line.decode(errors="replace")[:300]
                else:
                    self.chunks += line.startswith(b"data:")
        except (OSError, http.client.HTTPException) as error:
            self.error = self.error or f"{type(error).__name__} {error}"[:300]
        finally:
            self.ended = time.monotonic()
            connection.close()


def _headers() -> dict[str, str]:
    key = os.environ.get("QUIRE_API_KEY", "")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _health(port: int) -> str:
    """Return the status of /health, or that the server is unreachable."""
    try:
        status, text = _page(port, "/health")
    except (OSError, http.client.HTTPException) as error:
        return f"the server does not answer ({type(error).__name__})"
    return f"{status} {text[:300]}".strip()


def _page(port: int, path: str) -> tuple[int, str]:
    """Return the status and text of a page of the server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers=_headers())
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 20).decode(errors="replace")
    finally:
        connection.close()
