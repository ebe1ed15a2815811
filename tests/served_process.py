"""`quire serve` as a process of a group of its own, and what becomes of its processes, ranks among them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

RANK = "quire.startup.rank_program"
READY = 240.0  # seconds for a server to be there, on a machine that is busy
SERVE = (sys.executable, "-m", "quire", "serve", "--port", "0")
COMMAND = (*SERVE, "--device", "cpu", "--dtype", "float32", "--kv-gib", "0.1")


def interruptible() -> None:
    """In the new process: a shell has what it runs in the background ignore interrupts, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Served:
    """The server's process, what it writes, and where it listens once it does."""

    LISTENS = r"quire serves .* at (http://127\.0\.0\.1:\d+)"

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log, self.url = log, ""
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True,
                preexec_fn=interruptible,
            )  # fmt: skip
        self.process = psutil.Process(self.child.pid)

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        """Those that it started."""
        with suppress(psutil.NoSuchProcess):
            return self.process.children(recursive=True)
        return []

    def ranks(self) -> list[psutil.Process]:
        """Those of them that are ranks, in the order of their numbers."""
        found = []
        for one in self.processes():
            with suppress(psutil.Error):
                words = one.cmdline()
                if RANK in words:
                    found.append((int(words[words.index(RANK) + 1]), one))
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def ready(self) -> Served:
        """It listens."""
        end = time.monotonic() + READY
        while not (found := re.search(self.LISTENS, self.text)):
            assert self.child.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.05)
        self.url = found[1]
        return self

    def complete(self, prompt: str = "Once upon a time", **more: object) -> str:
        """The text that follows."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=READY)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])


S = TypeVar("S", bound=Served)


@contextmanager
def served(
    folder: Path, *flags: str, before: Sequence[str] = (), env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND, kind: type[S] = Served,  # type: ignore[assignment]
) -> Iterator[S]:  # fmt: skip
    """A server of the bundled model with `flags`, started by `before`; nothing of it is left in the end."""
    one = kind([*before, *command, *flags], env or {}, folder / f"server-{time.monotonic_ns()}")
    try:
        yield one
    finally:
        with suppress(ProcessLookupError):
            os.killpg(one.child.pid, signal.SIGKILL)
        one.child.wait(60)
