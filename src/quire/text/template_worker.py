"""The program that compiles and renders a chat template, in a process of its own with limits; renderer.py starts it.

It says when it is up, then answers frames from descriptor 0 on descriptor 1. It ends when its input does, after a
render that ran out of memory, and when nobody ended it in time. It opens nothing, and knows of nothing but the
template.
"""

from __future__ import annotations

import html  # noqa: F401 (what a template may need later, and can't be loaded then)
import os
import resource
import signal
import sys
import unicodedata  # noqa: F401 (for the names in a template's escapes)
from typing import Any

import jinja2.debug  # noqa: F401 (as above, when a template fails)
from jinja2 import Template, meta

from quire.protocol.json_frames import HEADER, pack, unpack
from quire.text.template_sandbox import RenderBudget, Sandbox

MAX_MEMORY = 224 << 20  # bytes of addresses beyond those of the start, so that in all it stays below 256 MiB
SPARE_SECONDS = 1.0  # seconds beyond those after which whoever asks ends this process
MAX_REASON = 200
# loads the rest
WARM_UP = r"{% for m in messages %}{{ m.role | striptags ~ '\u00e9' ~ strftime_now('%d') }}{% endfor %}"


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # may be ignored or blocked by inheritance
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    work = TemplateWorker()
    for asked in (["compile", WARM_UP], ["render", {"messages": [{"role": "a"}]}, 10.0, 100]):
        work.handle(asked)
    _set_limits()
    _write(pack(["done", None]))
    while (header := _read(HEADER)) is not None and (body := _read(int.from_bytes(header, "big"))) is not None:
        try:
            seconds, asked = unpack(body)
            # Ends the process: one call into C may go on for ever, and nobody may be left to end it.
            signal.setitimer(signal.ITIMER_REAL, seconds + SPARE_SECONDS)
            answer = work.handle(asked)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except MemoryError:
            _write(pack(["exhausted", f"it needs more than {MAX_MEMORY >> 20} MiB of memory"]))
            sys.exit(1)
        _write(pack(answer))


class TemplateWorker:
    """A template and its sandbox."""

    def __init__(self) -> None:
        self._sandbox = Sandbox()
        self._template: Template | None = None

    def handle(self, request: list[Any]) -> list[Any]:
        """What ["compile", source] or ["render", variables, seconds, bytes] gives: ["done", what], ["failed", why] or
        ["large", ""]. MemoryError passes through."""
        try:
            match request:
                case ["compile", source]:
                    return ["done", self._compile(source)]
                case ["render", variables, seconds, most]:
                    text = self._render(variables, seconds, most)
                    return ["large", ""] if text is None else ["done", text]
            raise AssertionError("an unknown frame")
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            return ["failed", (str(error) or type(error).__name__)[:MAX_REASON]]

    def _compile(self, source: str) -> list[str]:
        """The variables that the template reads, in order."""
        self._template = self._sandbox.from_string(source)
        read = meta.find_undeclared_variables(self._sandbox.parse(source))
        return sorted(read - self._sandbox.globals.keys())

    def _render(self, variables: dict[str, Any], seconds: float, max_bytes: int) -> str | None:
        """The text, None if it has more than `max_bytes` bytes."""
        assert self._template is not None, "nothing is compiled"
        self._sandbox.budget = RenderBudget(seconds)
        size, chunks = 0, []
        for chunk in self._template.generate(variables):
            self._sandbox.budget.tick()
            size += len(chunk) if chunk.isascii() else len(chunk.encode("utf-8", "surrogatepass"))
            if size > max_bytes:
                return None
            chunks.append(chunk)
        return "".join(chunks)


def _set_limits() -> None:
    """So much memory, where the system tells what is in use; no core, and no further file or descriptor."""
    in_use = _address_space_bytes()
    if in_use is not None:
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_MEMORY, in_use + MAX_MEMORY))
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(what, (most, most))


def _address_space_bytes() -> int | None:
    """Bytes of addresses that this process has; None where the system doesn't tell so."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _read(size: int) -> bytes | None:
    """Exactly `size` bytes; None at the end of the input."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
