"""Outputs as typed events, for APIs whose answers are lists of items: reasoning, texts and tool calls.

The same code writes a stream and a whole answer. For a whole answer it writes no events.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded, QuireError
from quire.server.direct_writer import DirectWriter
from quire.server.json_pieces import JsonPieces, TokenStrings, WriterTurns
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
    """Writes an event of type `kind`."""

    def __call__(self, kind: str, **members: Any) -> None: ...


class OutputItem(Protocol):
    """An item of an answer that grows: reasoning, a text or a tool call. `item` is its JSON in a whole answer."""

    item: Json

    def add(self, text: str) -> None:
        """Append text."""

    def end(self, status: str) -> None:
        """End the item."""


class TextItemFactory(Protocol):
    """Makes an item of text or of reasoning."""

    def __call__(self, index: int, emit: EmitEvent) -> OutputItem: ...


class CallItemFactory(Protocol):
    """Makes an item of a tool call."""

    def __call__(self, index: int, emit: EmitEvent, call: ParsedCall) -> OutputItem: ...


class OutputItems:
    """The items of an output, in order. The last one is open. `emits_events` is False for a whole answer."""

    text_item: ClassVar[TextItemFactory]
    reasoning_item: ClassVar[TextItemFactory]
    call_item: ClassVar[CallItemFactory]

    def __init__(self, emits_events: bool) -> None:
        self.emits_events = emits_events
        self._events: JsonPieces = []
        self._items: list[OutputItem] = []
        self._open_kind: TextItemFactory | CallItemFactory | None = None  # of the open item

    def emit(self, kind: str, **members: Any) -> None:
        """Write an event."""
        if self.emits_events:
            data = json.dumps({"type": kind, **members}, separators=(",", ":"))
            self._events.append(f"event: {kind}\ndata: {data}\n\n")

    def take_events(self) -> JsonPieces:
        """Return and remove the events since the last call."""
        events, self._events = self._events, []
        return events

    def add(self, parts: MessageParts) -> None:
        """Add a part of the output: reasoning, text and tool calls."""
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
        """End the output. An empty output becomes one empty text."""
        if not self._items:
            self._text_item(type(self).text_item)
        self.close_item(status)

    def items(self) -> list[Json]:
        """Return the items as JSON."""
        return [entry.item for entry in self._items]

    def close_item(self, status: str) -> None:
        """End the last item, if it is open."""
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
    """Renders an output as items. `body` is the whole answer after `_finish`."""

    body: Json

    def __init__(
        self,
        id: str,
        model: str,
        chat: ChatRequest,
        prepared: PreparedChat,
        token_strings: TokenStrings,
        writer_turns: WriterTurns,
        items: OutputItems,
    ) -> None:
        prompt, tool_choice, reasoning = prepared.prompt, prepared.tool_choice, prepared.reasoning
        super().__init__(id, model, chat, [prompt], token_strings, writer_turns, tool_choice, reasoning)
        self._parser, self._items = ChoiceParser(tool_choice, reasoning), items

    def choice_nowait(self, at: int, output: BranchOutput) -> ChoicePieces | None:
        """Return the events of an output, or None if it has none."""
        self.usage.add(at, 0, len(output.tokens), output.cached_tokens)
        last = output.finish_reason is not None
        for parts in self._parser.push_runs(output.text, last, output.tokens):
            self._items.add(parts)
        if last:
            self._finish(output)
        pieces = self._items.take_events()
        return ChoicePieces(at, 0, pieces) if pieces else None

    async def choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        """Return the events of an output, or None. Other writers may take a turn meanwhile."""
        choice = self.choice_nowait(at, output)
        await self.pace(*(choice.pieces if choice is not None else ()))
        return choice

    def failure_events(self, error: BaseException) -> JsonPieces:
        """Return the last events of a stream that failed."""
        raise NotImplementedError

    def _finish(self, output: BranchOutput) -> None:
        """Set `body` and write the last events, at the end of the output."""
        raise NotImplementedError


class TypedEventStream(EventStream):
    """A response that streams typed events. The last event says how the stream ended; there is no [DONE]."""

    _renderer: EventRenderer

    def __init__(self, call: EngineCall, renderer: EventRenderer, headers: dict[str, str]) -> None:
        super().__init__(call, renderer, headers, usage=False, continuous=False)

    def _try_write(self, direct: DirectWriter, outputs: IndexedOutputs) -> bool:
        if any(output.finish_reason is not None for _, output in outputs):  # the last events may repeat all the text
            return False
        return super()._try_write(direct, outputs)

    def _chunk(self, choice: ChoicePieces, tail: Any = ()) -> JsonPieces:
        return choice.pieces

    def _final_event(self, error: BaseException | None) -> bytes:
        return b"" if error is None else "".join(self._renderer.failure_events(error)).encode()


def unfinished_error(output: BranchOutput) -> QuireError:
    """Return the error for an output that ended neither by its model nor at a length limit: what the client asked for
    failed, or the server is shutting down."""
    if output.finish_reason == "error":
        return InputError(f"the output can't go on: {output.stop_reason}")
    return Overloaded("the request was aborted before its output was complete", retry_after=10)


async def collect_answer(call: EngineCall, renderer: EventRenderer) -> JsonPieces:
    """Return the answer of a call, once it is complete."""
    for at, output in await call.collect():
        await renderer.choice(at, output, whole=True)
    return [json.dumps(renderer.body, separators=(",", ":"))]
