"""Validation of a conversation's messages: roles, texts, images and calls, bounded and of plain types. Independent of
templates.

Messages of an assistant or a tool are lenient: a part that can't be read is dropped or changed, and a note names it. A
message of a user that can't be read is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InputError, short_repr
from quire.text.images.processor import ImageProcessor, escape_image_tokens, escape_image_tokens_in_json
from quire.text.tools import MAX_CALLS, TOOL_SHAPE, JsonCopier

MAX_MESSAGES = 1024
MAX_PARTS = 1024
MAX_NOTES = 8
TEXT_FIELDS = ("name", "reasoning", "reasoning_content", "tool_call_id", "refusal")
KNOWN_FIELDS = frozenset({"role", "content", *TEXT_FIELDS, "tool_calls", "function_call", "audio"})
IMAGE_DETAILS = (None, "auto", "low", "high")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of text parts, and the field with the text."""
REASONING_PARTS = ("thinking", "reasoning")
PAST_ROLES = ("assistant", "tool")  # of messages that a client replays
CUSTOM_INPUT = "input"  # the argument that has the text of a custom tool's call
EMPTY: tuple[Any, ...] = (None, [], ())
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ImageSource(NamedTuple):
    """An image of a request, and its parameter's name: a data: URI, or an object of the Python API."""

    param: str
    source: Any


Content = str | list[str | ImageSource]
Message = dict[str, Any]


class ContentFormats(NamedTuple):
    """The forms of a message's content that a template takes: a string, or a list of parts."""

    accepts_string: bool = True
    accepts_parts: bool = False


class ParsedMessages(NamedTuple):
    """Messages whose contents are strings or, with images, lists. `images` are their images in order. `notes` name the
    parts that were dropped or changed. The arguments of calls are objects, or texts that are not JSON objects."""

    messages: list[Message]
    images: list[ImageSource]
    notes: list[str]


def to_template_messages(
    messages: Sequence[Message], formats: ContentFormats, placeholder_text: Callable[[int], str]
) -> list[Message]:
    """Return the messages in a form that the template takes. In strings, images become their `placeholder_text` by
    number, from 1; those of a message come first, one per line."""
    converted, number = [], 1
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        texts = [part for part in parts if isinstance(part, str)]
        count = len(parts) - len(texts)
        if formats.accepts_parts and (count or not formats.accepts_string):
            formed: Any = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                           for part in parts]  # fmt: skip
        else:
            formed = "\n".join([*map(placeholder_text, range(number, number + count)), *texts])
        number += count
        converted.append({**message, "content": formed})
    return converted


