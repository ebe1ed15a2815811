"""Validation of a conversation's messages: roles, texts and images, bounded and of plain types. Independent of
templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InputError, short_repr
from quire.text.images.processor import ImageProcessor, escape_image_tokens, escape_image_tokens_in_json
from quire.text.tools import check_call_id, check_tool_results, read_calls

MAX_MESSAGES = 1024
MAX_PARTS = 1024
TEXT_FIELDS = ("role", "content", "name", "reasoning", "reasoning_content", "tool_call_id")
LIST_FIELDS = ("tool_calls",)
# OpenAI's fields that no template reads: with a value they are refused, since it would be lost.
IGNORED_FIELDS = ("audio", "function_call", "refusal")
KNOWN_FIELDS = frozenset({*TEXT_FIELDS, *LIST_FIELDS, *IGNORED_FIELDS})
REASONING_FIELDS = frozenset({"reasoning", "reasoning_content"})
IMAGE_DETAILS = (None, "auto", "low", "high")
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
    """Messages whose contents are strings or, with images, lists. `images` are their images in order."""

    messages: list[Message]
    images: list[ImageSource]

    def to_template_messages(self, formats: ContentFormats, placeholder_text: Callable[[int], str]) -> list[Message]:
        """Return the messages in a form that the template takes. In strings, images become their `placeholder_text` by
        number, from 1; those of a message come first, one per line."""
        converted, number = [], 1
        for message in self.messages:
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
    """Return the checked messages of a request. Text parts of one message are joined by newlines, unless there are
    images among them, which need a `processor`. Raise InputError with the position of the fault."""
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InputError(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", "messages")
    checked = [_message(f"messages[{i}]", message, processor) for i, message in enumerate(messages)]
    check_tool_results(checked)
    contents = [message["content"] for message in checked if isinstance(message["content"], list)]
    return ParsedMessages(checked, [part for content in contents for part in content if isinstance(part, ImageSource)])


def _message(at: str, message: Mapping[str, Any], processor: ImageProcessor | None) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"{at} must be an object, got {type(message).__name__}", "messages")
    fields = {name: value for name, value in message.items() if value is not None and value not in ([], ())}
    if unknown := [str(name) for name in fields if name not in (*TEXT_FIELDS, *LIST_FIELDS)]:
        raise InputError(f"{at} has an unsupported field {unknown[0][:60]!r}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InputError(f"{at}.role must be a word of 1 to 64 letters, digits, - or _", "messages")
    calls = read_calls(f"{at}.tool_calls", fields["tool_calls"]) if "tool_calls" in fields else []
    if calls and role != "assistant":
        raise InputError(f"{at}.tool_calls is in a message of the role {role!r}; only the assistant calls", "messages")
    content = message.get("content")
    if content in (None, [], ()) and (calls or (role == "assistant" and not REASONING_FIELDS.isdisjoint(fields))):
        content = ""
    checked: Message = {"role": role, "content": _content(f"{at}.content", content, role, processor)}
    if calls:
        checked["tool_calls"] = (
            calls if processor is None else escape_image_tokens_in_json(calls, processor.reserved_texts)
        )
    for name in TEXT_FIELDS[2:]:
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{at}.{name} must be a string, got {type(value).__name__}", "messages")
        if value is not None:
            checked[name] = _escape_text(value, processor)
    if "reasoning" in checked:  # the newer name, which templates do not read
        checked.setdefault("reasoning_content", checked.pop("reasoning"))
    if "tool_call_id" in checked:
        check_call_id(f"{at}.tool_call_id", checked["tool_call_id"])
    return checked


def _content(at: str, content: Any, role: str, processor: ImageProcessor | None) -> Content:
    if isinstance(content, str):
        return _escape_text(content, processor)
    if not isinstance(content, list | tuple):
        raise InputError(f"{at} must be a string or a list of text parts, got {type(content).__name__}", "messages")
    if not 1 <= len(content) <= MAX_PARTS:
        raise InputError(f"{at} must have 1 to {MAX_PARTS} parts, got {len(content)}", "messages")
    parts = [_part(f"{at}[{i}]", part, role, processor) for i, part in enumerate(content)]
    texts = [part for part in parts if isinstance(part, str)]
    return parts if len(texts) < len(parts) else "\n".join(texts)


def _part(at: str, part: Any, role: str, processor: ImageProcessor | None) -> str | ImageSource:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InputError(f'{at} must be an object like {{"type": "text", "text": ...}}', at)
    if kind == "image_url":
        return _read_image(f"{at}.image_url", part.get("image_url"), role, processor)
    if kind != "text":
        supported = "only 'text' is" if processor is None else "'text' and 'image_url' are"
        raise InputError(f"{at} has the type {kind[:60]!r}; {supported} supported", at)
    if not isinstance(part.get("text"), str):
        raise InputError(f"{at}.text must be a string, got {type(part.get('text')).__name__}", f"{at}.text")
    return _escape_text(part["text"], processor)


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


def _escape_text(text: str, processor: ImageProcessor | None) -> str:
    """Escape the texts that would be read as image placeholders."""
    return text if processor is None else escape_image_tokens(text, processor.reserved_texts)


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
