"""A rank of a server is killed, or stopped, while clients read their streams: when each of them ended and how, what
`/health` said, and what was left.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from quire.errors import QuireError

CLIENTS = 32
STREAMING = 2.0  # seconds that all stream before the fault
GONE = 60.0  # seconds for a server to end
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def measured(flags: Sequence[str], how: str, max_tokens: int, seconds: float) -> dict[str, Any]:
    """`quire serve` with `flags`; one of its ranks gets SIGNALS[how] while it streams. QuireError if it isn't served
    in so many seconds."""
    with serving(flags, seconds) as (server, port, log):
        clients = [Stream(port, max_tokens) for _ in range(CLIENTS)]
        end = time.monotonic() + seconds
        while not all(client.chunks for client in clients):
            if time.monotonic() > end or server.poll() is not None or any(client.ended for client in clients):
                raise QuireError(f"not all clients were served: {log.read_text()[-500:]}")
            time.sleep(0.05)
        time.sleep(STREAMING)
        processes = psutil.Process(server.pid).children(recursive=True)
        ranks = [one for one in processes if "quire.parallel.rank" in one.cmdline()]
        if not ranks:
            raise QuireError("the server has no ranks")
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


@contextmanager
def serving(flags: Sequence[str], seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A server on a free port, which ends here if it hasn't."""
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
    """A client that reads one completion, on a thread of its own. It asks for token ids, as there may be no text."""

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
    """What /health says now: its status, or that nobody is there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return f"{answer.status} {answer.read(300).decode(errors='replace')}".strip()
    except (OSError, http.client.HTTPException) as error:
        return f"nobody answers ({type(error).__name__})"
    finally:
        connection.close()
