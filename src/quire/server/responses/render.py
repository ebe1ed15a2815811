"""Render outputs as OpenAI's responses: the items, the events of a stream, and the response. A whole response is the
one in the last event of a stream."""

from __future__ import annotations

import json
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter

from quire.core.outputs import BranchOutput
from quire.errors import InputError
from quire.server.errors import to_failure
from quire.server.events import NO_CALL, ItemRenderer, OutputItem, OutputItems, unfinished_error
from quire.server.generation import Generation
from quire.server.json_pieces import JsonPieces, RawJsonList
from quire.server.message_parser import ChoiceParser, MessageParts, ParsedCall
from quire.server.render import ChoicePieces, RenderSettings
from quire.server.responses.input import ResponseRequest, custom_tools
from quire.text.chat_messages import CUSTOM_INPUT
from quire.text.input_processor import InputProcessor

Json = dict[str, Any]
CUSTOM_ARGUMENTS = TypeAdapter(dict[Literal["input"], str])
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


def new_id(kind: str) -> str:
    """Return a random id that cannot be guessed."""
    return f"{kind}_{uuid.uuid4().hex}"


class TextLogprobs:
    """The log-probabilities of the tokens of each text of an output, as JSON. Tokens of reasoning, of calls and of
    the markers around these are left out. The output is parsed a second time, token by token, to assign each token."""

    def __init__(self, generation: Generation, input_processor: InputProcessor) -> None:
        self.texts: list[list[str]] = [[]]
        self._parser = ChoiceParser(generation.tool_choice, generation.reasoning)
        self._held: list[tuple[str, str]] = []  # text and JSON of tokens that are not assigned yet
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._tokenizer, self._skips_special = input_processor.tokenizer, generation.params.skip_special_tokens

    def add(self, token: int, entry: str) -> None:
        """Add the next token and the JSON of its log-probabilities."""
        assert self._tokenizer is not None, "a chat without a tokenizer"
        is_skipped = self._skips_special and token in self._tokenizer.special_ids
        text = "" if is_skipped else self._decode(self._tokenizer.token_bytes(token))
        self._held.append((text, entry))
        self._add(self._parser.push_runs(text, last=False))

    def finish(self) -> None:
        """End the output. Assign its last tokens, which have no text, to the last text."""
        self._add(self._parser.push_runs("", last=True))
        self.texts[-1] += [entry for _, entry in self._held]

    def _add(self, runs: Sequence[MessageParts]) -> None:
        for parts in filter(None, runs):
            if parts.content:  # the text of the last held tokens; those before them are markers
                missing, start = len(parts.content), len(self._held)
                while start and (missing > 0 or not self._held[start - 1][0]):
                    start -= 1
                    missing -= len(self._held[start][0])
                self.texts[-1] += [entry for _, entry in self._held[start:]]
            elif self.texts[-1]:
                self.texts.append([])
            self._held = []


class TextItem(OutputItem):
    """A message with one text part, and its events."""

    kind, id_prefix = "output_text", "msg"

    def __init__(self, index: int, items: ResponseItems, call: ParsedCall, id: str = "") -> None:
        super().__init__(index, items, call)
        self._logprobs, self._num_sent = items.text_logprobs(), 0
        self.item = self.new_item(id or new_id(self.id_prefix))
        self._part_location: Json = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._emit("response.output_item.added", output_index=index, item=self.item)
        self._emit("response.content_part.added", **self._part_location, part=self.content_part("", []))

    def new_item(self, id: str) -> Json:
        """Return the item without content."""
        return {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}

    def content_part(self, text: str, logprobs: list[str]) -> Json:
        """Return the item's only part."""
        return {"type": self.kind, "text": text, "annotations": [], **self.scores(logprobs)}

    def scores(self, logprobs: list[str]) -> Json:
        """Return the member for log-probabilities."""
        return {"logprobs": RawJsonList(logprobs)}

    def add(self, text: str) -> None:
        self._texts.append(text)
        new, self._num_sent = self._logprobs[self._num_sent :], len(self._logprobs)
        self._emit(f"response.{self.kind}.delta", **self._part_location, delta=text, **self.scores(new))

    def end(self, status: str) -> None:
        if self._num_sent < len(self._logprobs):  # the last tokens have no text
            self.add("")
        text, logprobs = "".join(self._texts), self._logprobs[:]
        self._emit(f"response.{self.kind}.done", **self._part_location, text=text, **self.scores(logprobs))
        part = self.content_part(text, logprobs)
        self._emit("response.content_part.done", **self._part_location, part=part)
        self.item |= {"status": status, "content": [part]}
        self._emit("response.output_item.done", output_index=self._index, item=self.item)


