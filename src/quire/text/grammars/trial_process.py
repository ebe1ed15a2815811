"""The client of the trial process, which compiles untrusted grammars first: starts it with the first grammar, sends it
grammars, and restarts it if it ends. It handles llguidance's grammar format only.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.errors import EngineDead, Overloaded
from quire.text import isolated_process
from quire.text.grammars.trial_worker import HEADER, MAX_ANSWER, MAX_MEMORY, MAX_SECONDS

START_SECONDS = 20.0  # for the process to start and load llguidance, on a busy disk
WAIT_SECONDS = 30.0  # for an answer, on a busy machine
PROGRAM = Path(__file__).resolve().with_name("trial_worker.py")
TIME_REASON = f"making its grammar takes more than {MAX_SECONDS:g} s of a processor"
MEMORY_REASON = f"it is nested too deep, or making its grammar takes more than {MAX_MEMORY >> 20} MiB of memory"


class GrammarTooComplex(Exception):
    """Compiling a grammar exceeds the limits of time or memory; the message says which."""


class TrialProcessEnded(Exception):
    """The process ended before it answered, with this exit status."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class TrialProcess:
    """A process that compiles grammars over one vocabulary to check them. It starts with the first grammar, and ends
    with `close`, with this object or with the program.

    Thread-safe; serves one caller at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: weakref.finalize[Any, Any] | None = None

    def check_grammar(self, grammar: str, vocabulary: Mapping[str, Any]) -> str:
        """Return what is wrong with a grammar, or "". `vocabulary` is GrammarBackend.description. Raise
        GrammarTooComplex if it exceeds the limits, Overloaded if it cannot be checked now, and EngineDead after
        `close`."""
        with self._lock:
            try:
                return self._check(grammar, vocabulary)
            except TrialProcessEnded as ended:
                if ended.status == -signal.SIGPROF:
                    raise GrammarTooComplex(TIME_REASON) from ended
            try:  # the system may kill any process, so the grammar is blamed only if a second process ends too
                return self._check(grammar, vocabulary)
            except TrialProcessEnded as ended:
                raise GrammarTooComplex(TIME_REASON if ended.status == -signal.SIGPROF else MEMORY_REASON) from ended

    def close(self) -> None:
        """End the process. No grammar can be checked afterwards."""
        self._closed = True
        end = self._kill
        if end is not None:
            end()

    def _check(self, grammar: str, vocabulary: Mapping[str, Any]) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start(vocabulary)
        end = time.monotonic() + WAIT_SECONDS
        try:
            self._send(grammar.encode(), end)
            return self._read_answer(end)
        except TrialProcessEnded:
            self._stop()
            raise
        except TimeoutError as error:
            self._stop()
            raise Overloaded(f"a grammar could not be tried within {WAIT_SECONDS:g} s", 1) from error

    def _start(self, vocabulary: Mapping[str, Any]) -> None:
        self._stop()
        command = [str(PROGRAM), *isolated_process.package_folders("llguidance")]
        process, ours = isolated_process.start_isolated(command, "to try grammars", Overloaded)
        self._process, self._socket = process, ours
        self._kill = weakref.finalize(self, isolated_process.kill, process, ours)
        if self._closed:  # by another thread meanwhile
            self._kill()
        end = time.monotonic() + START_SECONDS
        try:
            self._send(json.dumps(vocabulary).encode(), end)
            if self._read_answer(end):
                raise TrialProcessEnded(None)
        except (TrialProcessEnded, TimeoutError) as error:
            self._stop()
            what = f"fails (status {error.status})" if isinstance(error, TrialProcessEnded) else "is late"
            raise Overloaded(f"the process that tries grammars {what} at its start", 1) from error

    def _stop(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")
        if self._kill is not None:
            self._kill()
        self._process = self._kill = None

    def _send(self, body: bytes, deadline: float) -> None:
        with suppress(BrokenPipeError, ConnectionError):  # the process ended, which reading the answer reports
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(len(body).to_bytes(HEADER, "big") + body)

    def _read_answer(self, deadline: float) -> str:
        size = int.from_bytes(self._read_exactly(HEADER, deadline), "big")
        if size > MAX_ANSWER:
            raise TrialProcessEnded(None)
        return self._read_exactly(size, deadline).decode(errors="replace")

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                chunk = self._socket.recv(size - len(data))
            except TimeoutError:
                raise
            except OSError:  # closed, or reset
                chunk = b""
            if not chunk:
                raise TrialProcessEnded(self._exit_status())
            data += chunk
        return bytes(data)

    def _exit_status(self) -> int | None:
        """Return the exit status of the process after it closed its connection."""
        if self._closed:
            raise EngineDead("the engine was closed")
        assert self._process is not None, "the process was never started"
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(isolated_process.KILL_SECONDS)
        return None
