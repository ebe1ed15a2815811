"""What the Messages and Responses APIs share: both translate a request to a chat request. The shared fields, the
conversation with the client's names of its parts, and the translation of the chat's errors to those names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from quire.errors import InputError, short_repr
from quire.server.errors import UnknownField
from quire.server.generation import Generation
from quire.server.request_models import (
    EMPTY_VALUES,
    REFUSED_FIELDS,
    ChatRequest,
    SharedFields,
    ranged_field,
)

Json = dict[str, Any]
ARGUMENTS = TypeAdapter(Json)
CHAT_PATH = re.compile(r"messages\[\d{1,9}\](?:\.(?:content|tool_calls)\[\d{1,9}\])?")
MESSAGE_PATH = re.compile(r"messages\[\d{1,9}\]")


def parse_partial_arguments(text: str) -> Json:
    """Parse a JSON object, or as much as there is of one that was cut off, as Anthropic's client does for streams.
    Return {} for text that is no JSON object."""
    try:
        arguments = ARGUMENTS.validate_json(text, experimental_allow_partial=True)
        json.dumps(arguments, allow_nan=False)  # refuses infinities: 1e999 is parsed as one, and JSON has none
    except ValueError:
        return {}
    return arguments


def read_string(given: Mapping[str, Any], name: str, at: str, param: str) -> str:
    """Return the string `name` of the object at the path `at`. Raise InputError about the field `param` if there is
    none."""
    value = given.get(name)
    if not isinstance(value, str):
        raise InputError(f"{at}.{name} must be a string, got {short_repr(value)}", param)
    return value


def check_choice(value: Any, choices: Collection[str], at: str, param: str) -> None:
    """Raise InputError about the field `param` if the value at the path `at` is not one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{at} must be one of {', '.join(choices)}, got {short_repr(value)}", param)


def check_kind(given: Any, known: Collection[str], at: str, param: str, where: str = "") -> str:
    """Return the type of a part or item at the path `at`. Raise InputError about the field `param` if it is not one of
    the `known` ones."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        raise InputError(f"{at}.type is {short_repr(kind)}; {', '.join(known)} are supported{where}", param)
    return kind


class SharedChatFields(SharedFields):
    """Fields that mean the same as in a chat request."""

    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = ranged_field(0, 2**31 - 1)
    include_reasoning: bool | None = None

    def chat_fields(self) -> Json:
        """Return the values of these fields, by name."""
        return {name: getattr(self, name) for name in SharedChatFields.model_fields}


class Conversation:
    """The messages of a chat. `client_paths` maps the path of a part as the chat's errors name it, such as
    messages[0].content[1], to the client's path."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.client_paths: dict[str, str] = {}

    def append(self, at: str, message: Json) -> None:
        """Append a message that is at the path `at` of the client's request."""
        self.client_paths[f"messages[{len(self.messages)}]"] = at
        self.messages.append(message)

    def add_call(self, at: str, id: str | None, name: str, arguments: Any) -> None:
        """Append a tool call, which is at the path `at`, to the last message."""
        calls = self.last().setdefault("tool_calls", [])
        self.client_paths[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = at
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def last(self) -> Json:
        """Return the last message, or {} if there is none."""
        return self.messages[-1] if self.messages else {}


class ClientNames(NamedTuple):
    """The names that a route's clients use. `messages_field` is the field that holds the conversation. `field_names`
    maps fields of chats to the client's fields where the names differ. `message_replacements` maps a field of chats to
    (old, new) pairs of text, which are replaced in errors about that field."""

    route: str
    messages_field: str
    field_names: Mapping[str, str]
    message_replacements: Mapping[str, tuple[tuple[str, str], ...]] = {}

    def check_fields(self, given: Mapping[str, Any], known: Collection[str], more: Collection[str] = ()) -> Json:
        """Return the fields of `given` that are unknown to all APIs. Raise InputError for a field that is set and is a
        field of chats, or one of `more`, but not one of the route's `known` fields."""
        others = (ChatRequest.model_fields.keys() | REFUSED_FIELDS | {*more}) - {*known}
        for name, value in given.items():
            if name in others and value not in EMPTY_VALUES:
                other = f": it is {self.field_names[name]} here" if name in self.field_names else ""
                raise InputError(f"{name} is not supported in {self.route}{other}", name)
        return {name: value for name, value in given.items() if name not in others}

    @contextmanager
    def rename_errors(self, conversation: Conversation) -> Iterator[None]:
        """Return a context manager in which errors about a chat are raised with the client's names."""
        try:
            yield
        except UnknownField:
            raise
        except InputError as error:
            param = error.param or ""
            field = re.split(r"[.\[]", param)[0]
            name = self.messages_field if field in ("prompt", "messages") else self.field_names.get(field, param)
            text = CHAT_PATH.sub(lambda match: self._client_path(conversation, match[0]), str(error))
            for old, new in self.message_replacements.get(
                field, ((field, name),) if name != param and field != "prompt" else ()
            ):
                text = text.replace(old, new)
            error.args, error.param = (text,), name or None
            raise

    def rename_warnings(self, generation: Generation, conversation: Conversation) -> Generation:
        """Return the request with the client's names in its warnings, which concern tools, and in the notes on its
        prompt, which concern messages."""
        warnings = [self._rename(text, conversation, "tools") for text in generation.warnings]
        [prompt] = generation.prompts
        notes = tuple(self._rename(note, conversation, "messages") for note in prompt.notes)
        return generation._replace(warnings=warnings, prompts=[prompt._replace(notes=notes)])

    def _rename(self, text: str, conversation: Conversation, field: str) -> str:
        """Return `text`, which concerns a field of chats, with the client's names."""
        text = CHAT_PATH.sub(lambda match: self._client_path(conversation, match[0]), text)
        for old, new in self.message_replacements.get(field, ()):
            text = text.replace(old, new)
        return text

    def _client_path(self, conversation: Conversation, at: str) -> str:
        """Return the client's path of the part of the conversation that the chat calls `at`."""
        [message] = MESSAGE_PATH.findall(at)
        return conversation.client_paths.get(at) or conversation.client_paths.get(
            message, self.messages_field
        ) + at.removeprefix(message)