def read_messages(messages: Any, processor: ImageProcessor | None = None) -> ParsedMessages:
    """Return the messages of a request. Text parts of one message are joined by newlines, unless there are images among
    them, which need a `processor`. Raise InputError with the position of the fault."""
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InputError(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", "messages")
    reader = _MessageReader(processor)
    read = [reader.message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    contents = [message["content"] for message in read if isinstance(message["content"], list)]
    images = [part for content in contents for part in content if isinstance(part, ImageSource)]
    notes, more = reader.notes[:MAX_NOTES], len(reader.notes) - MAX_NOTES
    return ParsedMessages(read, images, [*notes, f"and {more} more"] if more > 0 else notes)


class _MessageReader:
    """Reads messages. `notes` names the parts that were dropped or changed."""

    def __init__(self, processor: ImageProcessor | None) -> None:
        self._processor, self.notes = processor, list[str]()

    def message(self, at: str, message: Any) -> Message:
        """Return a message with the fields that templates read. Raise InputError if it can't be read."""
        if not isinstance(message, Mapping):
            raise InputError(f"{at} must be an object, got {type(message).__name__}", "messages")
        fields = {name: value for name, value in message.items() if value not in EMPTY}
        if unknown := [str(name) for name in fields if name not in KNOWN_FIELDS]:
            raise InputError(f"{at} has an unsupported field {unknown[0][:60]!r}", "messages")
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InputError(f"{at}.role must be a word of 1 to 64 letters, digits, - or _", "messages")
        role = "tool" if role == "function" else role
        for name in TEXT_FIELDS:
            if not isinstance(fields.get(name, ""), str):
                raise InputError(f"{at}.{name} must be a string, got {type(fields[name]).__name__}", "messages")
        calls, reasoning = self._calls(at, fields), list[str]()
        if calls and role != "assistant":
            what = f"{at}.tool_calls is in a message of the role {role!r}; only the assistant calls"
            raise InputError(what, "messages")
        content = self._content(f"{at}.content", fields.get("content", message.get("content")), role, reasoning)
        if refusal := fields.pop("refusal", ""):
            refusal = self._escape_text(refusal)
            content = f"{content}\n{refusal}".lstrip("\n") if isinstance(content, str) else [*content, refusal]
        read: Message = {"role": role, "content": content}
        if calls:
            read["tool_calls"] = self._escape(calls)
        if "audio" in fields:
            self.notes.append(f"{at}.audio was left out")
        texts = {name: fields[name] for name in TEXT_FIELDS if name in fields}
        newer = texts.pop("reasoning", None)  # templates read only the older name
        if newer is None and reasoning:
            newer = "\n".join(reasoning)
        if newer is not None:
            texts.setdefault("reasoning_content", newer)
        if texts.get("tool_call_id") == "":
            del texts["tool_call_id"]
        if calls and not content and "reasoning_content" in texts:
            texts["thinking"] = texts["reasoning_content"]  # so gpt-oss's template calls it
        read |= self._escape(texts)
        return read

    def _content(self, at: str, content: Any, role: str, reasoning: list[str]) -> Content:
        """Return the content of a message. The texts of an assistant's thinking parts are added to `reasoning`."""
        if isinstance(content, str):
            return self._escape_text(content)
        if role in PAST_ROLES and content in EMPTY:
            return ""
        if role in PAST_ROLES and isinstance(content, Mapping | int | float):
            return self._escape_text(_to_json(JsonCopier(at, "messages").copy(content, at)))
        if not isinstance(content, list | tuple):
            raise InputError(f"{at} must be a string or a list of text parts, got {type(content).__name__}", "messages")
        if not 1 <= len(content) <= MAX_PARTS:
            raise InputError(f"{at} must have 1 to {MAX_PARTS} parts, got {len(content)}", "messages")
        parts = []
        for i, part in enumerate(content):
            if (read := self._part(f"{at}[{i}]", part, role, reasoning)) is not None:
                parts.append(read)
        texts = [part for part in parts if isinstance(part, str)]
        return parts if len(texts) < len(parts) else "\n".join(texts)

    def _part(self, at: str, part: Any, role: str, reasoning: list[str]) -> str | ImageSource | None:
        """Return a part, or None if it is left out."""
        if role in PAST_ROLES and isinstance(part, str):
            return self._escape_text(part)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise InputError(f'{at} must be an object like {{"type": "text", "text": ...}}', at)
        if field := TEXT_PARTS.get(kind):
            if not isinstance(part.get(field), str):
                raise InputError(
                    f"{at}.{field} must be a string, got {type(part.get(field)).__name__}", f"{at}.{field}"
                )
            return self._escape_text(part[field])
        if kind in ("image_url", "input_image"):
            return _read_image(f"{at}.image_url", part.get("image_url"), role, self._processor)
        if kind in REASONING_PARTS and role == "assistant" and (text := _thinking_text(part)) is not None:
            reasoning.append(text)
            return None
        if role in PAST_ROLES:
            self.notes.append(f"{at} was left out: its type is {kind[:60]!r}")
            return None
        supported = "only 'text' is" if self._processor is None else "'text' and 'image_url' are"
        raise InputError(f"{at} has the type {kind[:60]!r}; {supported} supported", at)

    def _calls(self, at: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the calls of a message: its tool_calls, and its function_call, the older form of one call."""
        calls = fields.get("tool_calls", ())
        if not isinstance(calls, list | tuple):
            raise InputError(f"{at}.tool_calls must be a list, got {type(calls).__name__}", "messages")
        if len(calls) > MAX_CALLS:
            raise InputError(f"{at}.tool_calls may have at most {MAX_CALLS} entries, got {len(calls)}", "messages")
        read = [self._call(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
        if "function_call" in fields:
            read.append(self._call(f"{at}.function_call", {"function": fields["function_call"]}))
        return read

    def _call(self, at: str, call: Any) -> dict[str, Any]:
        kind = call.get("type") or "function" if isinstance(call, Mapping) else None
        function = call.get(kind) if kind in ("function", "custom") else None
        if not isinstance(function, Mapping):
            raise InputError(f"{at} must be a call of {TOOL_SHAPE}", "messages")
        name, id = function.get("name"), call.get("id")
        if not isinstance(name, str) or not name:
            raise InputError(f"{at}.{kind}.name must be a string with a character, got {short_repr(name)}", "messages")
        if id is not None and not isinstance(id, str | int):
            raise InputError(f"{at}.id must be a string, got {short_repr(id)}", "messages")
        given = function.get("arguments") if kind == "function" else {CUSTOM_INPUT: function.get(CUSTOM_INPUT)}
        arguments = self._arguments(f"{at}.function.arguments", given)
        read: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return read | ({} if id in (None, "") else {"id": str(id)})

    def _arguments(self, at: str, given: Any) -> dict[str, Any] | str:
        """Return the arguments of a call as an object, or as their text if they are not a JSON object: a model may
        write such a call, and a length limit may cut one off."""
        if given is None or given == "":
            return {}
        try:
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{at} is no JSON value: {str(error)[:80]}", "messages") from None
        try:
            value = json.loads(text)
            json.dumps(value, allow_nan=False)  # refuses NaN, and 1e999, which is parsed as an infinity
            if isinstance(value, Mapping):
                arguments: dict[str, Any] = JsonCopier(at, "messages").copy(value, at)
                return arguments
        except (ValueError, RecursionError) as error:  # InputError too, for too many values or levels
            self.notes.append(f"{at} is no JSON: {str(error)[:80]}")
            return text
        self.notes.append(f"{at} is no JSON object")
        return {} if value is None else _to_json(value)

    def _escape(self, value: Any) -> Any:
        """Escape the texts that would be read as image placeholders, in a JSON value."""
        return value if self._processor is None else escape_image_tokens_in_json(value, self._processor.reserved_texts)

    def _escape_text(self, text: str) -> str:
        return text if self._processor is None else escape_image_tokens(text, self._processor.reserved_texts)


def _thinking_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a thinking part, which is a string or a list of text parts, or None without a text."""
    text = part.get("thinking", part.get("text"))
    if isinstance(text, list):
        texts = [str(entry["text"]) for entry in text if isinstance(entry, Mapping) and "text" in entry]
        text = "\n".join(texts) if texts else None
    return text if isinstance(text, str) else None


def _read_image(at: str, given: Any, role: str, processor: ImageProcessor | None) -> ImageSource:
    if processor is None:
        raise InputError(f"{at} is an image, and this model reads only text", at)
    if role != "user":
        raise InputError(f"{at} is in a message of the role {role!r}; only those of 'user' may have images", at)
    if isinstance(given, Mapping):
        if given.get("detail") not in IMAGE_DETAILS:
            raise InputError(f"{at}.detail is {short_repr(given['detail'])}; it may be auto, low or high", at)
        given = given.get("url")
    if not isinstance(given, str):
        raise InputError(f"{at} must be a data: URI, got {type(given).__name__}", at)
    return ImageSource(at, given)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def unknown_message_fields(messages: Any) -> list[str]:
    """Return the unknown fields with a value in messages, once each. Entries that are not messages are skipped."""
    given = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []
    return list(dict.fromkeys(
        name for message in given for name in message if name not in KNOWN_FIELDS and message[name] not in (None, [],
        ())
    ))  # fmt: skip


def drop_unknown_fields(messages: Sequence[Any]) -> list[Any]:
    """Return the messages without unknown fields."""
    return [
        {name: value for name, value in message.items() if name in KNOWN_FIELDS}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def append_mark(messages: Sequence[Message], mark: str) -> str:
    """Append `mark` to the last message and return the text before it. Raise InputError if that message ends with an
    image."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + mark
        return content
    if "text" not in content[-1]:
        raise InputError("the last message ends with an image, so it can't be continued", "continue_final_message")
    text = str(content[-1]["text"])
    content[-1]["text"] = text + mark
    return text
