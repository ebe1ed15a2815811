"""Render outputs as Anthropic's messages: content blocks, the events of a stream, and the message."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import BranchOutput
from quire.server.adapter import parse_partial_arguments
from quire.server.errors import to_failure
from quire.server.events import ItemRenderer, OutputItem, OutputItems, unfinished_error
from quire.server.generation import Generation
from quire.server.message_parser import ParsedCall
from quire.server.render import ChoicePieces, RenderSettings

Json = dict[str, Any]


class TextBlock(OutputItem):
    """A block of text, and its events."""

    kind = "text"

    def __init__(self, index: int, items: OutputItems, call: ParsedCall) -> None:
        super().__init__(index, items, call)
        self.item: Json = self.new_block()
        self._emit("content_block_start", index=index, content_block=self.item)

    def new_block(self) -> Json:
        """Return the block without content."""
        return {"type": "text", "text": ""}

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._delta(f"{self.kind}_delta", **{self.kind: text})

    def end(self, status: str) -> None:
        self.item[self.kind] = "".join(self._texts)
        self._emit("content_block_stop", index=self._index)

    def _delta(self, kind: str, **members: str) -> None:
        self._emit("content_block_delta", index=self._index, delta={"type": kind, **members})


class ThinkingBlock(TextBlock):
    """The full reasoning of the model. The signature is empty: reasoning that a client sends back is not verified."""

    kind = "thinking"

    def new_block(self) -> Json:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def end(self, status: str) -> None:
        self._delta("signature_delta", signature="")
        super().end(status)


class ToolBlock(TextBlock):
    """A tool call. Its arguments are JSON text in events, and an object in a whole message."""

    def new_block(self) -> Json:
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": {}}

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._delta("input_json_delta", partial_json=text)

    def end(self, status: str) -> None:
        if not self._texts:
            self.add("{}")
        self.item["input"] = parse_partial_arguments("".join(self._texts))
        self._emit("content_block_stop", index=self._index)


class MessageBlocks(OutputItems):
    """The content blocks of a message."""

    text_item, reasoning_item, call_item = TextBlock, ThinkingBlock, ToolBlock


class MessageRenderer(ItemRenderer):
    """Renders /v1/messages. The first event waits for the first output, which has the number of cached tokens.
    `max_tokens` is the request's. The model's context may leave room for fewer."""

    def __init__(self, generation: Generation, settings: RenderSettings, max_tokens: int) -> None:
        super().__init__(generation, settings, MessageBlocks(bool(generation.request.stream)))
        self._max_tokens, self._has_started = max_tokens, False
        self.body = {
            "id": self.id, "type": "message", "role": "assistant", "model": settings.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": {},
        }  # fmt: skip

    def choice_nowait(self, at: int, output: BranchOutput) -> ChoicePieces | None:
        if not self._has_started:
            self._has_started = True
            self.usage.cached_tokens[at] = output.cached_tokens
            self._items.emit("message_start", message={**self.body, "usage": self.usage_json()})
            self._items.emit("ping")
        return super().choice_nowait(at, output)

    def _fail(self, error: BaseException) -> None:
        self._items.emit("error", error=to_failure(error).anthropic_body()["error"])

    def _finish(self, output: BranchOutput) -> None:
        if output.finish_reason not in ("stop", "length"):
            raise unfinished_error(output)
        cut = output.finish_reason == "length"
        self._items.finish("incomplete" if cut else "completed")
        end: Json = {"stop_reason": self._stop_reason(cut, output.stop_reason), "stop_sequence": None}
        if end["stop_reason"] == "stop_sequence":
            end["stop_sequence"] = output.stop_reason
        usage = self.usage_json()
        self._items.emit("message_delta", delta=end, usage=usage)
        self._items.emit("message_stop")
        self.body |= {"content": self._items.items(), **end, "usage": usage}

    def _stop_reason(self, hit_length: bool, stop: int | str | None) -> str:
        if hit_length:
            reached = sum(self.usage.completion_tokens.values()) >= self._max_tokens
            return "max_tokens" if reached else "model_context_window_exceeded"
        if isinstance(stop, str):
            return "stop_sequence"
        return "tool_use" if self._parser.has_call else "end_turn"

    def usage_json(self) -> Json:
        """Return Anthropic's usage object. Its input tokens do not include cached ones."""
        prompt, cached = sum(self.usage.prompt_lengths), sum(self.usage.cached_tokens.values())
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sum(self.usage.completion_tokens.values()),
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_tokens},
        }
