"""Measure an OpenAI-compatible server: its model, its metrics, and a load that client processes send."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.bench.drive import Load
from quire.bench.fleet import MOST, Fleet, clients_for
from quire.bench.scrape import Scrape, Watch, between
from quire.bench.served import summary
from quire.bench.workloads import Job
from quire.client.connection_pool import Address
from quire.errors import QuireError, StartupError

ANSWER = 2**24  # maximum bytes of a response other than a completion
TIMEOUT = 60.0
SHORTEST, LONGEST = 0.1, 3600.0  # shortest and longest seconds between two samples of a server's memory


class Asking(NamedTuple):
    """The form of completion requests. `chunk_usage`: every chunk reports the tokens so far. `text` turns the token ids
    of a prompt into the text that is sent."""

    temperature: float = 0.0
    chunk_usage: bool = False
    text: Callable[[Sequence[int]], str] | None = None


class Client:
    """A client of the server at `url`, such as http://127.0.0.1:8000. It sends the key of QUIRE_API_KEY if that is set.
    `clients` processes send the load (None: as many as it needs) and end with this context. The server's memory is
    sampled every `watch` seconds."""

    def __init__(
        self, url: str, clients: int | None = None, asking: Asking | None = None, watch: float | None = None
    ) -> None:
        if watch is not None and not SHORTEST <= watch <= LONGEST:
            raise StartupError(f"--watch-memory is {watch}", f"Give {SHORTEST} to {LONGEST:.0f} seconds")
        if clients is not None and not 1 <= clients <= MOST:
            raise StartupError(f"--clients is {clients}", f"Give 1 to {MOST}")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"--url is {url[:80]!r}", "Expected http://HOST:PORT")
        self.url, self._tls = url, parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get("QUIRE_API_KEY", "")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._clients, self._asking, self._every = clients, asking or Asking(), watch
        self._fleet: Fleet | None = None
        self._jobs: Sequence[Job] = ()
        self._bodies: list[bytes] = []
        status, models = self._get("/v1/models")
        if status != 200:
            raise QuireError(f"{url}/v1/models answered {status}: {models[:500]}")
        self.model = str(json.loads(models)["data"][0]["id"])

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def _get(self, path: str) -> tuple[int, str]:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request("GET", self._root + path, headers=self._headers)
            with connection.getresponse() as response:
                return response.status, response.read(ANSWER).decode(errors="replace")
        except OSError as error:
            raise StartupError(f"no server answers at {self.url}: {error}", "Start one with: quire serve") from error
        finally:
            connection.close()

    def scrape(self) -> Scrape | None:
        """Return the server's metrics; None if it has none."""
        try:
            status, text = self._get("/metrics")
        except StartupError:  # it has ended: the result of the run reports it
            return None
        return Scrape.of(text) if status == 200 else None

    def _address(self) -> Address:
        try:
            [(*_, where), *_] = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise StartupError(f"{self._host!r} has no address: {error}", "Expected http://HOST:PORT") from error
        return Address(str(where[0]), self._port, self._host if self._tls else None)

    def _head(self, route: str) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        headers = {"Host": f"{host}:{self._port}", **self._headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self._root}/v1/{route} HTTP/1.1\r\n{lines}"

    def body(self, job: Job) -> bytes:
        """Return the request for a streamed completion of exactly the job's length, or for a chat if the job has
        images."""
        temperature, chunk_usage, text = self._asking
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if chunk_usage else {})
        prompt = text(job.prompt) if text else job.prompt
        asked = {
            "model": self.model, **(_said(job.files, prompt) if job.files else {"prompt": prompt}),
            "max_tokens": job.output, "temperature": temperature, "ignore_eos": True, "stream": True,
            "stream_options": options,
        }  # fmt: skip
        return json.dumps(asked, separators=(",", ":")).encode()

    def run(self, jobs: Sequence[Job], load: Load) -> dict[str, Any]:
        """Run all jobs and return the measurements. An open load sends each request at its time."""
        if jobs is not self._jobs:
            self._jobs, self._bodies = jobs, [self.body(job) for job in jobs]
        fleet = self._fleet_for(len(jobs), load)
        before = self.scrape()
        route = "chat/completions" if any(job.files for job in jobs) else "completions"
        with Watch(self.scrape, self._every) as watch:
            sent, clients = fleet.run(self._address(), self._head(route), self._bodies, load)
        after = self.scrape()
        run = summary(jobs, sent, clients)
        if not run["requests"]:
            raise QuireError(f"{self.url} answered no request: {sent[0].error}")
        run["server"] = between(before, after, run["output_tokens"], run["seconds"])
        if (held := watch.held()) is not None:
            run["server"] = {**(run["server"] or {}), "memory": held}
        return run

    def _fleet_for(self, requests: int, load: Load) -> Fleet:
        """Return the client processes of the run before if their number fits, else new ones."""
        count = self._clients or clients_for(requests, load)
        if self._fleet is not None and self._fleet.count != count:
            self._fleet.close()
            self._fleet = None
        if self._fleet is None:
            self._fleet = Fleet(count)
        return self._fleet


def _said(files: Sequence[bytes], text: Any) -> dict[str, Any]:
    """Return a user's message with these images before its text."""
    uris = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    pictures = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    return {"messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]}


def progress(run: dict[str, Any]) -> str:
    """Return what a run's progress line adds after its speed, starting with "; "; "" if there is none."""
    said = [f"{count} requests {what}" for what in ("refused", "failed") if (count := sum(run[what].values()))]
    said += [f"{run['other_lengths']} answers have other lengths than asked for"] if run["other_lengths"] else []
    said += [f"the client was saturated: {why}" for why in run["saturated"]]
    return "".join(f"; {one}" for one in said)
