"""What a reader of outputs finds, and what all readers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning", "call", "arguments"]
State = Callable[[str], bool]


class Event(NamedTuple):
    """A piece of an output. "call": the `index`-th call begins, `text` is its tool's name. "arguments": more of its
    arguments, as JSON text."""

    kind: Kind
    text: str
    index: int = 0


class Events:
    """Events in order; pieces of the same text are joined."""

    def __init__(self) -> None:
        self._found: list[tuple[Kind, int, list[str]]] = []

    def add(self, kind: Kind, text: str, index: int = 0) -> None:
        """One more."""
        if self._found and kind != "call" and self._found[-1][:2] == (kind, index):
            self._found[-1][2].append(text)
        else:
            self._found.append((kind, index, [text]))

    def take(self) -> list[Event]:
        """Those since the last call."""
        found, self._found = self._found, []
        return [Event(kind, "".join(texts), index) for kind, index, texts in found]


class Reader:
    """Takes a text, a character at a time, each in the present state. A state that doesn't take its character has set
    another state, which is asked in its place; `steps` counts both."""

    def __init__(self) -> None:
        self.events = Events()
        self.steps = 0
        self.state: State = self._content

    def feed(self, text: str) -> list[Event]:
        """What `text`, the next of the output, brings."""
        for char in text:
            self.steps += 1
            while not self.state(char):
                self.steps += 1
        return self.events.take()

    def end(self) -> list[Event]:
        """What remains when the output has ended."""
        return self.events.take()

    def _content(self, char: str) -> bool:
        self.events.add("content", char)
        return True


class CallReader(Reader):
    """Text with calls in it. `marker` is what calls begin with, "" where only the place tells. What turns out to be no
    call is text. White space before a call, and around calls, is no text."""

    marker = ""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are those of the tools there are."""
        super().__init__()
        self.names = frozenset(names)
        self.calls = 0
        self.raw: list[str] = []  # read, and either text or a part of a call
        self._blank: list[str] = []  # white space that is text if text follows
        self._at = 0  # characters of the marker that were read
        assert not self.marker or self.marker[0] not in self.marker[1:], "matching never goes back"

    def knows(self, name: str) -> bool:
        """Whether a name is one to call. With a marker a call is meant whatever its name: who asked may say so."""
        return bool(self.marker) or name in self.names

    def end(self) -> list[Event]:
        self.give_back()
        if not self.calls:
            self._flush()
        return super().end()

    def begin_call(self, name: str) -> None:
        """What was read since the marker is a call."""
        self.raw, self._blank = [], []
        self.events.add("call", name, self.calls)
        self.calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self.events.add("arguments", text, self.calls - 1)

    def give_back(self) -> None:
        """What was read is text after all."""
        said, self.raw = self.raw, []
        self._at = 0
        for char in said:
            self._say(char)
        self.state = self._content

    def opened(self) -> None:
        """The marker was read: set the state that reads a call."""

    def _say(self, char: str) -> None:
        if char.isspace():
            self._blank.append(char)
        else:
            self._flush()
            self.events.add("content", char)

    def _flush(self) -> None:
        if self._blank:
            self.events.add("content", "".join(self._blank))
            self._blank = []

    def _content(self, char: str) -> bool:
        if self.marker and char == self.marker[self._at]:
            self.raw.append(char)
            self._at += 1
            if self._at == len(self.marker):
                self._at = 0
                self.opened()
            return True
        if self._at:
            self.give_back()
            return False
        self._say(char)
        return True
