"""The body of /v1/messages, and its translation to a chat request: content blocks become messages, fields get the
chat's names.

Nothing here reaches the engine. The ChatRequest is checked and answered like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from quire.errors import InputError, short_repr
from quire.protocol.sampling_params import MAX_STOPS
from quire.server.adapter import (
    ClientNames,
    Conversation,
    Json,
    SharedChatFields,
    check_choice,
    check_kind,
    read_string,
)
from quire.server.errors import ThreadsUnsupported
from quire.server.generation import RequestResolver
from quire.server.request_models import OBJECT, ChatRequest, Objects, Strings, ranged_field
from quire.text.chat_messages import MAX_MESSAGES

BLOCKS_SCHEMA = {"type": "array", "items": {"type": "object", "required": ["type"]}}
SYSTEM_SCHEMA = {"anyOf": [{"type": "string"}, BLOCKS_SCHEMA, {"type": "null"}]}
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {**BLOCKS_SCHEMA, "minItems": 1}]},
    },
}
MESSAGES_SCHEMA = {"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1, "maxItems": MAX_MESSAGES}
TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "", "none": "none"}
THINKING_TYPES = ("enabled", "adaptive", "disabled")
THINKING_VARIABLES = ("enable_thinking", "thinking")  # names in chat templates
UNSUPPORTED_FIELDS = ("container", "mcp_servers")  # Anthropic's fields that would change the answer
ROLES = ("user", "assistant", "system")
# Types of blocks by role, and the fields that are used of each type. Other types of PAST_OWNERS are left out.
BLOCK_TYPES = {
    "system": ("text",),
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image", "document", "search_result"),
}
PAST_OWNERS = ("assistant", "tool_result")
BLOCK_FIELDS = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source", "title", "context"),
    "search_result": ("source", "title", "content"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_use": ("id", "name", "input"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
ERROR_PREFIX = "Error: "  # before the text of a tool result with is_error
BILLING_HEADER = "x-anthropic-billing-header"
"""The beginning of a block that a client adds to the system message. It differs with each request, so that no prefix
would be found in the cache."""
UNCHECKED_FIELDS = ("content", "is_error", "signature", "input", "title", "context")  # not by `_read_blocks`
NAMES = ClientNames(
    "/v1/messages",
    "messages",
    {"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "response_format": "output_config",
     "reasoning_effort": "output_config", "parallel_tool_calls": "tool_choice", "thinking_token_budget": "thinking"},
    {"messages": ((".image_url", ".source"), (".function.arguments", ".input"), (".function.name", ".name"),
                  ("tool_call_id", "tool_use_id"), ("image_url parts", "image blocks")),
     "response_format": (("response_format.json_schema", "output_config.format"),
                         ("response_format", "output_config.format")),
     "tools": ((".function.parameters", ".input_schema"), (".function.", ".")),
     "tool_choice": (("required", "any"),),
     "thinking_token_budget": (("thinking_token_budget", "thinking.budget_tokens"),)},
)  # fmt: skip


class CountTokensRequest(SharedChatFields):
    """The body of /v1/messages/count_tokens: the fields that affect the prompt."""

    messages: Annotated[Any, WithJsonSchema(MESSAGES_SCHEMA)]
    system: Annotated[Any, WithJsonSchema(SYSTEM_SCHEMA)] = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [OBJECT, {"type": "null"}]})] = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessageRequest(CountTokensRequest):
    """The body of /v1/messages: Anthropic's fields, and fields of chats that have no other name here."""

    max_tokens: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1})]
    stop_sequences: Strings | None = ranged_field(maxItems=MAX_STOPS)
    metadata: dict[str, Any] | None = None


