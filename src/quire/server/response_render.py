"""Outputs as OpenAI's responses: items, the events that a stream says them with, and the response around them. A whole
response is what a stream's last event says."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from quire.control.outcomes import Output
from quire.server.errors import failure
from quire.server.pieces import Pieces, Words
from quire.server.protocol import ChatRequest
from quire.server.reading import Call
from quire.server.render import Choice
from quire.server.response_input import ResponseRequest
from quire.server.said import Entries, Say, SayingRenderer, unfinished
from quire.server.tools import Toolbox
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.server.service import Asked

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


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

    def end(self, status: str) -> None:
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

    def end(self, status: str) -> None:
        """There is no more."""
        arguments = "".join(self._texts)
        place = {"item_id": self.item["id"], "output_index": self._index}
        named = {"name": self.item["name"], "arguments": arguments}
        self._say("response.function_call_arguments.done", **place, **named)
        self.item |= {"status": status, "arguments": arguments}
        self._say("response.output_item.done", output_index=self._index, item=self.item)


class Items(Entries):
    """The items of an output. Events are numbered."""

    text, thoughts, call = TextItem, ReasoningItem, CallItem

    def __init__(self, aloud: bool) -> None:
        super().__init__(aloud)
        self._number = 0

    def say(self, kind: str, **members: Any) -> None:
        super().say(kind, sequence_number=self._number, **members)
        self._number += 1


class ResponseRenderer(SayingRenderer):
    """/v1/responses. `keep` gets the response when it is complete, or as much of it as there will be."""

    def __init__(
        self, id: str, model: str, body: ResponseRequest, chat: ChatRequest, asked: Asked, words: Words,
        keep: Callable[[Json], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(id, model, chat, asked, words, Items(bool(body.stream)))
        self._keep = keep
        self.about = about(body, asked.box, asked.params) | {"id": id, "model": model, "store": keep is not None}

    def response(self, status: Status, **more: Any) -> Json:
        """The response as it is now."""
        return self.about | {"status": status, "output": self._entries.output(), **more}

    async def opening(self) -> list[Choice]:
        """The events before any output."""
        for kind in ("response.created", "response.in_progress"):
            self._entries.say(kind, response=self.response("in_progress"))
        return [Choice(0, 0, self._entries.take())]

    def failed(self, error: BaseException) -> Pieces:
        """The last event of a stream that failed."""
        told = {"code": "server_error", "message": failure(error).body()["error"]["message"]}
        self._entries.close("incomplete")
        self._entries.say("response.failed", response=self.response("failed", error=told, usage=self.used()))
        return self._entries.take()

    def _end(self, output: Output) -> None:
        ends: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}
        status = ends.get(output.finish_reason, "failed")
        self._entries.end("completed" if status == "completed" else "incomplete")
        more: Json = {"usage": self.used()}
        if status == "completed":
            more["completed_at"] = int(time.time())
        elif status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["error"] = {"code": "server_error", "message": str(unfinished(output))}
        self.about = self.response(status, **more)
        if self._keep is not None and status != "failed":
            self._keep(self.about)
        self._entries.say(f"response.{status}", response=self.about)

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
