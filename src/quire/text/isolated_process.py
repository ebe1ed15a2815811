"""Isolated child processes for untrusted input: they inherit one connection and the environment variables that their
loader needs, and no files. isolated_worker.py is the child's side.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.errors import EngineDead, QuireError
from quire.protocol.json_frames import HEADER

KILL_SECONDS = 5.0
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment
BOOT = "import sys; sys.path += sys.argv[1:]; from {} import main; main()"


class IsolatedProcess:
    """A Python program in a process of its own, which can be started again. It ends with `close`, with this object or
    with the program that started it. Subclasses are thread-safe and serve one caller at a time."""

    module: str  # its `main` is the program
    packages: Sequence[str]  # that it imports, besides quire
    variables: Sequence[str] = ()  # of the environment that it gets besides KEPT_VARIABLES
    purpose: str  # completes errors: "for ...", "to ..."
    start_error: type[QuireError]
    closed_reason: str

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: weakref.finalize[Any, Any] | None = None

    def close(self) -> None:
        """End the process. It cannot be used afterwards."""
        self._closed = True
        self._end()

    @property
    def _is_running(self) -> bool:
        return (
            self._process is not None and self._process.poll() is None and self._kill is not None and self._kill.alive
        )

    def _end(self) -> None:
        if self._kill is not None:
            self._kill()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(self.closed_reason)

    def _start(self) -> None:
        """Start the program, in place of the previous process. Raise EngineDead after `close`, and `start_error` if the
        system refuses."""
        self._end()
        self._check_open()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise self.start_error(f"no socket can be had {self.purpose}: {error.strerror}") from error
        names, folders = (*KEPT_VARIABLES, *self.variables), _package_folders("quire", *self.packages)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", BOOT.format(self.module), *folders],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, cwd="/",
                env={name: os.environ[name] for name in names if name in os.environ},
                start_new_session=True,  # so that a terminal's Ctrl-C does not reach it
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise self.start_error(f"no process can be started {self.purpose}: {error.strerror}") from error
        finally:
            theirs.close()
        self._process, self._socket = process, ours
        self._kill = weakref.finalize(self, _kill, process, ours)
        if self._closed:  # by another thread meanwhile
            self._kill()

    def _send(self, frame: bytes, deadline: float) -> None:
        """Send a frame. Failures are ignored, since receiving the answer reports them."""
        with suppress(OSError):
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(frame)

    def _receive(self, max_bytes: int, deadline: float) -> bytes:
        """Return the body of the next frame. Raise ValueError if it has more than `max_bytes` bytes, TimeoutError at
        `deadline` (time.monotonic), and EOFError or another OSError if the process has ended."""
        size = int.from_bytes(self._receive_exactly(HEADER, deadline), "big")
        if size > max_bytes:
            raise ValueError(f"a frame of {size} bytes; the limit is {max_bytes}")
        return self._receive_exactly(size, deadline)

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk = self._socket.recv(min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def _kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Kill the process and wait until it is gone."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    connection.close()


def _package_folders(*names: str) -> list[str]:
    """Return the folders that contain these packages, as far as they are installed."""
    specs = [find_spec(name) for name in names]
    locations = [spec.submodule_search_locations for spec in specs if spec is not None]
    return list(dict.fromkeys(str(Path(paths[0]).resolve().parent) for paths in locations if paths))
