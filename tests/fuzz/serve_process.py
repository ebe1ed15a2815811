"""A `quire serve` process for programs that attack it: where it listens, what it says, how it ends."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from served_process import SERVE, Served, served

KEY, ADMIN_KEY = "sk-user", "sk-admin"
BUSY = ("quire_num_requests_running", "quire_num_requests_waiting", "quire_kv_cache_usage_perc")  # 0 each at rest


class Process(Served):
    """The bundled model behind an API key and an admin key, or what another command serves without any."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

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
        return self.child.wait(seconds)


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def serving(*flags: str, command: Sequence[str] = ()) -> Iterator[Process]:
    """One process that listens, which is gone afterwards however that ends."""
    keys = {} if command else {"QUIRE_API_KEY": KEY, "QUIRE_ADMIN_KEY": ADMIN_KEY}
    with (
        TemporaryDirectory() as folder,
        served(Path(folder), *flags, env=keys, command=command or SERVE, kind=Process) as process,
    ):
        process.ready()
        yield process
