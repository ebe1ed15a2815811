"""An answer's message as OpenAI has it: text, thoughts and calls, from what a reader finds in the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple

from quire.server.reasoning import Thinking
from quire.server.tools import Toolbox
from quire.text.calls.events import Event


class Call(NamedTuple):
    """A call, or a part of one: `id` and `name` are those of a call that begins here."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def json(self, whole: bool) -> str:
        """The call in a message, or with its index a part of it in a delta."""
        index = "" if whole else f'"index":{self.index},'
        head = f'"id":{quoted(self.id)},"type":"function",' if self.id else ""
        name = f'"name":{quoted(self.name)},' if self.id else ""
        return f'{{{index}{head}"function":{{{name}"arguments":{quoted(self.arguments)}}}}}'


class Parts(NamedTuple):
    """What some of an output adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def delta(self) -> str:
        """A chunk's delta."""
        rest = self.reasoning or self.calls
        members = [f'"content":{quoted(self.content)}'] if self.content or not rest else []
        if self.reasoning:
            text = quoted(self.reasoning)
            members += [f'"reasoning_content":{text},"reasoning":{text}']
        if self.calls:
            members.append(f'"tool_calls":[{",".join(call.json(whole=False) for call in self.calls)}]')
        return "{" + ",".join(members) + "}"

    def message(self, before: str = "") -> str:
        """A whole message, whose text begins with `before`."""
        text = before + self.content
        content = "null" if not text and (self.calls or self.reasoning) else quoted(text)
        thoughts = f',"reasoning_content":{quoted(self.reasoning)},"reasoning":{quoted(self.reasoning)}'
        calls = f',"tool_calls":[{",".join(call.json(whole=True) for call in self.calls)}]'
        return (
            f'{{"role":"assistant","content":{content},"refusal":null'
            f"{thoughts if self.reasoning else ''}{calls if self.calls else ''}}}"
        )


class Reading:
    """One choice: its text, as it comes. `thinking` tells thoughts from what follows them."""

    def __init__(self, box: Toolbox, thinking: Thinking | None = None) -> None:
        self._box, self._thinking = box, thinking
        self._reader = box.reader()
        self._thoughts = None if thinking is None else thinking.reader()
        self._counter = None if thinking is None else thinking.counter()
        self.called = False  # there is a call in it

    @property
    def thought(self) -> int:
        """Tokens of thoughts so far."""
        return 0 if self._counter is None else self._counter.count

    def push(self, text: str, last: bool, tokens: Sequence[int] = ()) -> Parts:
        """What `text` adds, which is that of `tokens` or comes a little later; with `last` the output has ended."""
        thought, text, due = self._parted(text, last, tokens)
        parts = self._answered(text, last) if due else Parts()
        return parts._replace(reasoning=thought) if thought else parts

    def runs(self, text: str, last: bool, tokens: Sequence[int] = ()) -> list[Parts]:
        """As `push`, but what comes one after the other stays apart: thoughts, texts, each call."""
        thought, text, due = self._parted(text, last, tokens)
        found = [Parts(reasoning=thought)]
        if due and (self._box.choice == "named" or self._reader is None):
            found.append(self._answered(text, last))
        elif due:
            found += [self._parts(run) for _, run in groupby(self._events(text, last), _run)]
        return found

    def _parted(self, text: str, last: bool, tokens: Sequence[int]) -> tuple[str, str, bool]:
        """The thoughts to show, the answer's text, and whether that is to be read."""
        if self._thoughts is None or self._thinking is None or self._counter is None:
            return "", text, True
        thought, text = self._thoughts.push(text, last)
        self._counter.add(tokens)
        over = last and self._thoughts.phase in ("behind", "over")
        return (thought if self._thinking.shown else ""), text, bool(text) or over

    def _answered(self, text: str, last: bool) -> Parts:
        if self._box.choice == "named":
            return self._named(text)
        if self._reader is None:
            return Parts(text)
        return self._parts(self._events(text, last))

    def _events(self, text: str, last: bool) -> list[Event]:
        assert self._reader is not None, "who has none doesn't ask"
        events = self._reader.feed(text)
        return events + self._reader.end() if last else events

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI has it: a call is a reason to end."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def _named(self, text: str) -> Parts:
        """All of it is the arguments of the named tool."""
        if self.called:
            return Parts(calls=(Call(0, arguments=text),) if text else ())
        self.called = True
        return Parts(calls=(Call(0, self._box.call_id(), self._box.named, text),))

    def _parts(self, events: Iterable[Event]) -> Parts:
        found = Collected(self._box.call_id)
        for event in events:
            if event.kind in ("call", "arguments"):
                if event.index and not self._box.parallel:
                    continue
                self.called = True
            found.add(event)
        return found.parts()


def _run(event: Event) -> tuple[str, int]:
    return ("call" if event.kind == "arguments" else event.kind), event.index


class Collected:
    """Events as the parts of one message; pieces of one call are one part of it."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._heads: dict[int, tuple[str, str]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, event: Event) -> None:
        """One more."""
        if event.kind == "call":
            self._heads[event.index] = self._new_id(), event.text
            self._arguments[event.index] = []
        elif event.kind == "arguments":
            self._arguments.setdefault(event.index, []).append(event.text)
        else:
            self._texts[event.kind].append(event.text)

    def parts(self) -> Parts:
        """All of them."""
        calls = [
            Call(index, *self._heads.get(index, ("", "")), "".join(texts)) for index, texts in self._arguments.items()
        ]
        content, reasoning = ("".join(self._texts[kind]) for kind in ("content", "reasoning"))
        return Parts(content, reasoning, tuple(calls))
