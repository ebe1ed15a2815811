"""Driving an OpenAI-compatible server through a workload: a thread a request, the standard library's HTTP client.

A streamed chunk counts as one token for the gaps between tokens; how many came in all is what the server's usage says.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from quire.bench.drive import Load
from quire.bench.latency import Trace
from quire.bench.workloads import Job
from quire.errors import QuireError, StartupError

MAX_THREADS = 1024
LINE = 2**20  # bytes of one line of a stream
TIMEOUT = 600.0


class Client:
    """A server at `url`, such as http://127.0.0.1:8000. The key of QUIRE_API_KEY is sent if it is set."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"--url is {url[:80]!r}", "Expected http://HOST:PORT")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self.url = parts.hostname, parts.port, url
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("QUIRE_API_KEY", "")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model = str(json.loads(self._ask("GET", "/v1/models").read(LINE))["data"][0]["id"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        connection = self._kind(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request(
                method, self._root + path, None if body is None else json.dumps(body), headers=self._headers
            )
            response = connection.getresponse()
        except OSError as error:
            raise StartupError(f"no server answers at {self.url}: {error}", "Start one with: quire serve") from error
        if response.status != 200:
            with response:
                said = response.read(500).decode(errors="replace")
            raise QuireError(f"{self.url}{path} answered {response.status}: {said}")
        return response

    def complete(self, job: Job, temperature: float, arrival: float, start: float) -> Trace:
        """One streamed completion; `start` is when the run began."""
        body = {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.output,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        moments, tokens = list[float](), 0
        with self._ask("POST", "/v1/completions", body) as response:
            while line := response.readline(LINE):
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise QuireError(f"the server failed: {chunk['error']}")
                if chunk.get("choices"):
                    moments.append(time.monotonic() - start)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        if not moments or not tokens:
            raise QuireError(f"{self.url} ended a stream without tokens or usage")
        moments = moments[:tokens]  # a last chunk may only say why the output ended
        last = tokens - len(moments) + 1
        return Trace(arrival, len(job.prompt), [*((moment, 1) for moment in moments[:-1]), (moments[-1], last)])

    def run(self, jobs: Sequence[Job], load: Load, temperature: float) -> list[Trace]:
        """All jobs. Open loads send each request at its time; if MAX_THREADS are busy it waits, and that counts."""
        start = time.monotonic()

        def one(index: int) -> Trace:
            now = time.monotonic() - start
            if load.times is None:
                return self.complete(jobs[index], temperature, now, start)
            time.sleep(max(0.0, load.times[index] - now))
            return self.complete(jobs[index], temperature, load.times[index], start)

        threads = min(load.concurrency if load.times is None else len(jobs), MAX_THREADS)
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, range(len(jobs))))
