"""The process that tries to make grammars, from the outside: started with the first one, asked, started again if it
ended. It knows llguidance's own form of grammars, not where they come from.
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
from quire.text import confined
from quire.text.grammar_trial import HEADER, MAX_ANSWER, MEMORY, SECONDS

START_SECONDS = 20.0  # for the process to come up: it loads llguidance from a disk that may be busy
WAIT_SECONDS = 30.0  # for an answer, on a machine that has little time for the process
PROGRAM = Path(__file__).resolve().with_name("grammar_trial.py")
TIME = f"making its grammar takes more than {SECONDS:g} s of a processor"
SPACE = f"it is nested too deep, or making its grammar takes more than {MEMORY >> 20} MiB of memory"


class TooComplex(Exception):
    """A grammar takes more than may be spent on making it; says what."""


class Ended(Exception):
    """The process was gone before it answered, with this status."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class Trials:
    """A process that tries the grammars of one vocabulary. It starts with the first, and ends with `close`, with this
    object or with the program.

    Any thread may ask; one at a time is served."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def why_not(self, grammar: str, about: Mapping[str, Any]) -> str:
        """What is wrong with a grammar; "" if nothing is. `about` is what its process must know of the vocabulary
        (Masker.about). TooComplex if that takes too much; Overloaded if it can't be found out now, EngineDead after
        `close`."""
        with self._turn:
            try:
                return self._asked(grammar, about)
            except Ended as ended:
                if ended.status == -signal.SIGPROF:
                    raise TooComplex(TIME) from ended
            try:  # killed by the system, which may kill any process: only in a second one it's the grammar's doing
                return self._asked(grammar, about)
            except Ended as ended:
                raise TooComplex(TIME if ended.status == -signal.SIGPROF else SPACE) from ended

    def close(self) -> None:
        """End the process; nothing can be tried any more."""
        self._closed = True
        end = self._end
        if end is not None:
            end()

    def _asked(self, grammar: str, about: Mapping[str, Any]) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start(about)
        end = time.monotonic() + WAIT_SECONDS
        try:
            self._send(grammar.encode(), end)
            return self._answer(end)
        except Ended:
            self._stop()
            raise
        except TimeoutError as error:
            self._stop()
            raise Overloaded(f"a grammar could not be tried within {WAIT_SECONDS:g} s", 1) from error

    def _start(self, about: Mapping[str, Any]) -> None:
        self._stop()
        command = [str(PROGRAM), *confined.folders_of("llguidance")]
        process, ours = confined.start(command, "to try grammars", Overloaded)
        self._process, self._socket = process, ours
        self._end = weakref.finalize(self, confined.end, process, ours)
        if self._closed:  # meanwhile, by another thread
            self._end()
        end = time.monotonic() + START_SECONDS
        try:
            self._send(json.dumps(about).encode(), end)
            if self._answer(end):
                raise Ended(None)
        except (Ended, TimeoutError) as error:
            self._stop()
            what = f"fails (status {error.status})" if isinstance(error, Ended) else "is late"
            raise Overloaded(f"the process that tries grammars {what} at its start", 1) from error

    def _stop(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _send(self, body: bytes, end: float) -> None:
        with suppress(BrokenPipeError, ConnectionError):  # of a process that ended: the answer tells
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            self._socket.sendall(len(body).to_bytes(HEADER, "big") + body)

    def _answer(self, end: float) -> str:
        size = int.from_bytes(self._exactly(HEADER, end), "big")
        if size > MAX_ANSWER:
            raise Ended(None)
        return self._exactly(size, end).decode(errors="replace")

    def _exactly(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                chunk = self._socket.recv(size - len(data))
            except TimeoutError:
                raise
            except OSError:  # closed, or reset
                chunk = b""
            if not chunk:
                raise Ended(self._status())
            data += chunk
        return bytes(data)

    def _status(self) -> int | None:
        """How the process ended, which has left its connection."""
        if self._closed:
            raise EngineDead("the engine was closed")
        assert self._process is not None, "it was started"
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(confined.KILL_SECONDS)
        return None
