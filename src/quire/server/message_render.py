"""Outputs as Anthropic's messages: content blocks, the events that a stream says them with, and the message around
them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.control.outcomes import Output
from quire.server.errors import failure
from quire.server.pieces import Pieces, Words
from quire.server.protocol import ChatRequest
from quire.server.reading import Call
from quire.server.render import Choice
from quire.server.said import Entries, Say, SayingRenderer, unfinished
from quire.server.translated import arguments

if TYPE_CHECKING:
    from quire.server.service import Asked

Json = dict[str, Any]


class TextBlock:
    """A text, said as it comes."""

    kind = "text"

    def __init__(self, index: int, say: Say) -> None:
        self._say, self._index, self._texts = say, index, list[str]()
        self.item: Json = self.begun()
        say("content_block_start", index=index, content_block=self.item)

    def begun(self) -> Json:
        """The block, with nothing in it."""
        return {"type": "text", "text": ""}

    def add(self, text: str) -> None:
        """More of it."""
        self._texts.append(text)
        self._delta(f"{self.kind}_delta", **{self.kind: text})

    def end(self, status: str) -> None:
        """There is no more."""
        self.item[self.kind] = "".join(self._texts)
        self._say("content_block_stop", index=self._index)

    def _delta(self, kind: str, **members: str) -> None:
        self._say("content_block_delta", index=self._index, delta={"type": kind, **members})


class ThinkingBlock(TextBlock):
    """What a model thought, in full. There is no signature: what comes back is taken as it is."""

    kind = "thinking"

    def begun(self) -> Json:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def end(self, status: str) -> None:
        self._delta("signature_delta", signature="")
        super().end(status)


class ToolBlock(TextBlock):
    """A call of a tool. Its arguments are said as JSON, and are an object in a whole message."""

    def __init__(self, index: int, say: Say, call: Call) -> None:
        self._call = call
        super().__init__(index, say)

    def begun(self) -> Json:
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": {}}

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._delta("input_json_delta", partial_json=text)

    def end(self, status: str) -> None:
        if not self._texts:
            self.add("{}")
        self.item["input"] = arguments("".join(self._texts))
        self._say("content_block_stop", index=self._index)


class Blocks(Entries):
    """The blocks of a message."""

    text, thoughts, call = TextBlock, ThinkingBlock, ToolBlock


class MessageRenderer(SayingRenderer):
    """/v1/messages. Its first event waits for the first output, which says how much of the prompt was cached."""

    def __init__(self, id: str, model: str, chat: ChatRequest, asked: Asked, words: Words, wanted: int) -> None:
        """`wanted`: max_tokens, of which the model's length may leave less."""
        super().__init__(id, model, chat, asked, words, Blocks(bool(chat.stream)))
        self._wanted, self._begun = wanted, False
        self.about = {
            "id": id, "type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": {},
        }  # fmt: skip

    def brief(self, at: int, output: Output) -> Choice | None:
        if not self._begun:
            self._begun = True
            self.usage.add(at, 0, 0, output.cached_tokens)
            self._entries.say("message_start", message={**self.about, "usage": self.used()})
            self._entries.say("ping")
        return super().brief(at, output)

    async def opening(self) -> list[Choice]:
        return []

    def failed(self, error: BaseException) -> Pieces:
        """A stream that failed ends with an error."""
        self._entries.say("error", error=failure(error).anthropic()["error"])
        return self._entries.take()

    def _end(self, output: Output) -> None:
        if output.finish_reason not in ("stop", "length"):
            raise unfinished(output)
        cut = output.finish_reason == "length"
        self._entries.end("incomplete" if cut else "completed")
        told: Json = {"stop_reason": self._reason(cut, output.stop_reason), "stop_sequence": None}
        if told["stop_reason"] == "stop_sequence":
            told["stop_sequence"] = output.stop_reason
        usage = self.used()
        self._entries.say("message_delta", delta=told, usage=usage)
        self._entries.say("message_stop")
        self.about |= {"content": self._entries.output(), **told, "usage": usage}

    def _reason(self, cut: bool, stop: int | str | None) -> str:
        if cut:
            fits = sum(self.usage.completions.values()) >= self._wanted
            return "max_tokens" if fits else "model_context_window_exceeded"
        if isinstance(stop, str):
            return "stop_sequence"
        return "tool_use" if self._reading.called else "end_turn"

    def used(self) -> Json:
        """Anthropic's usage object: what was cached isn't among the input's tokens."""
        prompt, cached = sum(self.usage.prompts), sum(self.usage.cached.values())
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sum(self.usage.completions.values()),
            "output_tokens_details": {"thinking_tokens": self._reading.thought},
        }
