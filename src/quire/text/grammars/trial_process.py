"""The client of the trial process, which compiles untrusted grammars first: starts it with the first grammar, sends it
grammars, and restarts it if it ends. It handles llguidance's grammar format only.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from quire.errors import Overloaded
from quire.protocol.json_frames import pack, unpack
from quire.text.grammars.trial_worker import MAX_ERROR, MAX_MEMORY, MAX_SECONDS
from quire.text.isolated_process import KILL_SECONDS, IsolatedProcess

START_SECONDS = 20.0  # for the process to start and load llguidance, on a busy disk
WAIT_SECONDS = 30.0  # for an answer, on a busy machine
MAX_ANSWER = 6 * MAX_ERROR + 2  # bytes, with each character escaped
TIME_REASON = f"making its grammar takes more than {MAX_SECONDS:g} s of a processor"
MEMORY_REASON = f"it is nested too deep, or making its grammar takes more than {MAX_MEMORY >> 20} MiB of memory"


class GrammarTooComplex(Exception):
    """Compiling a grammar exceeds the limits of time or memory; the message says which."""


class TrialProcessEnded(Exception):
    """The process ended before it answered, with this exit status."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class TrialProcess(IsolatedProcess):
    """A process that compiles grammars over one vocabulary to check them. It starts with the first grammar."""

    module, packages, purpose = "quire.text.grammars.trial_worker", ("llguidance",), "to try grammars"
    start_error, closed_reason = Overloaded, "the engine was closed"

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

    def _check(self, grammar: str, vocabulary: Mapping[str, Any]) -> str:
        if not self._is_running:
            self._start_over(vocabulary)
        try:
            return self._ask(grammar, WAIT_SECONDS)
        except TrialProcessEnded:
            self._stop()
            raise
        except TimeoutError as error:
            self._stop()
            raise Overloaded(f"a grammar could not be tried within {WAIT_SECONDS:g} s", 1) from error

    def _start_over(self, vocabulary: Mapping[str, Any]) -> None:
        self._start()
        try:
            if self._ask(vocabulary, START_SECONDS):
                raise TrialProcessEnded(None)
        except (TrialProcessEnded, TimeoutError) as error:
            self._stop()
            what = f"fails (status {error.status})" if isinstance(error, TrialProcessEnded) else "is late"
            raise Overloaded(f"the process that tries grammars {what} at its start", 1) from error

    def _stop(self) -> None:
        self._check_open()
        self._end()

    def _ask(self, message: Any, seconds: float) -> str:
        """Send a message and return the answer."""
        deadline = time.monotonic() + seconds
        self._send(pack(message), deadline)
        try:
            return str(unpack(self._receive(MAX_ANSWER, deadline)))
        except TimeoutError:
            raise
        except ValueError as error:
            raise TrialProcessEnded(None) from error
        except (EOFError, OSError) as error:
            raise TrialProcessEnded(self._exit_status()) from error

    def _exit_status(self) -> int | None:
        """Return the exit status of the process after it closed its connection."""
        self._check_open()
        assert self._process is not None, "the process was never started"
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(KILL_SECONDS)
        return None
