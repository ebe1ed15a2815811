"""Render outputs as OpenAI's responses: the items, the events of a stream, and the response. A whole response is the
one in the last event of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from quire.core.outputs import BranchOutput
from quire.server.errors import to_failure
from quire.server.events import EmitEvent, ItemRenderer, OutputItem, OutputItems, unfinished_error
from quire.server.generation import Generation
from quire.server.json_pieces import JsonPieces
from quire.server.message_parser import ParsedCall
from quire.server.render import RenderSettings
from quire.server.responses.input import ResponseRequest

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


def new_id(kind: str) -> str:
    """Return a random id that cannot be guessed."""
    return f"{kind}_{uuid.uuid4().hex}"


class TextItem(OutputItem):
    """A message with one text part, and its events."""

    kind, id_prefix = "output_text", "msg"

    def __init__(self, index: int, emit: EmitEvent, call: ParsedCall) -> None:
        super().__init__(index, emit, call)
        self.item = self.new_item(new_id(self.id_prefix))
        self._part_location: Json = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        emit("response.output_item.added", output_index=index, item=self.item)
        emit("response.content_part.added", **self._part_location, part=self.content_part(""))

    def new_item(self, id: str) -> Json:
        """Return the item without content."""
        return {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}

    def content_part(self, text: str) -> Json:
        """Return the item's only part."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def add(self, text: str) -> None:
        self._texts.append(text)
        more: Json = {"logprobs": []} if self.kind == "output_text" else {}
        self._emit(f"response.{self.kind}.delta", **self._part_location, delta=text, **more)

    def end(self, status: str) -> None:
        text = "".join(self._texts)
        more: Json = {"logprobs": []} if self.kind == "output_text" else {}
        self._emit(f"response.{self.kind}.done", **self._part_location, text=text, **more)
        self._emit("response.content_part.done", **self._part_location, part=self.content_part(text))
        self.item |= {"status": status, "content": [self.content_part(text)]}
        self._emit("response.output_item.done", output_index=self._index, item=self.item)


class ReasoningItem(TextItem):
    """The full reasoning of the model. There is no summary."""

    kind, id_prefix = "reasoning_text", "rs"

    def new_item(self, id: str) -> Json:
        return {"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}

    def content_part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text}


class CallItem(OutputItem):
    """A function call, and its events."""

    def __init__(self, index: int, emit: EmitEvent, call: ParsedCall) -> None:
        super().__init__(index, emit, call)
        self.item = {
            "id": new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id,
            "name": call.name, "arguments": "",
        }  # fmt: skip
        emit("response.output_item.added", output_index=index, item=self.item)

    def add(self, text: str) -> None:
        self._texts.append(text)
        place = {"item_id": self.item["id"], "output_index": self._index}
        self._emit("response.function_call_arguments.delta", **place, delta=text)

    def end(self, status: str) -> None:
        arguments = "".join(self._texts)
        place = {"item_id": self.item["id"], "output_index": self._index}
        named = {"name": self.item["name"], "arguments": arguments}
        self._emit("response.function_call_arguments.done", **place, **named)
        self.item |= {"status": status, "arguments": arguments}
        self._emit("response.output_item.done", output_index=self._index, item=self.item)


class ResponseItems(OutputItems):
    """The items of an output. Events are numbered."""

    text_item, reasoning_item, call_item = TextItem, ReasoningItem, CallItem

    def __init__(self, emits_events: bool) -> None:
        super().__init__(emits_events)
        self._number = 0

    def emit(self, kind: str, **members: Any) -> None:
        super().emit(kind, sequence_number=self._number, **members)
        self._number += 1


class ResponseRenderer(ItemRenderer):
    """Renders /v1/responses for the request `body`. `on_complete` is called with a response that is complete or was cut
    off at a length limit, but not with a failed one."""

    def __init__(
        self,
        generation: Generation,
        settings: RenderSettings,
        body: ResponseRequest,
        on_complete: Callable[[Json], None] | None,
    ) -> None:
        super().__init__(generation, settings, ResponseItems(bool(body.stream)))
        self._on_complete = on_complete
        named = {"id": self.id, "model": settings.model, "store": on_complete is not None}
        self.body = initial_body(body, generation) | named

    def response(self, status: Status, **more: Any) -> Json:
        """Return the current state of the response."""
        return self.body | {"status": status, "output": self._items.items(), **more}

    async def opening_events(self) -> list[JsonPieces]:
        for kind in ("response.created", "response.in_progress"):
            self._items.emit(kind, response=self.response("in_progress"))
        return [self._items.take_events()]

    def _fail(self, error: BaseException) -> None:
        failure = {"code": "server_error", "message": to_failure(error).body()["error"]["message"]}
        self._items.close_item("incomplete")
        self._items.emit("response.failed", response=self.response("failed", error=failure, usage=self.usage_json()))

    def _finish(self, output: BranchOutput) -> None:
        ends: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}
        status = ends.get(output.finish_reason, "failed")
        self._items.finish("completed" if status == "completed" else "incomplete")
        more: Json = {"usage": self.usage_json()}
        if status == "completed":
            more["completed_at"] = int(time.time())
        elif status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["error"] = {"code": "server_error", "message": str(unfinished_error(output))}
        self.body = self.response(status, **more)
        if self._on_complete is not None and status != "failed":
            self._on_complete(self.body)
        self._items.emit(f"response.{status}", response=self.body)

    def usage_json(self) -> Json:
        """Return OpenAI's usage object of a response."""
        prompt, completion = sum(self.usage.prompt_lengths), sum(self.usage.completion_tokens.values())
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sum(self.usage.cached_tokens.values())},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": prompt + completion,
        }


def initial_body(body: ResponseRequest, generation: Generation) -> Json:
    """Return the members of a response that repeat its request, and the initial values of those set at its end."""
    params, tool_choice = generation.params, generation.tool_choice
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
        "parallel_tool_calls": tool_choice.parallel,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "temperature": params.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [{"type": "function", "description": None, "parameters": None, "strict": None,
                   **tool.definition["function"]} for tool in tool_choice.tools],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }  # fmt: skip
