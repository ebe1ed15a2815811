"""Outputs as OpenAI's responses: items, the events that a stream says them with, and the response around them.

A whole response is what a stream's last event says: the same code writes both, and says nothing in between.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from quire.control.outcomes import Output
from quire.server.direct import Direct
from quire.server.errors import failure
from quire.server.inbox import Items as Outputs
from quire.server.pieces import Pieces, Words
from quire.server.protocol import ChatRequest
from quire.server.reading import Call, Parts, Reading
from quire.server.render import ChatRenderer, Choice
from quire.server.response_input import ResponseRequest
from quire.server.stream import EventStream
from quire.server.tools import Toolbox
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.server.service import Asked

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]
Say = Callable[..., None]


def new_id(kind: str) -> str:
    """An id that nobody guesses."""
    return f"{kind}_{uuid.uuid4().hex}"


class TextItem:
    """A message, said as it comes: one part, of text."""

    kind, prefix = "output_text", "msg"

    def __init__(self, index: int, say: Say) -> None:
        self._say, self._texts = say, list[str]()
        self.item = self.opened(new_id(self.prefix))
        self._place: Json = {"item_id": self.item["id"], "output_index": index}
        self._part_place = {**self._place, "content_index": 0}
        say("response.output_item.added", output_index=index, item=self.item)
        say("response.content_part.added", **self._part_place, part=self.part(""))

    def opened(self, id: str) -> Json:
        """The item, with nothing in it."""
        return {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}

    def part(self, text: str) -> Json:
        """Its only part."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def add(self, text: str) -> None:
        """More of it."""
        self._texts.append(text)
        more = {"logprobs": []} if self.kind == "output_text" else {}
        self._say(f"response.{self.kind}.delta", **self._part_place, delta=text, **more)

    def end(self, status: Status) -> None:
        """There is no more."""
        text = "".join(self._texts)
        more = {"logprobs": []} if self.kind == "output_text" else {}
        self._say(f"response.{self.kind}.done", **self._part_place, text=text, **more)
        self._say("response.content_part.done", **self._part_place, part=self.part(text))
        self.item |= {"status": status, "content": [self.part(text)]}
        self._say("response.output_item.done", output_index=self._place["output_index"], item=self.item)


class ReasoningItem(TextItem):
    """What a model thought, in full: there is no summary."""

    kind, prefix = "reasoning_text", "rs"

    def opened(self, id: str) -> Json:
        return {"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}

    def part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text}


class CallItem:
    """A call of a function."""

    def __init__(self, index: int, say: Say, call: Call) -> None:
        self._say, self._texts, self._index = say, list[str](), index
        self.item = {
            "id": new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id,
            "name": call.name, "arguments": "",
        }  # fmt: skip
        say("response.output_item.added", output_index=index, item=self.item)

    def add(self, text: str) -> None:
        """More of its arguments."""
        self._texts.append(text)
        place = {"item_id": self.item["id"], "output_index": self._index}
        self._say("response.function_call_arguments.delta", **place, delta=text)

    def end(self, status: Status) -> None:
        """There is no more."""
        arguments = "".join(self._texts)
        place = {"item_id": self.item["id"], "output_index": self._index}
        named = {"name": self.item["name"], "arguments": arguments}
        self._say("response.function_call_arguments.done", **place, **named)
        self.item |= {"status": status, "arguments": arguments}
        self._say("response.output_item.done", output_index=self._index, item=self.item)


class Items:
    """The items of an output, one after another; the last one is open. `aloud`: events are written."""

    def __init__(self, aloud: bool) -> None:
        self.aloud, self._number = aloud, 0
        self._said: Pieces = []
        self._items: list[TextItem | CallItem] = []
        self._open = False

    def say(self, kind: str, **members: Any) -> None:
        """Write an event."""
        if self.aloud:
            data = json.dumps({"type": kind, "sequence_number": self._number, **members}, separators=(",", ":"))
            self._said.append(f"event: {kind}\ndata: {data}\n\n")
            self._number += 1

    def take(self) -> Pieces:
        """The events since the last time."""
        said, self._said = self._said, []
        return said

    def add(self, parts: Parts) -> None:
        """A run of an output: what it thinks, says or calls."""
        if parts.reasoning:
            self._text(ReasoningItem).add(parts.reasoning)
        if parts.content:
            self._text(TextItem).add(parts.content)
        for call in parts.calls:
            if call.id:
                self.close("completed")
                self._begin(CallItem(len(self._items), self.say, call))
            if call.arguments:
                self._items[-1].add(call.arguments)

    def end(self, status: Status) -> None:
        """There is no more; what said nothing said an empty text."""
        if not self._items:
            self._text(TextItem)
        self.close(status)

    def output(self) -> list[Json]:
        """The items."""
        return [item.item for item in self._items]

    def close(self, status: Status) -> None:
        """End the last item, if it hasn't ended."""
        if self._open:
            self._open = False
            self._items[-1].end(status)

    def _text(self, kind: type[TextItem]) -> TextItem:
        last = self._items[-1] if self._open else None
        if type(last) is kind:
            return last
        self.close("completed")
        found = kind(len(self._items), self.say)
        self._begin(found)
        return found

    def _begin(self, item: TextItem | CallItem) -> None:
        self._items.append(item)
        self._open = True


