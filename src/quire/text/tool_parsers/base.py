"""The events of tool call parsers, and their base class."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

EventKind = Literal["content", "reasoning", "call", "arguments"]
ParserState = Callable[[str], bool]


class ParsedEvent(NamedTuple):
    """A piece of an output. "call": the `index`-th call begins, and `text` is the tool's name. "arguments": `text` is
    more of its arguments, as JSON text."""

    kind: EventKind
    text: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which is not used


class EventBuffer:
    """Events in order. Adjacent text of the same kind and index is joined."""

    def __init__(self) -> None:
        self._events: list[tuple[EventKind, int, list[str]]] = []
        self._num_takes = 0

    def add(self, kind: EventKind, text: str, index: int = 0) -> None:
        """Append an event."""
        if self._events and kind != "call" and self._events[-1][:2] == (kind, index):
            self._events[-1][2].append(text)
        else:
            self._events.append((kind, index, [text]))

    def take(self) -> list[ParsedEvent]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        self._num_takes += 1
        return [ParsedEvent(kind, "".join(texts), index) for kind, index, texts in taken]

    def mark(self) -> tuple[int, int]:
        """Return a position to roll back to: that of the next event that is not joined to the last one."""
        return self._num_takes, len(self._events)

    def rollback(self, mark: tuple[int, int]) -> bool:
        """Remove the events since `mark`. Return False if some of them were taken already."""
        num_takes, at = mark
        if num_takes == self._num_takes:
            del self._events[at:]
        return num_takes == self._num_takes


class ToolCallParser:
    """Parser of text that contains tool calls: a state machine that takes it character by character. A state returns
    False if it did not consume the character; it has then set another state, which gets the same character.

    `marker` is what calls begin with; it is "" for formats that only allow calls at the start of the output. Input that
    turns out not to be a call becomes text, unless a part of it was passed on before. White space before and around
    calls is dropped. With `takes_any_name` every name can be called: the client reports an unknown tool. `steps` counts
    the calls of states."""

    marker = ""
    takes_any_name = False

    def __init__(self, tool_names: Iterable[str]) -> None:
        """`tool_names` are the names of the request's tools."""
        self.events = EventBuffer()
        self.steps = 0
        self.state: ParserState = self._in_content
        self.tool_names = frozenset(tool_names)
        self.num_calls = 0
        self.pending: list[str] = []  # characters that are either text or a part of a call
        self._pending_space: list[str] = []  # white space that is text if text follows
        self._matched = 0  # characters of the marker that were read
        # the text of the current call, with its marker and the white space before it
        self._call_text: list[str] | None = None
        self._arguments: list[str] = []  # of that call
        self._mark = self.events.mark()  # of that call's events
        assert not self.marker or self.marker[0] not in self.marker[1:], (
            "the first character of the marker occurs in it again"
        )

    def feed(self, text: str) -> list[ParsedEvent]:
        """Consume the next text of the output and return its events."""
        for char in text:
            self.take(char)
        return self.events.take()

    def take(self, char: str) -> None:
        """Consume the next character."""
        self.steps += 1
        while not self.state(char):
            self.steps += 1
        if self._call_text is not None:
            self._call_text.append(char)

    def finish(self) -> list[ParsedEvent]:
        """Return the remaining events after the end of the output."""
        self.flush_as_text()
        if not self.num_calls:
            self._flush_space()
        return self.events.take()

    def is_tool(self, name: str) -> bool:
        """Return True if `name` can be called."""
        return self.takes_any_name or name in self.tool_names

    def begin_call(self, name: str) -> None:
        """Begin a call with the text read since the marker."""
        self._call_text, self._arguments, self._mark = [*self._pending_space, *self.pending], [], self.events.mark()
        self.pending, self._pending_space = [], []
        self.events.add("call", name, self.num_calls)
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._arguments.append(text)
        self.events.add("arguments", text, self.num_calls - 1)

    def end_call(self, char: str = "") -> bool:
        """End the last call with `char`. Return False if its arguments are not a JSON object and it became text again.
        A call of which a part was passed on stays a call."""
        assert self._call_text is not None, "end_call outside a call"
        call_text, self._call_text = [*self._call_text, char], None
        try:
            whole = isinstance(json.loads("".join(self._arguments), parse_constant=_reject_constant), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole or not self.events.rollback(self._mark):
            return True
        self.num_calls -= 1
        for one in call_text:
            self._add_content(one)
        self.pending, self.state = [], self._in_content
        return False

    def flush_as_text(self) -> bool:
        """Emit the pending characters as text. Return False: the character at hand is not consumed."""
        pending, self.pending = self.pending, []
        self._matched = 0
        for char in pending:
            self._add_content(char)
        self.state = self._in_content
        return False

    def take_closing(self, char: str, marker: str) -> bool:
        """Consume a character of an optional closing marker. Other characters, and the part that was read, are text."""
        at = len(self.pending)
        if char != marker[at]:
            pending, self.pending, self.state = self.pending, [], self._in_content
            for one in pending:
                self.steps += 1
                self._in_content(one)
            return False
        self.pending.append(char)
        if at + 1 == len(marker):
            self.pending, self.state = [], self._in_content
        return True

    def is_marker_start(self, char: str) -> bool:
        """If `char` may begin the marker before any call, prepare to read the marker, and return True."""
        if char != self.marker[0] or "".join(self.pending).strip():
            return False
        self._pending_space, self.pending, self.state = self.pending, [], self._in_content
        return True

    def on_marker(self) -> None:
        """Set the state that parses a call; called after the marker."""

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
            return self.flush_as_text()
        self._add_content(char)
        return True


def _reject_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