class TranslatedMessages:
    """A request translated to a chat request. `resolver` knows the model's chat template and its reasoning format."""

    def __init__(self, body: CountTokensRequest, resolver: RequestResolver) -> None:
        extra = body.model_extra or {}
        if extra.get("thread") is not None:
            raise ThreadsUnsupported("thread is not supported: send all messages", "thread")
        reader = MessageReader(body.system, body.messages)
        self._body, self._ignored = body, reader.ignored
        self.conversation: Conversation = reader.conversation
        unknown = NAMES.check_fields(extra, type(body).model_fields, UNSUPPORTED_FIELDS)
        if body.cache_control is not None:
            self._ignored["cache_control"] = True
        given = body.chat_fields() | self._output_fields() | self._thinking_fields(resolver) | self._tool_fields()
        if isinstance(body, MessageRequest):
            given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        else:
            given |= {"max_tokens": 1}
        last = self.conversation.last()
        if last.get("role") == "assistant" and not last.get("tool_calls"):  # the answer continues it
            given |= {"continue_final_message": True}
        self.chat_request = ChatRequest.model_construct(
            messages=self.conversation.messages, **given, **(unknown | self._ignored)
        )

    def _output_fields(self) -> Json:
        """Return the chat's fields for output_config. output_format is the older name of output_config.format."""
        config = dict(self._body.output_config or {})
        form, effort = config.pop("format", None), config.pop("effort", None)
        self._ignored |= {f"output_config.{name}": True for name, value in config.items() if value is not None}
        if effort is not None and not isinstance(effort, str):
            raise InputError(f"output_config.effort must be a string, got {type(effort).__name__}", "output_config")
        if form is not None and self._body.output_format is not None:
            raise InputError("output_config.format and output_format are the same: give one", "output_format")
        return {"response_format": self._response_format(form or self._body.output_format), "reasoning_effort": effort}

    def _response_format(self, form: Any) -> Json | None:
        if form is None:
            return None
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            kind = short_repr(form.get("type") if isinstance(form, Mapping) else form)
            raise InputError(f"output_config.format.type must be json_schema, got {kind}", "output_config")
        schema = {name: form[name] for name in ("schema",) if form.get(name) is not None}
        return {"type": "json_schema", "json_schema": {**schema, "strict": True}}

    def _thinking_fields(self, resolver: RequestResolver) -> Json:
        """Return the chat's fields for `thinking`: the template's variables, a budget, and whether reasoning is
        returned."""
        given, body = self._body.thinking, self._body
        if given is None:
            return {}
        kind = given.get("type")
        check_choice(kind, THINKING_TYPES, "thinking.type", "thinking")
        names = [name for name in THINKING_VARIABLES if kind != "adaptive" and name in resolver.template_variables]
        switches = dict.fromkeys(names, kind != "disabled")
        chat_fields: Json = {"chat_template_kwargs": {**switches, **(body.chat_template_kwargs or {})}}
        if kind == "disabled" or given.get("display") == "omitted":
            chat_fields["include_reasoning"] = False
        budget = given.get("budget_tokens")
        if kind == "enabled":
            most = body.max_tokens - 1 if isinstance(body, MessageRequest) else 2**31 - 1
            if type(budget) is not int or not 1 <= budget <= most:
                limit = f"a number from 1 to {most}, less than max_tokens" if most < 2**31 - 1 else "a number from 1 on"
                raise InputError(f"thinking.budget_tokens must be {limit}, got {short_repr(budget)}", "thinking")
            if resolver.reasoning.format is not None:
                chat_fields["thinking_token_budget"] = budget
            else:  # clients send budgets to any model; without reasoning there is nothing to limit
                self._ignored["thinking"] = True
        known = ("type", "display", *(("budget_tokens",) if kind == "enabled" else ()))
        self._ignored |= {f"thinking.{name}": True for name in given if name not in known}
        return chat_fields

    def _tool_fields(self) -> Json:
        tools = self._body.tools
        choice = self._body.tool_choice or {}
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if choice and (not isinstance(kind, str) or kind not in TOOL_CHOICES):
            form = '{"type": "auto"}, any, none, or {"type": "tool", "name": ...}'
            raise InputError(f"tool_choice must be {form}, got {short_repr(choice)}", "tool_choice")
        no_parallel = choice.get("disable_parallel_tool_use")
        if no_parallel is not None and type(no_parallel) is not bool:
            raise InputError(
                f"tool_choice.disable_parallel_tool_use must be true or false, got {short_repr(no_parallel)}",
                "tool_choice",
            )
        chat_choice: Any = TOOL_CHOICES.get(kind or "")
        if kind == "tool":
            name = read_string(choice, "name", "tool_choice", "tool_choice")
            chat_choice = {"type": "function", "function": {"name": name}}
        return {
            "tools": None
            if tools is None
            else [self._to_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)],
            "tool_choice": chat_choice,
            "parallel_tool_calls": False if no_parallel else None,
        }

    def _to_chat_tool(self, at: str, tool: Json) -> Json:
        """Return a tool in the chat's format. Its contents are checked there."""
        if tool.get("type") not in (None, "custom"):
            return {"type": tool["type"]}
        if not isinstance(tool.get("input_schema"), Mapping):
            raise InputError(
                f"{at}.input_schema must be a JSON schema, got {short_repr(tool.get('input_schema'))}", "tools"
            )
        known = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
        ignored = {name for name in tool if name not in known and name != "type" and tool[name] is not None}
        self._ignored |= {name if name == "cache_control" else f"tools.{name}": True for name in ignored}
        function = {chat_name: tool[name] for name, chat_name in known.items() if tool.get(name) is not None}
        return {"type": "function", "function": function}