class ResponseRenderer(ChatRenderer):
    """/v1/responses. `keep` gets the response when it is complete, or as much of it as there will be."""

    def __init__(
        self, id: str, model: str, body: ResponseRequest, chat: ChatRequest, asked: Asked, words: Words,
        keep: Callable[[Json], None] | None,
    ) -> None:  # fmt: skip
        _, prompt, params, box, thinking = asked
        super().__init__(id, model, chat, [prompt], words, box, thinking)
        self._reading, self._items, self._keep = Reading(box, thinking), Items(bool(body.stream)), keep
        self.about = about(body, box, params) | {"id": id, "model": model, "store": keep is not None}

    def response(self, status: Status, **more: Any) -> Json:
        """The response as it is now."""
        return self.about | {"status": status, "output": self._items.output(), **more}

    async def opening(self) -> list[Choice]:
        """The events before any output."""
        for kind in ("response.created", "response.in_progress"):
            self._items.say(kind, response=self.response("in_progress"))
        return [Choice(0, 0, self._items.take())]

    def brief(self, at: int, output: Output) -> Choice | None:
        """The events of an output; with its last one, those of the end."""
        self.usage.add(at, 0, len(output.tokens), output.cached_tokens)
        last = output.finish_reason is not None
        for parts in self._reading.runs(output.text, last, output.tokens):
            self._items.add(parts)
        if last:
            self._end(output.finish_reason)
        pieces = self._items.take()
        return Choice(at, 0, pieces) if pieces else None

    async def choice(self, at: int, output: Output, whole: bool) -> Choice | None:
        """As `brief`, in its turn."""
        found = self.brief(at, output)
        await self.pace(*(found.pieces if found is not None else ()))
        return found

    def failed(self, error: BaseException) -> Pieces:
        """The last event of a stream that failed."""
        told = {"code": "server_error", "message": failure(error).body()["error"]["message"]}
        self._items.close("incomplete")
        self._items.say("response.failed", response=self.response("failed", error=told, usage=self.used()))
        return self._items.take()

    def _end(self, reason: str | None) -> None:
        status: Status = {"stop": "completed", "length": "incomplete"}.get(reason or "", "failed")  # type: ignore[assignment]
        self._items.end("completed" if status == "completed" else "incomplete")
        more: Json = {"usage": self.used()}
        if status == "completed":
            more["completed_at"] = int(time.time())
        elif status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["error"] = {"code": "server_error", "message": "the request was ended before its output"}
        self.about = self.response(status, **more)
        if self._keep is not None and status != "failed":
            self._keep(self.about)
        self._items.say(f"response.{status}", response=self.about)

    def used(self) -> Json:
        """OpenAI's usage object of responses."""
        prompt, completion = sum(self.usage.prompts), sum(self.usage.completions.values())
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sum(self.usage.cached.values())},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._reading.thought},
            "total_tokens": prompt + completion,
        }


def about(body: ResponseRequest, box: Toolbox, params: SamplingParams) -> Json:
    """What a response says of its request, and what it will say of its end."""
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": box.parallel,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "temperature": params.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [{"type": "function", "description": None, "parameters": None, "strict": None,
                   **tool.entry["function"]} for tool in box.tools],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }  # fmt: skip


class ResponseStream(EventStream):
    """Sends the events of a response. It ends with one that says how it ended, and no [DONE]."""

    _renderer: ResponseRenderer

    def __init__(self, call: Any, renderer: ResponseRenderer, headers: dict[str, str]) -> None:
        super().__init__(call, renderer, headers, usage=False, continuous=False)

    def _write(self, direct: Direct, outputs: Outputs) -> bool:
        if any(output.finish_reason is not None for _, output in outputs):  # its events say all the text again
            return False
        return super()._write(direct, outputs)

    def _chunk(self, choice: Choice, tail: Any = ()) -> Pieces:
        return choice.pieces

    def _last(self, error: BaseException | None) -> bytes:
        return b"" if error is None else "".join(self._renderer.failed(error)).encode()
