"""A `quire serve` process for programs that attack it: where it listens, what it says, how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import httpx

KEY, ADMIN_KEY = "sk-user", "sk-admin"
READY = 120  # seconds
BUSY = ("quire_num_requests_running", "quire_num_requests_waiting", "quire_kv_cache_usage_perc")  # 0 each at rest


class Process:
    """The bundled model behind an API key and an admin key, or what another command serves without any; `said` is what
    it wrote so far."""

    def __init__(self, *flags: str, command: Sequence[str] = ()) -> None:
        keys = {} if command else {"QUIRE_API_KEY": KEY, "QUIRE_ADMIN_KEY": ADMIN_KEY}
        self.child = subprocess.Popen(
            command or [sys.executable, "-m", "quire", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **keys},
        )
        self.said: list[str] = []
        self.port = 0
        self._ready = threading.Event()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        if not self._ready.wait(READY) or not self.port:
            self.close()
            raise AssertionError(self.text)

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.said.append(line)
            if found := re.search(r"quire serves .* at http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                self._ready.set()
        self._ready.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return "".join(self.said)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", headers=bearer(), timeout=20).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))

    def idle(self, seconds: float = 10) -> bool:
        """Waits until no request is left and every page is free or cached."""
        end = time.monotonic() + seconds
        while sum(map(self.metric, BUSY)) and time.monotonic() < end:
            time.sleep(0.1)
        return time.monotonic() < end

    def end(self, seconds: float = 60) -> int:
        """The exit status after SIGTERM."""
        self.child.send_signal(signal.SIGTERM)
        status = self.child.wait(seconds)
        self._reading.join(10)
        return status

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self._reading.join()
        assert self.child.stdout is not None
        self.child.stdout.close()


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def serving(*flags: str, command: Sequence[str] = ()) -> Iterator[Process]:
    """One process, which is gone afterwards however that ends."""
    process = Process(*flags, command=command)
    try:
        yield process
    finally:
        process.close()