class MessageReader:
    """Reads messages into a conversation. `ignored` holds the names of fields of messages and blocks that are not
    used."""

    def __init__(self, system: Any, messages: Any) -> None:
        self.conversation, self.ignored = Conversation(), dict[str, bool]()
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InputError(f"messages must be a list of objects, got {short_repr(messages)}", "messages")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InputError(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", "messages")
        if system is not None and system != []:
            self._add_turn("system", "system", system, "system")
        for i, message in enumerate(messages):
            at, role = f"messages[{i}]", message.get("role")
            check_choice(role, ROLES, f"{at}.role", "messages")
            self._ignore("message", message, ("role", "content"))
            self._add_turn(at, role, message.get("content"), f"{at}.content")
        for message in self.conversation.messages:
            message["content"] = message["content"] or ""
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])

    def _add_turn(self, at: str, role: str, content: Any, path: str) -> None:
        blocks = self._read_blocks(path, content, role)
        if role == "assistant":
            self._add_assistant(at, blocks)
        elif role == "user":
            self._add_user(at, blocks)
        else:
            self.conversation.append(at, {"role": role, "content": []})
            self._add_parts([(place, {"type": "text", "text": block["text"]}) for place, block in blocks])

    def _read_blocks(self, at: str, content: Any, owner: str) -> list[tuple[str, Json]]:
        """Check the blocks of a message and return them with their paths."""
        param = at.partition("[")[0]
        if owner == "assistant" and content is None:
            return []
        if owner == "tool_result" and isinstance(content, Mapping):
            content = json.dumps(content, ensure_ascii=False)
        if isinstance(content, str):
            return [(at, {"type": "text", "text": content})]
        if not isinstance(content, list):
            raise InputError(f"{at} must be a string or a list of blocks, got {short_repr(content)}", param)
        blocks = []
        for i, block in enumerate(content):
            place = f"{at}[{i}]"
            if owner == "tool_result" and isinstance(block, str):
                block = {"type": "text", "text": block}
            if self._is_left_out(place, block, owner):
                continue
            kind = check_kind(block, BLOCK_TYPES[owner], place, param, f" for {owner}")
            self._ignore(kind, block, ("type", *BLOCK_FIELDS[kind]))
            for name in BLOCK_FIELDS[kind]:
                if name in UNCHECKED_FIELDS or (kind, name) == ("search_result", "source"):
                    continue
                expected = Mapping if name == "source" else str
                if not isinstance(block.get(name), expected):
                    what = "a string" if expected is str else "an object"
                    raise InputError(f"{place}.{name} must be {what}, got {short_repr(block.get(name))}", param)
            blocks.append((place, block))
        return blocks

    def _is_left_out(self, at: str, block: Any, owner: str) -> bool:
        """Return True, and name the block in a warning, if it is left out: a client's billing header, or of PAST_OWNERS
        a block of an unknown type or a document without text."""
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            return False
        unread = kind not in BLOCK_TYPES[owner] or (kind == "document" and _document_text(block) is None)
        if owner in PAST_OWNERS and unread:
            self.ignored[f"{at} ({kind[:40]})"] = True
            return True
        text = block.get("text")
        if owner == "system" and isinstance(text, str) and text.startswith(BILLING_HEADER):
            self.ignored[f"{at} ({BILLING_HEADER})"] = True
            return True
        return False

    def _ignore(self, prefix: str, given: Json, known: tuple[str, ...]) -> None:
        for name, value in given.items():
            if name not in known and value not in (None, [], {}):
                self.ignored[name if name == "cache_control" else f"{prefix}.{name}"] = True

    def _add_parts(self, parts: list[tuple[str, Json]]) -> None:
        """Add parts to the last message."""
        last, at = self.conversation.last(), len(self.conversation.messages) - 1
        for place, part in parts:
            self.conversation.client_paths[f"messages[{at}].content[{len(last['content'])}]"] = place
            last["content"].append(part)

    def _add_user(self, at: str, blocks: list[tuple[str, Json]]) -> None:
        """Add a user's blocks. Tool results become messages of their own; their images are added to the user's message
        after them."""
        result_images: list[tuple[str, Json]] = []
        user_parts: list[tuple[str, Json]] = []
        for place, block in blocks:
            if block["type"] == "tool_result":
                result_images += self._add_result(place, block)
            else:
                user_parts.append((place, self._to_chat_part(place, block)))
        if parts := result_images + user_parts:
            if self.conversation.last().get("role") != "user":
                self.conversation.append(at, {"role": "user", "content": []})
            self._add_parts(parts)
        elif not blocks:
            raise InputError(f"{at}.content must have a block at least", "messages")

    def _add_result(self, at: str, block: Json) -> list[tuple[str, Json]]:
        """Add a message with a tool's result. Return its images."""
        failed = block.get("is_error")
        if failed is not None and type(failed) is not bool:
            raise InputError(f"{at}.is_error must be true or false, got {short_repr(failed)}", "messages")
        content = block.get("content")
        blocks = [] if content is None else self._read_blocks(f"{at}.content", content, "tool_result")
        texts = [_block_text(place, inner) for place, inner in blocks if inner["type"] != "image"]
        text = (ERROR_PREFIX if failed else "") + "\n".join(texts)
        self.conversation.append(at, {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        return [(place, self._to_chat_part(place, inner)) for place, inner in blocks if inner["type"] == "image"]

    def _to_chat_part(self, at: str, block: Json) -> Json:
        """Return a text part, or an image as a data: URI."""
        if block["type"] != "image":
            return {"type": "text", "text": _block_text(at, block)}
        source = block["source"]
        if source.get("type") != "base64":
            raise InputError(
                f"{at}.source.type is {short_repr(source.get('type'))}; only 'base64' is supported, no URL is fetched",
                "messages",
            )
        media_type, data = (read_string(source, name, f"{at}.source", "messages") for name in ("media_type", "data"))
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}

    def _add_assistant(self, at: str, blocks: list[tuple[str, Json]]) -> None:
        """Add an assistant's blocks. redacted_thinking, which cannot be read here, is left out."""
        if self.conversation.last().get("role") != "assistant":
            self.conversation.append(at, {"role": "assistant", "content": []})
        message = self.conversation.last()
        for place, block in blocks:
            if block["type"] == "thinking" and block["thinking"]:
                message.setdefault("reasoning_content", []).append(block["thinking"])
            elif block["type"] == "text":
                self._add_parts([(place, self._to_chat_part(place, block))])
            elif block["type"] == "tool_use":
                self.conversation.add_call(place, block["id"], block["name"], block.get("input"))


def _block_text(at: str, block: Json) -> str:
    """Return the text of a text, a document or a search result."""
    if block["type"] == "text":
        return str(block["text"])
    if block["type"] == "document":
        text = _document_text(block)
        if text is None:
            what = f'{at}.source must have plain text: {{"type": "text", "data": ...}} or content of text blocks'
            raise InputError(what, "messages")
        head = (block.get("title"), block.get("context"))
    else:
        text, head = _text_of(block.get("content")), (block.get("title"), block.get("source"))
        if text is None:
            raise InputError(f"{at}.content must be a list of text blocks", "messages")
    return "\n".join([*(line for line in head if isinstance(line, str) and line), text])


def _document_text(document: Json) -> str | None:
    """Return the text of a document, or None if it has none, such as a PDF."""
    source = document.get("source")
    if not isinstance(source, Mapping):
        return None
    if source.get("type") == "content":
        return _text_of(source.get("content"))
    text = source.get("data")
    return text if source.get("type") == "text" and isinstance(text, str) else None


def _text_of(content: Any) -> str | None:
    """Return the text of a string or a list of text blocks, or None for anything else."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [None]
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in blocks]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
