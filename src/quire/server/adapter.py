"""What other APIs' requests have in common that are answered by the chat's path: fields that mean the same there, where
the messages of the chat come from, and the chat's errors in the names that the client knows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from pydantic import TypeAdapter, WithJsonSchema

from quire.errors import InputError
from quire.server.request_models import (
    EMPTY_VALUES,
    LOGIT_BIAS_SCHEMA,
    REFUSED_FIELDS,
    ChatRequest,
    Ids,
    RequestFields,
    Strings,
    ranged_field,
)

Json = dict[str, Any]
ARGUMENTS = TypeAdapter(Json)
CHAT_PATH = re.compile(r"messages\[\d{1,9}\](?:\.(?:content|tool_calls)\[\d{1,9}\])?")
MESSAGE_PATH = re.compile(r"messages\[\d{1,9}\]")


def parse_partial_arguments(text: str) -> Json:
    """The object that JSON is, or as much of it as there is where it was cut: what Anthropic's client makes of a
    stream. Empty for what is no object, or no JSON."""
    try:
        found = ARGUMENTS.validate_json(text, experimental_allow_partial=True)
        json.dumps(found, allow_nan=False)  # there are no infinities in JSON, but 1e999 is one once it is read
    except ValueError:
        return {}
    return found


class SharedChatFields(RequestFields):
    """Fields that mean what they mean in chats."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = ranged_field(0, 100)
    top_p: float | None = ranged_field(0, 1)
    top_k: int | None = ranged_field(-1)
    min_p: float | None = ranged_field(0, 1)
    presence_penalty: float | None = ranged_field(-2, 2)
    frequency_penalty: float | None = ranged_field(-2, 2)
    repetition_penalty: float | None = ranged_field(0.01, 100)
    seed: int | None = ranged_field(-(2**63), 2**63 - 1)
    stop_token_ids: Ids | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Ids | None = ranged_field(minItems=1)
    logit_bias: Annotated[dict[str, Any] | None, WithJsonSchema(LOGIT_BIAS_SCHEMA)] = None
    ignore_eos: bool | None = None
    min_tokens: int | None = ranged_field(0)
    skip_special_tokens: bool | None = None
    cache_salt: str | None = ranged_field(minLength=1)
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = ranged_field(0, 2**31 - 1)
    include_reasoning: bool | None = None

    def chat_fields(self) -> Json:
        """These fields, as a chat has them."""
        return {name: getattr(self, name) for name in SharedChatFields.model_fields}


class Conversation:
    """Messages of a chat. `client_paths`: by a place in them, as the chat's errors have it, what the client calls "
    "it."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.client_paths: dict[str, str] = {}

    def append(self, at: str, message: Json) -> None:
        """One more message, which the client gave at the place `at`."""
        self.client_paths[f"messages[{len(self.messages)}]"] = at
        self.messages.append(message)

    def last(self) -> Json:
        """The last message, if there is one."""
        return self.messages[-1] if self.messages else {}


class ClientNames(NamedTuple):
    """What a route's clients call things: `messages_field` is the field that has the conversation; `field_names` are
    what the chat's fields are called there, if they are called otherwise; `message_replacements` what is written
    otherwise in the errors about one."""

    route: str
    messages_field: str
    field_names: Mapping[str, str]
    message_replacements: Mapping[str, tuple[tuple[str, str], ...]] = {}

    def check_fields(self, given: Mapping[str, Any], known: Collection[str], more: Collection[str] = ()) -> Json:
        """InputError for a field of chats, or one of `more`, that isn't `known` to the route and asks for something.
        What nobody knows."""
        others = (ChatRequest.model_fields.keys() | REFUSED_FIELDS | {*more}) - {*known}
        for name, value in given.items():
            if name in others and value not in EMPTY_VALUES:
                other = f": it is {self.field_names[name]} here" if name in self.field_names else ""
                raise InputError(f"{name} is not supported in {self.route}{other}", name)
        return {name: value for name, value in given.items() if name not in others}

    @contextmanager
    def rename_errors(self, conversation: Conversation) -> Iterator[None]:
        """Within, errors about a chat say what the client calls it."""
        try:
            yield
        except InputError as error:
            theirs = error.param or ""
            field = re.split(r"[.\[]", theirs)[0]
            name = self.messages_field if field in ("prompt", "messages") else self.field_names.get(field, theirs)
            text = CHAT_PATH.sub(lambda found: self._client_path(conversation, found[0]), str(error))
            for old, new in self.message_replacements.get(
                field, ((field, name),) if name != theirs and field != "prompt" else ()
            ):
                text = text.replace(old, new)
            error.args, error.param = (text,), name or None
            raise

    def rename_warnings(self, warnings: Sequence[str]) -> list[str]:
        """What an answer warns of about tools, with what the client calls them."""
        found = list(warnings)
        for old, new in self.message_replacements.get("tools", ()):
            found = [text.replace(old, new) for text in found]
        return found

    def _client_path(self, conversation: Conversation, at: str) -> str:
        """What the client calls the place `at` of the conversation."""
        [message] = MESSAGE_PATH.findall(at)
        return conversation.client_paths.get(at) or conversation.client_paths.get(
            message, self.messages_field
        ) + at.removeprefix(message)
