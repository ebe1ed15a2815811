"""Outputs as typed events, for APIs whose answers are lists of items: reasoning, texts and tool calls.

The same code writes a stream and a whole answer. For a whole answer it writes no events.
"""

from __future__ import annotations

from typing import Any, ClassVar

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded, QuireError
from quire.server.generation import Generation
from quire.server.json_pieces import JsonPieces, dump_pieces
from quire.server.message_parser import ChoiceParser, MessageParts, ParsedCall
from quire.server.output_queue import IndexedOutputs, OutputQueue
from quire.server.render import ChatRenderer, ChoicePieces, RenderSettings

Json = dict[str, Any]
NO_CALL = ParsedCall(0)


class OutputItem:
    """An item of an answer that grows: reasoning, a text or, if `call` has an id, a tool call. `item` is its JSON in a
    whole answer. It writes its events to `items`."""

    item: Json

    def __init__(self, index: int, items: OutputItems, call: ParsedCall) -> None:
        self._index, self._emit, self._call, self._texts = index, items.emit, call, list[str]()

    def add(self, text: str) -> None:
        """Append text."""
        raise NotImplementedError

    def end(self, status: str) -> None:
        """End the item."""
        raise NotImplementedError


class OutputItems:
    """The items of an output, in order. The last one is open. `emits_events` is False for a whole answer."""

    text_item: ClassVar[type[OutputItem]]
    reasoning_item: ClassVar[type[OutputItem]]
    call_item: ClassVar[type[OutputItem]]

    def __init__(self, emits_events: bool) -> None:
        self.emits_events = emits_events
        self._events: JsonPieces = []
        self._items: list[OutputItem] = []
        self._is_open = False

    def emit(self, kind: str, **members: Any) -> None:
        """Write an event."""
        if self.emits_events:
            self._events += [f"event: {kind}\ndata: ", *dump_pieces({"type": kind, **members}), "\n\n"]

    def take_events(self) -> JsonPieces:
        """Return and remove the events since the last call."""
        events, self._events = self._events, []
        return events

    def add(self, parts: MessageParts) -> None:
        """Add a part of the output: reasoning, text and tool calls."""
        for kind, text in ((self.reasoning_item, parts.reasoning), (self.text_item, parts.content)):
            if text:
                self._open(kind).add(text)
        for call in parts.calls:
            item = self._open(self.call_item, call) if call.id else self._items[-1]
            if call.arguments:
                item.add(call.arguments)

    def finish(self, status: str) -> None:
        """End the output. An empty output becomes one empty text."""
        if not self._items:
            self._open(self.text_item)
        self.close_item(status)

    def items(self) -> list[Json]:
        """Return the items as JSON."""
        return [entry.item for entry in self._items]

    def close_item(self, status: str) -> None:
        """End the last item, if it is open."""
        if self._is_open:
            self._is_open = False
            self._items[-1].end(status)

    def _open(self, kind: type[OutputItem], call: ParsedCall = NO_CALL) -> OutputItem:
        """Return the open item of that kind, or a new one. Every call is a new one."""
        if call.id or not self._is_open or type(self._items[-1]) is not kind:
            self.close_item("completed")
            self._items.append(kind(len(self._items), self, call))
            self._is_open = True
        return self._items[-1]


class ItemRenderer(ChatRenderer):
    """Renders an output as items. `body` is the whole answer after `_finish`. The last event of a stream says how it
    ended; there is no [DONE]."""

    body: Json

    def __init__(self, generation: Generation, settings: RenderSettings, items: OutputItems) -> None:
        super().__init__(generation, settings)
        self.id = generation.id.replace("-", "_")
        self._parser, self._items = ChoiceParser(generation.tool_choice, generation.reasoning), items

    def choice_nowait(self, at: int, output: BranchOutput) -> ChoicePieces | None:
        """Return the events of an output, or None if it has none."""
        self.usage.add(at, 0, output)
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

    async def whole(self, outputs: OutputQueue) -> JsonPieces:
        for at, output in await outputs.collect():
            await self.choice(at, output, whole=True)
        return dump_pieces(self.body)

    def can_write_now(self, outputs: IndexedOutputs) -> bool:
        """Return True if the events of `outputs` are short. The last events of a stream may repeat all the text."""
        return super().can_write_now(outputs) and all(output.finish_reason is None for _, output in outputs)

    async def opening_events(self) -> list[JsonPieces]:
        return []

    def event(self, choice: ChoicePieces, tail: Any = ()) -> JsonPieces:
        return choice.pieces

    def closing_events(self) -> JsonPieces:
        return []

    def final_event(self, error: BaseException | None) -> bytes:
        if error is not None:
            self._fail(error)
        return "".join(self._items.take_events()).encode()

    def _fail(self, error: BaseException) -> None:
        """Write the last events of a stream that failed."""
        raise NotImplementedError

    def _finish(self, output: BranchOutput) -> None:
        """Set `body` and write the last events, at the end of the output."""
        raise NotImplementedError


def unfinished_error(output: BranchOutput) -> QuireError:
    """Return the error for an output that ended neither by its model nor at a length limit: what the client asked for
    failed, or the server is shutting down."""
    if output.finish_reason == "error":
        return InputError(f"the output can't go on: {output.stop_reason}")
    return Overloaded("the request was aborted before its output was complete", retry_after=10)
