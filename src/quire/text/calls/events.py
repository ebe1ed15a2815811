"""What a reader of outputs finds, and what all readers have in common."""

from __future__ import annotations

import json
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
        self._taken = 0  # how often

    def add(self, kind: Kind, text: str, index: int = 0) -> None:
        """One more."""
        if self._found and kind != "call" and self._found[-1][:2] == (kind, index):
            self._found[-1][2].append(text)
        else:
            self._found.append((kind, index, [text]))

    def take(self) -> list[Event]:
        """Those since the last call."""
        found, self._found = self._found, []
        self._taken += 1
        return [Event(kind, "".join(texts), index) for kind, index, texts in found]

    def place(self) -> tuple[int, int]:
        """Where the next event goes that is not joined to the last one."""
        return self._taken, len(self._found)

    def withdraw(self, place: tuple[int, int]) -> bool:
        """Forget the events since `place`. Return False if some of them were taken."""
        taken, at = place
        if taken == self._taken:
            del self._found[at:]
        return taken == self._taken


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
            self.take(char)
        return self.events.take()

    def take(self, char: str) -> None:
        """Take the next character."""
        self.steps += 1
        while not self.state(char):
            self.steps += 1

    def end(self) -> list[Event]:
        """What remains when the output has ended."""
        return self.events.take()

    def _content(self, char: str) -> bool:
        self.events.add("content", char)
        return True


class CallReader(Reader):
    """Text with calls in it. `marker` is what calls begin with, "" where only the place tells. What turns out to be no
    call is text, all of it, unless a part was passed on before. White space before a call, and around calls, is no
    text."""

    marker = ""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are those of the tools there are."""
        super().__init__()
        self.names = frozenset(names)
        self.calls = 0
        self.raw: list[str] = []  # read, and either text or a part of a call
        self._blank: list[str] = []  # white space that is text if text follows
        self._at = 0  # characters of the marker that were read
        self._call: list[str] | None = None  # the text of the call that is read, its marker and the white space before
        self._arguments: list[str] = []  # of that call
        self._place = self.events.place()  # of that call's events
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
        self._call, self._arguments, self._place = [*self._blank, *self.raw], [], self.events.place()
        self.raw, self._blank = [], []
        self.events.add("call", name, self.calls)
        self.calls += 1

    def take(self, char: str) -> None:
        super().take(char)
        if self._call is not None:
            self._call.append(char)

    def argue(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._arguments.append(text)
        self.events.add("arguments", text, self.calls - 1)

    @property
    def reading(self) -> bool:
        """A call is read."""
        return self._call is not None

    def end_call(self, char: str = "") -> bool:
        """End the call that began last, with `char`. Return False if its arguments are no JSON object and it became
        text again; one of which a part was passed on stays a call."""
        assert self._call is not None, "a call is read"
        said, self._call = [*self._call, char], None
        try:
            whole = isinstance(json.loads("".join(self._arguments), parse_constant=_no_number), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole or not self.events.withdraw(self._place):
            return True
        self.calls -= 1
        for one in said:
            self._say(one)
        self.raw, self.state = [], self._content
        return False

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


def _no_number(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
