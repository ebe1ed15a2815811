"""Outputs as typed events, for APIs that answer with several entries one after another: thoughts, texts, calls.

A whole answer is what a stream's events come to: the same code writes both, and says nothing in between.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded, QuireError
from quire.server.direct_writer import DirectWriter
from quire.server.json_pieces import JsonPieces, TokenStrings
from quire.server.message_parser import ChoiceParser, MessageParts, ParsedCall
from quire.server.output_queue import IndexedOutputs as IndexedOutputs
from quire.server.render import ChatRenderer, ChoicePieces
from quire.server.request_models import ChatRequest
from quire.server.streaming import EngineCall as EngineCall
from quire.server.streaming import EventStream

if TYPE_CHECKING:
    from quire.server.service import PreparedChat

Json = dict[str, Any]


class EmitEvent(Protocol):
    """Writes an event of a `kind`."""

    def __call__(self, kind: str, **members: Any) -> None: ...


class OutputItem(Protocol):
    """Thoughts, a text or a call, said as it comes. `item` is what a whole answer has."""

    item: Json

    def add(self, text: str) -> None:
        """More of it."""

    def end(self, status: str) -> None:
        """There is no more."""


class TextItemFactory(Protocol):
    """Begins a text, or thoughts."""

    def __call__(self, index: int, emit: EmitEvent) -> OutputItem: ...


class CallItemFactory(Protocol):
    """Begins a call."""

    def __call__(self, index: int, emit: EmitEvent, call: ParsedCall) -> OutputItem: ...


class OutputItems:
    """The entries of an output, one after another; the last one is open. `emits_events`: events are written."""

    text_item: ClassVar[TextItemFactory]
    reasoning_item: ClassVar[TextItemFactory]
    call_item: ClassVar[CallItemFactory]

    def __init__(self, emits_events: bool) -> None:
        self.emits_events = emits_events
        self._events: JsonPieces = []
        self._items: list[OutputItem] = []
        self._open_kind: TextItemFactory | CallItemFactory | None = None  # what the open one is

    def emit(self, kind: str, **members: Any) -> None:
        """Write an event."""
        if self.emits_events:
            data = json.dumps({"type": kind, **members}, separators=(",", ":"))
            self._events.append(f"event: {kind}\ndata: {data}\n\n")

    def take_events(self) -> JsonPieces:
        """The events since the last time."""
        said, self._events = self._events, []
        return said

    def add(self, parts: MessageParts) -> None:
        """A run of an output: what it thinks, says or calls."""
        if parts.reasoning:
            self._text_item(type(self).reasoning_item).add(parts.reasoning)
        if parts.content:
            self._text_item(type(self).text_item).add(parts.content)
        for call in parts.calls:
            if call.id:
                self.close_item("completed")
                kind = type(self).call_item
                self._open_item(kind, kind(len(self._items), self.emit, call))
            if call.arguments:
                self._items[-1].add(call.arguments)

    def finish(self, status: str) -> None:
        """There is no more; what said nothing said an empty text."""
        if not self._items:
            self._text_item(type(self).text_item)
        self.close_item(status)

    def items(self) -> list[Json]:
        """The entries."""
        return [entry.item for entry in self._items]

    def close_item(self, status: str) -> None:
        """End the last entry, if it hasn't ended."""
        if self._open_kind is not None:
            self._open_kind = None
            self._items[-1].end(status)

    def _text_item(self, kind: TextItemFactory) -> OutputItem:
        if self._open_kind is not kind:
            self.close_item("completed")
            self._open_item(kind, kind(len(self._items), self.emit))
        return self._items[-1]

    def _open_item(self, kind: TextItemFactory | CallItemFactory, entry: OutputItem) -> None:
        self._items.append(entry)
        self._open_kind = kind


class EventRenderer(ChatRenderer):
    """An output as entries. `body` is the whole answer once `_finish` has run."""

    body: Json

    def __init__(
        self,
        id: str,
        model: str,
        chat: ChatRequest,
        prepared: PreparedChat,
        token_strings: TokenStrings,
        items: OutputItems,
    ) -> None:
        prompt, box, thinking = prepared.prompt, prepared.tool_choice, prepared.reasoning
        super().__init__(id, model, chat, [prompt], token_strings, box, thinking)
        self._parser, self._items = ChoiceParser(box, thinking), items

    def choice_nowait(self, at: int, output: BranchOutput) -> ChoicePieces | None:
        """The events of an output; with its last one, those of the end."""
        self.usage.add(at, 0, len(output.tokens), output.cached_tokens)
        last = output.finish_reason is not None
        for parts in self._parser.push_runs(output.text, last, output.tokens):
            self._items.add(parts)
        if last:
            self._finish(output)
        pieces = self._items.take_events()
        return ChoicePieces(at, 0, pieces) if pieces else None

    async def choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        """As `choice_nowait`, in its turn."""
        found = self.choice_nowait(at, output)
        await self.pace(*(found.pieces if found is not None else ()))
        return found

    def failure_events(self, error: BaseException) -> JsonPieces:
        """The last events of a stream that failed."""
        raise NotImplementedError

    def _finish(self, output: BranchOutput) -> None:
        """The output has ended: `body` it, and its last events."""
        raise NotImplementedError


class TypedEventStream(EventStream):
    """Sends events. The last one says how the stream ended; there is no [DONE]."""

    _renderer: EventRenderer

    def __init__(self, call: EngineCall, renderer: EventRenderer, headers: dict[str, str]) -> None:
        super().__init__(call, renderer, headers, usage=False, continuous=False)

    def _try_write(self, direct: DirectWriter, outputs: IndexedOutputs) -> bool:
        if any(output.finish_reason is not None for _, output in outputs):  # its events may say all the text again
            return False
        return super()._try_write(direct, outputs)

    def _chunk(self, choice: ChoicePieces, tail: Any = ()) -> JsonPieces:
        return choice.pieces

    def _final_event(self, error: BaseException | None) -> bytes:
        return b"" if error is None else "".join(self._renderer.failure_events(error)).encode()


def unfinished_error(output: BranchOutput) -> QuireError:
    """Why an output ended that neither its model nor a length did: for what was asked, or since all end."""
    if output.finish_reason == "error":
        return InputError(f"the output can't go on: {output.stop_reason}")
    return Overloaded("the request was ended before its output", retry_after=10)


async def collect_answer(call: EngineCall, renderer: EventRenderer) -> JsonPieces:
    """The whole answer of a call, when all of it is there."""
    for at, output in await call.collect():
        await renderer.choice(at, output, whole=True)
    return [json.dumps(renderer.body, separators=(",", ":"))]
