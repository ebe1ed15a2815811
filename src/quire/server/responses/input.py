"""The body of /v1/responses, and its translation to a chat request: items become messages, fields get the chat's names.

Nothing here reaches the engine. The ChatRequest is checked and answered like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from quire.errors import InputError, short_repr
from quire.protocol.sampling_params import MAX_STOP_CHARS, MAX_STOPS
from quire.server.adapter import (
    ClientNames,
    Conversation,
    SharedChatFields,
    check_choice,
    check_kind,
    read_string,
)
from quire.server.request_models import OBJECT, ChatRequest, Objects, StreamOptions, Strings, param_field, ranged_field
from quire.text.chat_messages import CUSTOM_INPUT, MAX_MESSAGES

Json = dict[str, Any]
INPUT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": OBJECT, "minItems": 1, "maxItems": MAX_MESSAGES}]
}
TOOL_CHOICE_SCHEMA = {"anyOf": [{"enum": [None, "none", "auto", "required"]}, OBJECT]}
ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text", "refusal", "input_image")
LOCAL_SHELL = "local_shell"  # the name of a call in chats
NAMED_CHOICES = ("function", "custom", "allowed_tools")
LOGPROBS = "message.output_text.logprobs"
KNOWN_INCLUDES = ("reasoning.encrypted_content", LOGPROBS)  # the former has no effect: no content is encrypted here
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # OpenAI's limits of metadata
# OpenAI's fields that would change the answer, or how it can be retrieved.
UNSUPPORTED_FIELDS = frozenset({
    "background_options", "context_management", "conversation", "max_tool_calls", "moderation", "prompt",
})  # fmt: skip
CLIENT_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
               "response_format": "text", "reasoning_effort": "reasoning",
               "logprobs": "top_logprobs"}  # fmt: skip


class ResponseRequest(SharedChatFields):
    """The body of /v1/responses: OpenAI's fields, and fields of chats that have no other name here."""

    input: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Strings | None = None
    top_logprobs: int | None = param_field("logprobs")
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = ranged_field(1)
    stop: str | Strings | None = ranged_field(minLength=1, maxLength=MAX_STOP_CHARS, maxItems=MAX_STOPS)


NAMES = ClientNames(
    "/v1/responses", "input", CLIENT_FIELDS,
    {"response_format": (("response_format.json_schema", "text.format"), ("response_format", "text.format")),
     "messages": ((".function.", "."), ("tool_call_id", "call_id")),
     "tools": ((".function.", "."), ('"function": {"name": ...}', '"name": ...'))},
)  # fmt: skip


def to_chat_request(body: ResponseRequest, conversation: Conversation, left_out: Iterable[str]) -> ChatRequest:
    """Return the chat request. `left_out` names items that the conversation lacks. Raise InputError for an unsupported
    field."""
    unknown = NAMES.check_fields(body.model_extra or {}, ResponseRequest.model_fields, UNSUPPORTED_FIELDS)
    _check_supported(body)
    given = body.chat_fields() | {"messages": conversation.messages, "max_completion_tokens": body.max_output_tokens}
    given |= {"stop": body.stop, "parallel_tool_calls": body.parallel_tool_calls}
    scored = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    given |= {"logprobs": scored, "top_logprobs": body.top_logprobs}
    given["tools"] = None if body.tools is None else [_to_chat_tool(tool) for tool in body.tools]
    given["tool_choice"] = _to_chat_tool_choice(body.tool_choice)
    text, reasoning = body.text or {}, body.reasoning or {}
    given["response_format"] = _to_response_format(text.get("format"))
    given["reasoning_effort"] = _string("reasoning.effort", reasoning.get("effort"))
    unread: Json = {**_unread_fields(body), **dict.fromkeys(left_out, True)}
    return ChatRequest.model_construct(**given, **unknown, **unread)


