"""What a reader of outputs finds, and what all readers have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

EventKind = Literal["content", "reasoning", "call", "arguments"]
ParserState = Callable[[str], bool]


class ParsedEvent(NamedTuple):
    """A piece of an output. "call": the `index`-th call begins, `text` is its tool's name. "arguments": more of its
    arguments, as JSON text."""

    kind: EventKind
    text: str
    index: int = 0


class EventBuffer:
    """Events in order; pieces of the same text are joined."""

    def __init__(self) -> None:
        self._events: list[tuple[EventKind, int, list[str]]] = []
        self._num_takes = 0  # how often

    def add(self, kind: EventKind, text: str, index: int = 0) -> None:
        """One more."""
        if self._events and kind != "call" and self._events[-1][:2] == (kind, index):
            self._events[-1][2].append(text)
        else:
            self._events.append((kind, index, [text]))

    def take(self) -> list[ParsedEvent]:
        """Those since the last call."""
        found, self._events = self._events, []
        self._num_takes += 1
        return [ParsedEvent(kind, "".join(texts), index) for kind, index, texts in found]

    def mark(self) -> tuple[int, int]:
        """Where the next event goes that is not joined to the last one."""
        return self._num_takes, len(self._events)

    def rollback(self, mark: tuple[int, int]) -> bool:
        """Forget the events since `mark`. Return False if some of them were taken."""
        taken, at = mark
        if taken == self._num_takes:
            del self._events[at:]
        return taken == self._num_takes


class OutputParser:
    """Takes a text, a character at a time, each in the present state. A state that doesn't take its character has set
    another state, which is asked in its place; `steps` counts both."""

    def __init__(self) -> None:
        self.events = EventBuffer()
        self.steps = 0
        self.state: ParserState = self._in_content

    def feed(self, text: str) -> list[ParsedEvent]:
        """What `text`, the next of the output, brings."""
        for char in text:
            self.take(char)
        return self.events.take()

    def take(self, char: str) -> None:
        """Take the next character."""
        self.steps += 1
        while not self.state(char):
            self.steps += 1

    def finish(self) -> list[ParsedEvent]:
        """What remains when the output has ended."""
        return self.events.take()

    def _in_content(self, char: str) -> bool:
        self.events.add("content", char)
        return True


class ToolCallParser(OutputParser):
    """Text with calls in it. `marker` is what calls begin with, "" where only the place tells. What turns out to be no
    call is text, all of it, unless a part was passed on before. White space before a call, and around calls, is no
    text."""

    marker = ""

    def __init__(self, tool_names: Iterable[str]) -> None:
        """`tool_names` are those of the tools there are."""
        super().__init__()
        self.tool_names = frozenset(tool_names)
        self.num_calls = 0
        self.pending: list[str] = []  # read, and either text or a part of a call
        self._pending_space: list[str] = []  # white space that is text if text follows
        self._matched = 0  # characters of the marker that were read
        # the text of the call that is read, its marker and the white space before
        self._call_text: list[str] | None = None
        self._arguments: list[str] = []  # of that call
        self._mark = self.events.mark()  # of that call's events
        assert not self.marker or self.marker[0] not in self.marker[1:], "matching never goes back"

    def is_tool(self, name: str) -> bool:
        """Whether a name is one to call. With a marker a call is meant whatever its name: who asked may say so."""
        return bool(self.marker) or name in self.tool_names

    def finish(self) -> list[ParsedEvent]:
        self.flush_as_text()
        if not self.num_calls:
            self._flush_space()
        return super().finish()

    def begin_call(self, name: str) -> None:
        """What was read since the marker is a call."""
        self._call_text, self._arguments, self._mark = [*self._pending_space, *self.pending], [], self.events.mark()
        self.pending, self._pending_space = [], []
        self.events.add("call", name, self.num_calls)
        self.num_calls += 1

    def take(self, char: str) -> None:
        super().take(char)
        if self._call_text is not None:
            self._call_text.append(char)

    def add_arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._arguments.append(text)
        self.events.add("arguments", text, self.num_calls - 1)

    @property
    def in_call(self) -> bool:
        """A call is read."""
        return self._call_text is not None

    def end_call(self, char: str = "") -> bool:
        """End the call that began last, with `char`. Return False if its arguments are no JSON object and it became
        text again; one of which a part was passed on stays a call."""
        assert self._call_text is not None, "a call is read"
        said, self._call_text = [*self._call_text, char], None
        try:
            whole = isinstance(json.loads("".join(self._arguments), parse_constant=_reject_constant), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole or not self.events.rollback(self._mark):
            return True
        self.num_calls -= 1
        for one in said:
            self._add_content(one)
        self.pending, self.state = [], self._in_content
        return False

    def flush_as_text(self) -> None:
        """What was read is text after all."""
        said, self.pending = self.pending, []
        self._matched = 0
        for char in said:
            self._add_content(char)
        self.state = self._in_content

    def on_marker(self) -> None:
        """The marker was read: set the state that reads a call."""

    def _add_content(self, char: str) -> None:
        if char.isspace():
            self._pending_space.append(char)
        else:
            self._flush_space()
            self.events.add("content", char)

    def _flush_space(self) -> None:
        if self._pending_space:
            self.events.add("content", "".join(self._pending_space))
            self._pending_space = []

    def _in_content(self, char: str) -> bool:
        if self.marker and char == self.marker[self._matched]:
            self.pending.append(char)
            self._matched += 1
            if self._matched == len(self.marker):
                self._matched = 0
                self.on_marker()
            return True
        if self._matched:
            self.flush_as_text()
            return False
        self._add_content(char)
        return True


def _reject_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
