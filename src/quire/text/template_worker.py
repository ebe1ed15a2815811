"""The program of the template process: compiles and renders a chat template, with limits. Started by
template_process.py.

It reports when it is ready, then reads request frames from descriptor 0 and writes replies to descriptor 1. It ends at
the end of its input, after a render that ran out of memory, and when a request takes too long. It opens no files, and
knows only the template.
"""

from __future__ import annotations

import html  # noqa: F401 (imported before the limits, for templates)
import signal
import sys
import unicodedata  # noqa: F401 (for the names in a template's escapes)
from collections.abc import Iterator
from typing import Any

import jinja2.debug  # noqa: F401 (as above, when a template fails)
from jinja2 import Template, meta, nodes

from quire.protocol.json_frames import unpack
from quire.text.isolated_worker import read_frame, set_limits, set_signals, write_frame
from quire.text.template_sandbox import RenderBudget, Sandbox, TimeExceeded

MAX_MEMORY = 224 << 20  # bytes of address space beyond those at the start, to stay below 256 MiB in all
SPARE_SECONDS = 1.0  # beyond the time after which the parent kills this process
MAX_REASON = 200
# Its render imports the remaining modules.
WARM_UP = r"{% for m in messages %}{{ m.role | striptags ~ '\u00e9' ~ strftime_now('%d') }}{% endfor %}"


def main() -> None:
    """Serve requests until the input ends."""
    set_signals(signal.SIGALRM)
    work = TemplateWorker()
    for request in (["compile", WARM_UP], ["render", {"messages": [{"role": "a"}]}, 10.0, 100]):
        work.handle(request)
    set_limits(MAX_MEMORY)
    write_frame(["done", None])
    while (body := read_frame()) is not None:
        try:
            seconds, request = unpack(body)
            # The signal ends the process: a C call may never return, and the parent may be gone.
            signal.setitimer(signal.ITIMER_REAL, seconds + SPARE_SECONDS)
            answer = work.handle(request)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except MemoryError:
            write_frame(["exhausted", f"it needs more than {MAX_MEMORY >> 20} MiB of memory"])
            sys.exit(1)
        write_frame(answer)


class TemplateWorker:
    """A template and its sandbox."""

    def __init__(self) -> None:
        self._sandbox = Sandbox()
        self._template: Template | None = None

    def handle(self, request: list[Any]) -> list[Any]:
        """Handle ["compile", source] or ["render", variables, seconds, bytes]. Return ["done", result], ["failed",
        reason], ["late", reason] or ["large", ""]. MemoryError is not caught."""
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
        except TimeExceeded as error:
            return ["late", str(error)]
        except Exception as error:  # a template is a program: it may fail in any way
            return ["failed", (str(error) or type(error).__name__)[:MAX_REASON]]

    def _compile(self, source: str) -> list[str]:
        """Return the variables that the template expects from its caller, sorted. Those that it sets before it reads
        them, even if only in one branch, are excluded."""
        self._template = self._sandbox.from_string(source)
        tree = self._sandbox.parse(source)
        first_uses: dict[str, str] = {}
        for name in _names_in_order(tree):
            first_uses.setdefault(name.name, name.ctx)
        read = {name for name in meta.find_undeclared_variables(tree) if first_uses.get(name) != "store"}
        return sorted(read - self._sandbox.globals.keys())

    def _render(self, variables: dict[str, Any], seconds: float, max_bytes: int) -> str | None:
        """Return the text, or None if it has more than `max_bytes` bytes."""
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


def _names_in_order(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield the names in a template in the order of their use. The target of an assignment comes last."""
    if isinstance(node, nodes.Name):
        yield node
    children = [*node.iter_child_nodes()]
    if isinstance(node, nodes.Assign):
        children.reverse()
    for child in children:
        yield from _names_in_order(child)