def _check_supported(body: ResponseRequest) -> None:
    """Raise InputError for what is not supported here."""
    for name in body.include or ():
        if name not in KNOWN_INCLUDES:
            raise InputError(f"include may have {', '.join(KNOWN_INCLUDES)}; {name[:60]!r} is not supported", "include")
    metadata = body.metadata or {}
    if len(metadata) > MAX_PAIRS:
        raise InputError(f"metadata may have at most {MAX_PAIRS} entries, got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            most = f"keys of at most {MAX_KEY} characters and strings of at most {MAX_VALUE}"
            raise InputError(f"metadata has {most}; {key[:60]!r} is {short_repr(value)}", "metadata")


def _unread_fields(body: ResponseRequest) -> Json:
    """Return the fields that are not used. The chat route names them in a warning, or refuses them if the server is
    strict."""
    text, reasoning, options = body.text or {}, body.reasoning or {}, body.stream_options
    choice = body.tool_choice if isinstance(body.tool_choice, Mapping) else {}
    unread = {"tool_choice.type": True} if choice and choice.get("type") not in NAMED_CHOICES else {}
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") == "custom" and _custom_pattern(tool) is None:
            unread[f"tools[{i}].format"] = True
    unread |= {f"text.{name}": value for name, value in text.items() if name != "format"}
    unread |= {f"reasoning.{name}": value for name, value in reasoning.items() if name != "effort"}
    if options is not None:
        known = {"include_usage": options.include_usage, "continuous_usage_stats": options.continuous_usage_stats}
        extra = {**known, **(options.model_extra or {})}
        unread |= {f"stream_options.{name}": value for name, value in extra.items() if value is not False}
    return {name: value for name, value in unread.items() if value is not None}


def _string(at: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise InputError(f"{at} must be a string, got {type(value).__name__}", at.partition(".")[0].partition("[")[0])


def _to_chat_tool(tool: Json) -> Json:
    """Return a tool in the chat's format. Its name and parameters are checked there. A custom tool becomes a function
    of one text."""
    if tool.get("type") == "custom":
        text = {"type": "string"} | ({"pattern": pattern} if (pattern := _custom_pattern(tool)) else {})
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        tool = {**tool, "type": "function", "parameters": parameters, "strict": None}
    if tool.get("type") != "function":
        return {"type": tool.get("type")}
    return {"type": "function", "function": {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }}  # fmt: skip


def _custom_pattern(tool: Json) -> str | None:
    """Return the regular expression of a custom tool's input, "" for any text, and None for another format."""
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping):
        raise InputError(f"the format of a custom tool must be an object, got {short_repr(form)}", "tools")
    if form.get("type") == "text":
        return ""
    regex = form.get("definition") if form.get("syntax") == "regex" else None
    return f"^(?:{regex})$" if isinstance(regex, str) else None


def custom_tools(body: ResponseRequest) -> dict[str, Json]:
    """Return the custom tools of a request that was checked, by name."""
    return {tool["name"]: tool for tool in body.tools or () if tool.get("type") == "custom"}


def _to_chat_tool_choice(given: Any) -> Any:
    if given in (None, "none", "auto", "required"):
        return given
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("function", "custom") and isinstance(given.get("name"), str):
        return {"type": "function", "function": {"name": given["name"]}}
    if kind == "allowed_tools":
        tools = given.get("tools") if isinstance(given.get("tools"), list) else []
        allowed = [_to_chat_tool_choice(tool) for tool in tools if isinstance(tool, Mapping)]
        return {"type": kind, kind: {"mode": given.get("mode"), "tools": [tool for tool in allowed if tool]}}
    if isinstance(kind, str) and kind not in NAMED_CHOICES:  # a tool that OpenAI's servers run
        return None
    form = '{"type": "function", "name": ...}'
    raise InputError(f"tool_choice is none, auto, required or {form}, got {short_repr(given)}", "tool_choice")


def _to_response_format(given: Any) -> Json | None:
    """Return text.format as a response_format."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InputError(f"text.format must be an object, got {type(given).__name__}", "text")
    kind = given.get("type")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema":
        return {"type": kind, "json_schema": {name: value for name, value in given.items() if name != "type"}}
    raise InputError(f"text.format.type must be text, json_object or json_schema, got {short_repr(kind)}", "text")


# Items


def input_items(body: ResponseRequest) -> list[Json]:
    """Return the input as items. Raise InputError if it is neither a string nor a list of objects."""
    given = body.input
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        value = "nothing" if given is None else short_repr(given)
        raise InputError(f"input must be a string or a list of items, got {value}", "input")
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InputError(f"input must have 1 to {MAX_MESSAGES} items, got {len(given)}", "input")
    return given


def droppable_items(items: Sequence[Json]) -> list[int]:
    """Return the positions of the items that `truncation` may drop: all except those of the roles system and developer,
    the user's last message, and the last item."""
    roles = [item.get("role") for item in items]
    kept = {len(items) - 1, *[i for i, role in enumerate(roles) if role == "user"][-1:]}
    return [i for i, role in enumerate(roles) if role not in ("system", "developer") and i not in kept]


def items_to_conversation(
    instructions: str | None, items: Sequence[Json], num_previous: int = 0, dropped: Collection[int] = ()
) -> tuple[Conversation, list[str]]:
    """Return the messages of a request, and the names of items and parts that can't be read. The messages are its
    instructions and its `items`, without those at the positions `dropped`. The first `num_previous` items are those of
    previous responses."""
    conversation = Conversation()
    if instructions is not None:
        conversation.append("instructions", {"role": "system", "content": instructions})
    reader = _ItemReader(conversation)
    for i, item in enumerate(items):
        if i not in dropped:
            at = f"input[{i - num_previous}]" if i >= num_previous else f"previous_response_id: item {i}"
            reader.add(at, item)
    reader.finish()
    for message in conversation.messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return conversation, reader.left_out


class _ItemReader:
    """Adds items to a conversation. Consecutive calls and the text before them become one message. Reasoning is added
    to the message after it. Images in the results of calls are added to the user's message after them."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation, self._reasoning_texts = conversation, list[str]()
        self._result_images: list[tuple[str, Json]] = []  # images in results, with their paths
        self._shell_call_ids: dict[str, Any] = {}  # of calls of the local shell, by the ids of their items
        self.left_out: list[str] = []  # paths of items and parts that can't be read, with their types

    def add(self, at: str, item: Json) -> None:
        """Add the next item. `at` is its path in errors."""
        adds: dict[str, Callable[[str, Json], None]] = {
            "message": self._add_message_item, "function_call": self._add_call,
            "function_call_output": self._add_result, "reasoning": self._add_reasoning,
            "custom_tool_call": self._add_custom_call, "custom_tool_call_output": self._add_result,
            "local_shell_call": self._add_shell_call, "local_shell_call_output": self._add_shell_result,
        }  # fmt: skip
        kind = item.get("type", "message" if "role" in item else None)
        if kind in PARTS:  # a part without its message
            self._add_message_item(at, {"role": "user", "content": [item]})
        elif isinstance(kind, str) and kind not in adds and "role" in item:
            self._add_message_item(at, item)
        elif isinstance(kind, str) and kind not in adds:  # of a hosted tool, or an unresolved reference
            self.left_out.append(f"{at} ({kind[:40]})")
        else:
            adds[check_kind({"type": "message"} | item, adds, at, "input")](at, item)

    def finish(self) -> None:
        """Add what is left after the last item."""
        if self._result_images:
            self._conversation.append(
                self._result_images[0][0], {"role": "user", "content": self._take_result_images()}
            )

    def _add_message(self, at: str, message: Json) -> None:
        if self._reasoning_texts and message["role"] == "assistant":
            message["reasoning_content"] = self._reasoning_texts
        self._reasoning_texts = []
        if self._result_images and message["role"] == "user":
            images, parts = self._take_result_images(), _as_parts(message["content"])
            for i in range(len(parts)):
                self._set_client_path(len(images) + i, f"{at}.content[{i}]")
            message["content"] = images + parts
        elif message["role"] != "tool":
            self.finish()
        self._conversation.append(at, message)

    def _take_result_images(self) -> list[Json]:
        """Return and remove the images of results, for the next message."""
        images, self._result_images = self._result_images, []
        for i, (place, _) in enumerate(images):
            self._set_client_path(i, place)
        return [part for _, part in images]

    def _set_client_path(self, part: int, place: str) -> None:
        """Set the client's path, `place`, of a part of the next message."""
        self._conversation.client_paths[f"messages[{len(self._conversation.messages)}].content[{part}]"] = place

    def _add_message_item(self, at: str, item: Json) -> None:
        role = item.get("role")
        check_choice(role, ROLES, f"{at}.role", "input")
        content = item.get("content")
        if role == "assistant" and content in (None, []):
            content = ""
        content = self._content(f"{at}.content", content, role == "assistant")
        last = self._conversation.last()
        if role == "assistant" and last.get("tool_calls"):  # a text after calls belongs to the message of the calls
            last["content"] = parts = _as_parts(last["content"])
            parts += _as_parts(content)
            if self._reasoning_texts:
                last.setdefault("reasoning_content", []).extend(self._reasoning_texts)
                self._reasoning_texts = []
        else:
            self._add_message(at, {"role": role, "content": content})

    def _add_call(self, at: str, item: Json) -> None:
        name, id = read_string(item, "name", at, "input"), item.get("call_id")
        given = item.get("arguments")
        last = self._conversation.last()
        if last.get("role") != "assistant" or self._reasoning_texts:
            self._add_message(at, {"role": "assistant", "content": None})
        self._conversation.add_call(at, id, name, given)

    def _add_custom_call(self, at: str, item: Json) -> None:
        """Add the call of a custom tool, whose input is a text."""
        arguments = {CUSTOM_INPUT: read_string(item, "input", at, "input")}
        self._add_call(at, {**item, "arguments": json.dumps(arguments, ensure_ascii=False)})

    def _add_shell_call(self, at: str, item: Json) -> None:
        """Add a call of OpenAI's local shell, whose arguments are its action."""
        id = item.get("call_id") or item.get("id")
        self._shell_call_ids[str(item.get("id"))] = id
        self._add_call(at, {"call_id": id, "name": LOCAL_SHELL, "arguments": item.get("action")})

    def _add_shell_result(self, at: str, item: Json) -> None:
        """Add a result of the local shell. Its `id` is that of the call or of the call's item."""
        id = item.get("call_id") or item.get("id")
        self._add_result(at, {**item, "call_id": self._shell_call_ids.get(str(id), id)})

    def _add_result(self, at: str, item: Json) -> None:
        id = read_string(item, "call_id", at, "input")
        output: Any = self._content(f"{at}.output", "" if item.get("output") is None else item["output"], True)
        if isinstance(output, list):
            parts = [(f"{at}.output[{i}]", part) for i, part in enumerate(output)]
            self._result_images += [(place, part) for place, part in parts if part["type"] != "text"]
            texts = [(place, part) for place, part in parts if part["type"] == "text"]
            for i, (place, _) in enumerate(texts):
                self._set_client_path(i, place)
            output = [part for _, part in texts] or ""
        self._add_message(at, {"role": "tool", "tool_call_id": id, "content": output})

    def _content(self, at: str, content: Any, past: bool) -> str | list[Json]:
        """Return the content of a message or a result. If it is `past`, parts that can't be read are left out."""
        if isinstance(content, str):
            return content
        if past and isinstance(content, dict):
            return json.dumps(content, ensure_ascii=False)
        if not isinstance(content, list):
            raise InputError(f"{at} must be a string or a list of parts, got {short_repr(content)}", "input")
        parts: list[Json] = []
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if past and isinstance(kind, str) and kind not in PARTS:
                self.left_out.append(f"{at}[{i}] ({kind[:40]})")
            else:
                parts.append(_part(f"{at}[{i}]", part))
        return parts or ("" if past else parts)

    def _add_reasoning(self, at: str, item: Json) -> None:
        """Add the texts only: summaries are not the reasoning itself, and encrypted content cannot be read here."""
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            raise InputError(f'{at}.content must be a list like {{"type": "reasoning_text", "text": ...}}', "input")
        self._reasoning_texts += [part["text"] for part in parts if part["text"]]


def _as_parts(content: str | list[Json] | None) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _part(at: str, part: Any) -> Json:
    kind = check_kind(part, PARTS, at, "input")
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise InputError(f"{at}.file_id is not supported: give the image as a data: URI in image_url", "input")
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}
    return {"type": "text", "text": read_string(part, "refusal" if kind == "refusal" else "text", at, "input")}
