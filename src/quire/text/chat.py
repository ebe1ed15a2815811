"""Chat templates: messages in, one prompt string out.

Rendering is sandboxed and bounded (sandbox.py); bad messages and a template's own complaints are InputErrors.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta

from quire.errors import InputError, StartupError
from quire.text.folder import special_tokens, tokenizer_config
from quire.text.sandbox import Budget, Sandbox

MAX_MESSAGES = 1024
MAX_PARTS = 1024
MAX_SOURCE = 1 << 20
MAX_VALUES = 4096
FIELDS = ("role", "content", "name", "reasoning_content", "tool_call_id")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ChatTemplate:
    """A compiled template. `special` are variables it may use ("bos_token", ...). StartupError when it can't compile.

    `max_bytes` bounds the prompt's UTF-8 length, `max_seconds` a render's wall clock. One render runs at a time.
    """

    def __init__(
        self, source: str, special: Mapping[str, str], *, max_bytes: int = 1 << 20, max_seconds: float = 1.0
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise StartupError(f"The chat template has {len(source)} characters", f"The limit is {MAX_SOURCE}")
        self.source = source
        self.special = dict(special)
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self._sandbox = Sandbox()
        self._lock = threading.Lock()
        try:
            self._template: Template = self._sandbox.from_string(source)
            read = meta.find_undeclared_variables(self._sandbox.parse(source))
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
            reason = str(error)[:200]
            raise StartupError(f"The chat template can't be compiled: {reason}", "Give one: --chat-template") from error
        self.variables = frozenset(read) - {*RESERVED, *self._sandbox.globals, *self.special}

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt. `kwargs` may set the variables that the template itself reads (`variables`): plain JSON values.

        Text parts of one message are joined by newlines. InputError says what is wrong with messages or kwargs, what
        the template raised, or which bound was met."""
        checked = _messages(messages)
        for name in kwargs:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise InputError(
                    f"the chat template has no variable {name[:60]!r} to set; it has: {known[:200]}",
                    "chat_template_kwargs",
                )
        values = dict(zip(kwargs, _plain(list(kwargs.values()))))
        variables = {**self.special, **values, "messages": checked, "tools": None, "documents": None}
        with self._lock:
            self._sandbox.budget = Budget(self.max_seconds)
            try:
                return "".join(self._chunks({**variables, "add_generation_prompt": bool(add_generation_prompt)}))
            except InputError:
                raise
            except Exception as error:  # a template is a program: it may fail in any way
                reason = str(error) or type(error).__name__
                raise InputError(f"chat template: {reason[:200]}", "messages") from error

    def _chunks(self, variables: dict[str, Any]) -> Iterator[str]:
        size = 0
        for chunk in self._template.generate(variables):
            self._sandbox.budget.tick()
            size += len(chunk) if chunk.isascii() else len(chunk.encode("utf-8", "surrogatepass"))
            if size > self.max_bytes:
                raise InputError(f"the chat's prompt may have at most {self.max_bytes} bytes", "messages")
            yield chunk

    @classmethod
    def find(cls, folder: Path, override: str | None = None) -> ChatTemplate | None:
        """A model folder's template: the operator's file `override`, else chat_template.jinja, else what
        tokenizer_config.json holds (of several, the one named "default"); None when there is none."""
        config = tokenizer_config(Path(folder))
        file = Path(override) if override is not None else Path(folder) / "chat_template.jinja"
        if override is not None and not file.is_file():
            raise StartupError(f"There is no chat template {override}", "Give --chat-template a file")
        source = _read(file) if file.is_file() else _configured(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens(config))


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * MAX_SOURCE:
            raise StartupError(f"{file} is larger than a chat template may be", f"The limit is {MAX_SOURCE} characters")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{file} can't be read: {str(error)[:200]}", "Give --chat-template a UTF-8 file") from error


def _configured(value: Any) -> str | None:
    """The source in tokenizer_config.json: a string, or a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value or None
    entries = value if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    source = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if not isinstance(source, str):
        raise StartupError("tokenizer_config.json has chat templates, but no default one", "Give one: --chat-template")
    return source


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InputError(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", "messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(at: str, message: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InputError(f"{at} must be an object, got {type(message).__name__}", "messages")
    said = {name: value for name, value in message.items() if value is not None and value not in ([], ())}
    if unknown := [str(name) for name in said if name not in FIELDS]:
        raise InputError(f"{at} has an unsupported field {unknown[0][:60]!r}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InputError(f"{at}.role must be a word of 1 to 64 letters, digits, - or _", "messages")
    checked = {"role": role, "content": _content(f"{at}.content", message.get("content"))}
    for name in FIELDS[2:]:
        value = said.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{at}.{name} must be a string, got {type(value).__name__}", "messages")
        if value is not None:
            checked[name] = value
    return checked


def _content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InputError(f"{at} must be a string or a list of text parts, got {type(content).__name__}", "messages")
    if not 1 <= len(content) <= MAX_PARTS:
        raise InputError(f"{at} must have 1 to {MAX_PARTS} parts, got {len(content)}", "messages")
    return "\n".join(_part(f"{at}[{i}]", part) for i, part in enumerate(content))


def _part(at: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InputError(f'{at} must be an object like {{"type": "text", "text": ...}}', "messages")
    if kind != "text":
        raise InputError(f"{at} has the type {kind[:60]!r}; only 'text' is supported", "messages")
    if not isinstance(part.get("text"), str):
        raise InputError(f"{at}.text must be a string, got {type(part.get('text')).__name__}", "messages")
    return str(part["text"])


def _plain(values: list[Any]) -> list[Any]:
    """A bounded copy made of JSON's types only, so that a template meets no object with methods of its own."""
    left = MAX_VALUES

    def copy(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > 16:
            raise InputError(
                f"chat template variables may hold {MAX_VALUES} values, 16 levels deep", "chat_template_kwargs"
            )
        if value is None or type(value) in (str, bool, int):
            return value
        if type(value) is float and math.isfinite(value):
            return value
        if type(value) is list:
            return [copy(item, depth + 1) for item in value]
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: copy(item, depth + 1) for key, item in value.items()}
        raise InputError(
            f"chat template variables must be JSON values, got {type(value).__name__}", "chat_template_kwargs"
        )

    return [copy(value, 0) for value in values]
