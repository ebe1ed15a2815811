"""The client of the template process: starts it, sends it requests with limits, kills and restarts it.

A template is an untrusted program, and a C call cannot be interrupted from within its process. This module handles
frames, not messages.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from quire.errors import EngineDead, Overloaded, StartupError
from quire.protocol.json_frames import HEADER, pack, unpack
from quire.text import isolated_process

START_SECONDS = 20.0  # for the process to start and load Jinja, on a busy disk
COMPILE_SECONDS = 5.0
LOCK_SECONDS = 10.0  # a render's wait for others
STARVED_FRACTION = 0.05  # of a render's time: with less CPU time than this, the system starved the process
KILL_FRACTION = 0.9  # of a render's time: then the process is killed, so that the call ends in time
MAX_FRAME = 16 << 20  # bytes
MAX_REASON = 4096  # bytes of a reply without a text
BOOT = "import sys; sys.path += sys.argv[1:]; from quire.text.template_worker import main; main()"


class RenderError(Exception):
    """The template failed or exceeded its limits; the message says how."""


class TemplateProcessEnded(RenderError):
    """The process ended before it answered, because of the template or because the system killed it."""


class TemplateProcessStarved(TemplateProcessEnded):
    """The process was late, and is gone or got hardly any CPU time. This is not the template's fault."""


class TemplateProcess:
    """The process of a template. It starts with this object, and ends with `close`, with this object or with the
    program.

    Thread-safe; serves one caller at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source = ""
        self._closed = False
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

    def close(self) -> None:
        """End the process. Nothing can be rendered afterwards."""
        self._closed = True
        self._kill()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise Overloaded(f"the chat template is busy for more than {LOCK_SECONDS:g} s", 1)
        try:
            yield
        finally:
            self._lock.release()

    def _start(self) -> None:
        if self._closed:
            raise EngineDead("the chat template is closed")
        self._is_up = self._is_compiled = False
        command = ["-c", BOOT, *isolated_process.package_folders("quire", "jinja2", "markupsafe")]
        # TZ: for the template's clock.
        process, ours = isolated_process.start_isolated(
            command, "for the chat template", StartupError, variables=("TZ",)
        )
        self._socket, self._kill = ours, weakref.finalize(self, isolated_process.kill, process, ours)
        self._pid = process.pid
        if self._closed:  # by another thread meanwhile
            self._kill()

    def _restart(self) -> None:
        """Start another process, if possible now; otherwise the next call tries again."""
        self._kill()
        self._is_up = self._is_compiled = False
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
        if not self._kill.alive:
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
        end, spent = time.monotonic() + seconds, _cpu_seconds(self._pid)
        with suppress(OSError):  # the process ended or hangs, which reading the answer reports
            self._socket.settimeout(seconds)
            self._socket.sendall(frame)
        return self._read_answer(end, seconds, max_bytes, spent)

    def _read_answer(self, deadline: float, seconds: float, max_bytes: int, cpu_seconds: float = 0.0) -> Any:
        """Return the result in a reply of at most `max_bytes` bytes before `deadline`. `cpu_seconds` is the process's
        CPU time before the request. After any failure the process is replaced, so that a late reply is never taken for
        that of the next request."""
        try:
            size = int.from_bytes(self._receive(HEADER, deadline), "big")
            if size > max_bytes:
                raise ValueError
            kind, value = unpack(self._receive(size, deadline))
        except TimeoutError as error:
            starved = _cpu_seconds(self._pid) - cpu_seconds < seconds * STARVED_FRACTION
            self._restart()
            if starved:
                raise TemplateProcessStarved(f"it got no answer in {seconds:g} s") from error
            raise RenderError(f"it ran longer than {seconds:g} s") from error
        except (EOFError, OSError) as error:
            self._restart()
            raise TemplateProcessEnded("its process ended") from error
        except (ValueError, TypeError, RecursionError) as error:
            self._restart()
            raise RenderError("its process gave no answer") from error
        if kind == "exhausted":
            self._restart()
        if kind in ("failed", "exhausted"):
            raise RenderError(str(value))
        return value if kind == "done" else None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk = self._socket.recv(min(size - len(data), 1 << 20))
            if not chunk and time.monotonic() >= deadline:
                raise TimeoutError  # it was late and ended itself
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0
