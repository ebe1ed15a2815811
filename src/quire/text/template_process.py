"""The client of the template process: starts it, sends it requests with limits, kills and restarts it.

A template is an untrusted program, and a C call cannot be interrupted from within its process. This module handles
frames, not messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from quire.errors import Overloaded, StartupError
from quire.protocol.json_frames import pack, unpack
from quire.text.isolated_process import IsolatedProcess

START_SECONDS = 20.0  # for the process to start and load Jinja, on a busy disk
COMPILE_SECONDS = 5.0
LOCK_SECONDS = 10.0  # a render's wait for others
STARVED_FRACTION = 0.05  # of a render's time: with less CPU time than this, the system starved the process
KILL_FRACTION = 0.9  # of a render's time: then the process is killed, so that the call ends in time
MAX_FRAME = 16 << 20  # bytes
MAX_REASON = 4096  # bytes of a reply without a text


class RenderError(Exception):
    """The template failed or exceeded its limits; the message says how."""


class RenderTimeout(RenderError):
    """The template ran too long, which may be the fault of a busy machine."""


class TemplateProcessEnded(RenderError):
    """The process ended before it answered, because of the template or because the system killed it."""


class TemplateProcessStarved(TemplateProcessEnded):
    """The process was late, and is gone or got hardly any CPU time. This is not the template's fault."""


class TemplateProcess(IsolatedProcess):
    """The process of a template. It starts with this object."""

    module, packages, purpose = "quire.text.template_worker", ("jinja2", "markupsafe"), "for the chat template"
    variables = ("TZ",)  # for the template's clock
    start_error, closed_reason = StartupError, "the chat template is closed"

    def __init__(self) -> None:
        super().__init__()
        self._source = ""
        self._start()

    def compile(self, source: str) -> list[str]:
        """Compile `source` for later renders, and return the variables that it reads. Raise RenderError if it cannot be
        compiled."""
        with self._exclusive():
            self._source = source
            return self._compile()

    def render(self, variables: dict[str, Any], seconds: float, max_bytes: int) -> str | None:
        """Return the text, or None if it has more than `max_bytes` bytes. Raise RenderError for the template's errors
        and for exceeded limits, within `seconds` (twice that if the process ends in the first try), Overloaded if other
        renders take too long or the process cannot be restarted or gets no CPU time, and EngineDead after `close`."""
        with self._exclusive():
            try:
                return self._render(variables, seconds, max_bytes)
            except TemplateProcessEnded:
                # The system may have killed it, so the template is blamed only if a second process ends too.
                try:
                    return self._render(variables, seconds, max_bytes)
                except TemplateProcessStarved as error:
                    raise Overloaded("the chat template's process gets no processor time", 1) from error

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise Overloaded(f"the chat template is busy for more than {LOCK_SECONDS:g} s", 1)
        try:
            yield
        finally:
            self._lock.release()

    def _start(self) -> None:
        self._is_up = self._is_compiled = False
        super()._start()

    def _restart(self) -> None:
        """Start another process, if possible now; otherwise the next call tries again."""
        with suppress(StartupError):
            self._start()

    def _render(self, variables: dict[str, Any], seconds: float, max_bytes: int) -> str | None:
        if not self._is_compiled:
            self._recompile()
        text = self._ask(["render", variables, seconds, max_bytes], KILL_FRACTION * seconds, 6 * max_bytes + MAX_REASON)
        if text is not None and not isinstance(text, str):
            raise RenderError("its process answered with no text")
        return text

    def _recompile(self) -> None:
        """Compile again in a new process. The template compiled before, so a failure is not the request's fault."""
        try:
            try:
                self._compile()
            except TemplateProcessEnded:
                self._compile()
        except (RenderError, StartupError) as error:
            raise Overloaded(f"the chat template's process can't be started again: {error}", 1) from error

    def _compile(self) -> list[str]:
        if not self._is_running:
            self._start()
        if not self._is_up:
            self._read_answer(time.monotonic() + START_SECONDS, START_SECONDS, MAX_REASON)
            self._is_up = True
        read: list[str] = self._ask(["compile", self._source], COMPILE_SECONDS, 2 * MAX_FRAME)
        self._is_compiled = True
        return read

    def _ask(self, request: list[Any], seconds: float, max_bytes: int) -> Any:
        frame = pack([seconds, request])
        if len(frame) > MAX_FRAME:
            raise RenderError(f"what it is given has {len(frame)} bytes; {MAX_FRAME} are the most")
        end, spent = time.monotonic() + seconds, self._cpu_seconds()
        self._send(frame, end)
        return self._read_answer(end, seconds, max_bytes, spent)

    def _read_answer(self, deadline: float, seconds: float, max_bytes: int, cpu_seconds: float = 0.0) -> Any:
        """Return the result in a reply of at most `max_bytes` bytes before `deadline`. `cpu_seconds` is the process's
        CPU time before the request. After any failure the process is replaced, so that a late reply is never taken for
        that of the next request."""
        try:
            kind, value = unpack(self._receive(max_bytes, deadline))
        except TimeoutError as error:
            starved = self._cpu_seconds() - cpu_seconds < seconds * STARVED_FRACTION
            self._restart()
            if starved:
                raise TemplateProcessStarved(f"it got no answer in {seconds:g} s") from error
            raise RenderTimeout(f"it ran longer than {seconds:g} s") from error
        except (EOFError, OSError) as error:
            self._restart()
            raise TemplateProcessEnded("its process ended") from error
        except (ValueError, TypeError, RecursionError) as error:
            self._restart()
            raise RenderError("its process gave no answer") from error
        if kind == "exhausted":
            self._restart()
        if kind == "late":
            raise RenderTimeout(str(value))
        if kind in ("failed", "exhausted"):
            raise RenderError(str(value))
        return value if kind == "done" else None

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        try:
            return super()._receive_exactly(size, deadline)
        except EOFError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None  # it was late and ended itself
            raise

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the process in seconds; 0 if it is gone."""
        assert self._process is not None, "the process was never started"
        try:
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        except psutil.Error:
            return 0.0