class ReasoningItem(TextItem):
    """The full reasoning of the model. There is no summary."""

    kind, id_prefix = "reasoning_text", "rs"

    def __init__(self, index: int, items: ResponseItems, call: ParsedCall, id: str = "") -> None:
        super().__init__(index, items, call, id)
        self._logprobs = []

    def new_item(self, id: str) -> Json:
        return {"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}

    def content_part(self, text: str, logprobs: list[str]) -> Json:
        return {"type": self.kind, "text": text}

    def scores(self, logprobs: list[str]) -> Json:
        return {}


class CallItem(OutputItem):
    """A function call, and its events."""

    kind, id_prefix, member, event = "function_call", "fc", "arguments", "response.function_call_arguments"
    done_members: tuple[str, ...] = ("name", "arguments")

    def __init__(self, index: int, items: ResponseItems, call: ParsedCall, id: str = "") -> None:
        super().__init__(index, items, call)
        self.item = {
            "id": id or new_id(self.id_prefix), "type": self.kind, "status": "in_progress", "call_id": call.id,
            "name": call.name, self.member: "",
        }  # fmt: skip
        self._emit("response.output_item.added", output_index=index, item=self.item)

    def add(self, text: str) -> None:
        self._texts.append(text)
        place = {"item_id": self.item["id"], "output_index": self._index}
        self._emit(f"{self.event}.delta", **place, delta=text)

    def end(self, status: str) -> None:
        place = {"item_id": self.item["id"], "output_index": self._index}
        self.item |= {"status": status, self.member: "".join(self._texts)}
        self._emit(f"{self.event}.done", **place, **{name: self.item[name] for name in self.done_members})
        self._emit("response.output_item.done", output_index=self._index, item=self.item)


class CustomCallItem(CallItem):
    """The call of a custom tool, whose input is one delta."""

    kind, id_prefix, member, event = "custom_tool_call", "ctc", CUSTOM_INPUT, "response.custom_tool_call_input"
    done_members = (CUSTOM_INPUT,)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def end(self, status: str) -> None:
        text, self._texts = custom_input("".join(self._texts)), []
        if text:
            super().add(text)
        super().end(status)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool's call, as much as there is. Arguments of another form are the input."""
    try:
        return CUSTOM_ARGUMENTS.validate_json(arguments, experimental_allow_partial="trailing-strings").get("input", "")
    except ValueError:
        return arguments


class ResponseItems(OutputItems):
    """The items of an output. Events are numbered; those up to number `after` are not written. `logprobs` are the
    log-probabilities of each text so far, as JSON. `custom` are the names of custom tools."""

    text_item, reasoning_item, call_item = TextItem, ReasoningItem, CallItem

    def __init__(
        self, emits_events: bool, logprobs: Sequence[list[str]] = (), after: int = -1, custom: Collection[str] = ()
    ) -> None:
        super().__init__(emits_events)
        self._custom = custom
        self._logprobs, self._number, self._after = logprobs, 0, after

    def emit(self, kind: str, **members: Any) -> None:
        if self._number > self._after:
            super().emit(kind, sequence_number=self._number, **members)
        self._number += 1

    def text_logprobs(self) -> list[str]:
        """Return the log-probabilities of the next text, in a list that grows with it."""
        texts = sum(type(item) is TextItem for item in self._items)
        return self._logprobs[texts] if texts < len(self._logprobs) else []

    def _open(self, kind: type[OutputItem], call: ParsedCall = NO_CALL) -> OutputItem:
        return super()._open(CustomCallItem if call.name in self._custom else kind, call)

    def replay(self, item: Json) -> None:
        """Write the events of an item that has ended."""
        kinds = {"message": TextItem, "reasoning": ReasoningItem, "function_call": CallItem,
                 "custom_tool_call": CustomCallItem}  # fmt: skip
        call = ParsedCall(0, item.get("call_id", ""), item.get("name", ""))
        self._items.append(kinds[item["type"]](len(self._items), self, call, item["id"]))
        if CUSTOM_INPUT in item:
            text = json.dumps({CUSTOM_INPUT: item[CUSTOM_INPUT]})
        else:
            text = item["arguments"] if call.id else item["content"][0]["text"]
        if text:
            self._items[-1].add(text)
        self._items[-1].end(item["status"])


def replay(data: bytes, after: int) -> str:
    """Return the events of the response in `data`, JSON, that has ended, without events up to number `after`. Each text
    is one delta. Raise InputError for a cancelled response, for which there is no last event."""
    response = json.loads(data)
    if response["status"] == "cancelled":
        raise InputError("a response that was cancelled can't be streamed: leave out stream", "stream")
    texts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    items = ResponseItems(True, [[json.dumps(entry) for entry in text["logprobs"]] for text in texts], after)
    began = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    for kind in ("response.created", "response.in_progress"):
        items.emit(kind, response=response | began | {"status": "in_progress", "output": []})
    for item in response["output"]:
        items.replay(item)
    items.emit(f"response.{response['status']}", response=response)
    return "".join(items.take_events())


class ResponseRenderer(ItemRenderer):
    """Renders /v1/responses for the request `body`. `store` is called with a response that is complete or was cut off
    at a length limit, and with a failed one in the background."""

    def __init__(
        self,
        generation: Generation,
        settings: RenderSettings,
        body: ResponseRequest,
        store: Callable[[Json], None] | None,
    ) -> None:
        self._logprobs = TextLogprobs(generation, settings.input_processor)
        items = ResponseItems(bool(body.stream), self._logprobs.texts, custom=custom_tools(body))
        super().__init__(generation, settings, items)
        self._store = store
        named = {"id": self.id, "model": settings.model, "store": store is not None}
        self.body = initial_body(body, generation) | named

    def response(self, status: Status, **more: Any) -> Json:
        """Return the current state of the response."""
        return self.body | {"status": status, "output": self._items.items(), **more}

    async def choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        if self.has_logprobs:
            for token, top in zip(output.tokens, output.top_logprobs):
                entry = self._token_entry(token, top)
                self._logprobs.add(token, entry)
                await self.pace(entry)
            if output.finish_reason is not None:
                self._logprobs.finish()
        return await super().choice(at, output, whole)

    async def opening_events(self) -> list[JsonPieces]:
        for kind in ("response.created", "response.in_progress"):
            self._items.emit(kind, response=self.response("in_progress"))
        return [self._items.take_events()]

    def _fail(self, error: BaseException) -> None:
        failure = {"code": "server_error", "message": to_failure(error).body()["error"]["message"]}
        self._items.close_item("incomplete")
        self._end("failed", error=failure)

    def _finish(self, output: BranchOutput) -> None:
        ends: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}
        status = ends.get(output.finish_reason, "failed")
        self._items.finish("completed" if status == "completed" else "incomplete")
        more: Json = {}
        if status == "completed":
            more["completed_at"] = int(time.time())
        elif status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["error"] = {"code": "server_error", "message": str(unfinished_error(output))}
        self._end(status, **more)

    def _end(self, status: Status, **more: Any) -> None:
        self.body = self.response(status, usage=self.usage_json(), **more)
        if self._store is not None and (status != "failed" or self.body["background"]):
            self._store(self.body)
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
    params, tool_choice, custom = generation.params, generation.tool_choice, custom_tools(body)
    tools = [
        {"type": "custom", "name": tool.name, "description": custom[tool.name].get("description"),
         "format": custom[tool.name].get("format") or {"type": "text"}}
        if tool.name in custom
        else {"type": "function", "description": None, "parameters": None, "strict": None,
              **tool.definition["function"]}
        for tool in tool_choice.tools
    ]  # fmt: skip
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": bool(body.background),
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
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }  # fmt: skip
