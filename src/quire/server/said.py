"""Outputs as typed events, for APIs that answer with several entries one after another: thoughts, texts, calls.

A whole answer is what a stream's events come to: the same code writes both, and says nothing in between.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quire.control.outcomes import Output
from quire.errors import InputError, Overloaded, QuireError
from quire.server.direct import Direct
from quire.server.inbox import Items as Outputs
from quire.server.pieces import Pieces, Words
from quire.server.protocol import ChatRequest
from quire.server.reading import Call, Parts, Reading
from quire.server.render import ChatRenderer, Choice
from quire.server.stream import Call as Asking
from quire.server.stream import EventStream

if TYPE_CHECKING:
    from quire.server.service import Asked

Json = dict[str, Any]


class Say(Protocol):
    """Writes an event of a `kind`."""

    def __call__(self, kind: str, **members: Any) -> None: ...


class Entry(Protocol):
    """Thoughts, a text or a call, said as it comes. `item` is what a whole answer has."""

    item: Json

    def add(self, text: str) -> None:
        """More of it."""

    def end(self, status: str) -> None:
        """There is no more."""


class TextKind(Protocol):
    """Begins a text, or thoughts."""

    def __call__(self, index: int, say: Say) -> Entry: ...


class CallKind(Protocol):
    """Begins a call."""

    def __call__(self, index: int, say: Say, call: Call) -> Entry: ...


class Entries:
    """The entries of an output, one after another; the last one is open. `aloud`: events are written."""

    text: ClassVar[TextKind]
    thoughts: ClassVar[TextKind]
    call: ClassVar[CallKind]

    def __init__(self, aloud: bool) -> None:
        self.aloud = aloud
        self._said: Pieces = []
        self._entries: list[Entry] = []
        self._open: TextKind | CallKind | None = None  # what the open one is

    def say(self, kind: str, **members: Any) -> None:
        """Write an event."""
        if self.aloud:
            data = json.dumps({"type": kind, **members}, separators=(",", ":"))
            self._said.append(f"event: {kind}\ndata: {data}\n\n")

    def take(self) -> Pieces:
        """The events since the last time."""
        said, self._said = self._said, []
        return said

    def add(self, parts: Parts) -> None:
        """A run of an output: what it thinks, says or calls."""
        if parts.reasoning:
            self._text(type(self).thoughts).add(parts.reasoning)
        if parts.content:
            self._text(type(self).text).add(parts.content)
        for call in parts.calls:
            if call.id:
                self.close("completed")
                kind = type(self).call
                self._begin(kind, kind(len(self._entries), self.say, call))
            if call.arguments:
                self._entries[-1].add(call.arguments)

    def end(self, status: str) -> None:
        """There is no more; what said nothing said an empty text."""
        if not self._entries:
            self._text(type(self).text)
        self.close(status)

    def output(self) -> list[Json]:
        """The entries."""
        return [entry.item for entry in self._entries]

    def close(self, status: str) -> None:
        """End the last entry, if it hasn't ended."""
        if self._open is not None:
            self._open = None
            self._entries[-1].end(status)

    def _text(self, kind: TextKind) -> Entry:
        if self._open is not kind:
            self.close("completed")
            self._begin(kind, kind(len(self._entries), self.say))
        return self._entries[-1]

    def _begin(self, kind: TextKind | CallKind, entry: Entry) -> None:
        self._entries.append(entry)
        self._open = kind


class SayingRenderer(ChatRenderer):
    """An output as entries. `about` is the whole answer once `_end` has run."""

    about: Json

    def __init__(self, id: str, model: str, chat: ChatRequest, asked: Asked, words: Words, entries: Entries) -> None:
        prompt, box, thinking = asked.prompt, asked.box, asked.thinking
        super().__init__(id, model, chat, [prompt], words, box, thinking)
        self._reading, self._entries = Reading(box, thinking), entries

    def brief(self, at: int, output: Output) -> Choice | None:
        """The events of an output; with its last one, those of the end."""
        self.usage.add(at, 0, len(output.tokens), output.cached_tokens)
        last = output.finish_reason is not None
        for parts in self._reading.runs(output.text, last, output.tokens):
            self._entries.add(parts)
        if last:
            self._end(output)
        pieces = self._entries.take()
        return Choice(at, 0, pieces) if pieces else None

    async def choice(self, at: int, output: Output, whole: bool) -> Choice | None:
        """As `brief`, in its turn."""
        found = self.brief(at, output)
        await self.pace(*(found.pieces if found is not None else ()))
        return found

    def failed(self, error: BaseException) -> Pieces:
        """The last events of a stream that failed."""
        raise NotImplementedError

    def _end(self, output: Output) -> None:
        """The output has ended: `about` it, and its last events."""
        raise NotImplementedError


class SayingStream(EventStream):
    """Sends events. The last one says how the stream ended; there is no [DONE]."""

    _renderer: SayingRenderer

    def __init__(self, call: Asking, renderer: SayingRenderer, headers: dict[str, str]) -> None:
        super().__init__(call, renderer, headers, usage=False, continuous=False)

    def _write(self, direct: Direct, outputs: Outputs) -> bool:
        if any(output.finish_reason is not None for _, output in outputs):  # its events may say all the text again
            return False
        return super()._write(direct, outputs)

    def _chunk(self, choice: Choice, tail: Any = ()) -> Pieces:
        return choice.pieces

    def _last(self, error: BaseException | None) -> bytes:
        return b"" if error is None else "".join(self._renderer.failed(error)).encode()


def unfinished(output: Output) -> QuireError:
    """Why an output ended that neither its model nor a length did: for what was asked, or since all end."""
    if output.finish_reason == "error":
        return InputError(f"the output can't go on: {output.stop_reason}")
    return Overloaded("the request was ended before its output", retry_after=10)


async def whole_said(call: Asking, renderer: SayingRenderer) -> Pieces:
    """The whole answer of a call, when all of it is there."""
    for at, output in await call.whole():
        await renderer.choice(at, output, whole=True)
    return [json.dumps(renderer.about, separators=(",", ":"))]
