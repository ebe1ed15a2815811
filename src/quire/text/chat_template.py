"""Chat templates: convert messages to one prompt string.

Templates run sandboxed and bounded in a process of their own (template_process.py). Invalid messages and errors of a
template are InputErrors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import InputError, StartupError, short_repr
from quire.files import MAX_BYTES_BY_FILE, find_checkpoint_file, read_bounded_text
from quire.text.chat_messages import ContentFormats, ParsedMessages, append_mark, read_messages
from quire.text.images.processor import ImageProcessor
from quire.text.template_process import RenderError, TemplateProcess
from quire.text.tokenizer_files import special_tokens, tokenizer_config
from quire.text.tools import JsonCopier, Tool, describe_tools_in_prompt

MAX_DOCUMENTS = 1024
MAX_DOCUMENT_ENTRIES = 64  # of a document
MAX_VALUES, MAX_DEPTH = 4096, 16  # of the variables that a request sets
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # end of the message to continue, as in transformers
PROBE_TEXT = "quire tries out this template"


class ChatTemplate:
    """A compiled template. `special_tokens` are variables that it may use ("bos_token", ...). Raises StartupError if it
    does not compile.

    `max_bytes` limits the prompt's UTF-8 length, `max_seconds` the wall-clock time of a render. One render runs at a
    time, in the process of `process`, which may still be starting.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_bytes: int = 1 << 20,
        max_seconds: float = 1.0,
        process: TemplateProcess | None = None,
    ) -> None:
        size, most = len(source.encode("utf-8", "surrogatepass")), MAX_BYTES_BY_FILE["chat template"]
        if size > most:
            raise StartupError(f"The chat template has {size} bytes", f"The limit is {most}. Give one: --chat-template")
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self._process = process or TemplateProcess()
        self._content_formats: ContentFormats | None = None
        try:
            self._read_variables = frozenset(self._process.compile(source))
        except RenderError as error:
            self.close()
            raise StartupError(f"The chat template can't be compiled: {error}", "Give one: --chat-template") from error

    @property
    def variables(self) -> frozenset[str]:
        """The variables that a request may set."""
        return self._read_variables - {*RESERVED_VARIABLES, *self.special_tokens}

    def with_special_tokens(self, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Return the same template, in the same process, with other special tokens."""
        other = copy.copy(self)
        other.special_tokens = dict(special_tokens)
        return other

    def close(self) -> None:
        """End the template's process. It also ends with the last ChatTemplate that uses it."""
        self._process.close()

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any) -> str:
        """Return the prompt of messages without images; see `render_parsed`, which takes `options`."""
        conversation = read_messages(messages)
        if "tools" in options:  # `render_parsed` takes them parsed
            self._check_variable("tools", "chat_template_kwargs")
        return self.render_parsed(conversation, None, add_generation_prompt, **options)

    def render_parsed(
        self,
        conversation: ParsedMessages,
        processor: ImageProcessor | None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, str]] | None = None,
        tools: Sequence[Tool] = (),
        **kwargs: Any,
    ) -> str:
        """Return the prompt. If the template does not use `tools`, they go into the system message. `kwargs` may set
        the template's other `variables`, with plain JSON values.

        With `continue_final_message`, which excludes `add_generation_prompt`, the prompt ends within the last message.
        Raise InputError for invalid arguments, for errors of the template and for exceeded limits."""
        if documents is not None:
            self._check_variable("documents", "documents")
        for name in kwargs:
            self._check_variable(name, "chat_template_kwargs")
        copier = JsonCopier("chat template variables", "chat_template_kwargs", MAX_VALUES, MAX_DEPTH)
        variables = {name: copier.copy(value, f"chat template variables: {name}") for name, value in kwargs.items()}
        variables = {**self.special_tokens, **variables}
        if "tools" not in self._read_variables:
            messages, tools = describe_tools_in_prompt(conversation.messages, tools), ()
            conversation = conversation._replace(messages=messages)
        checked = conversation.messages
        if processor is not None:
            checked = conversation.to_template_messages(self.content_formats(), processor.placeholder_text)
        entries = [tool.definition for tool in tools] or None
        variables |= {"messages": checked, "tools": entries, "documents": _documents(documents)}
        variables["add_generation_prompt"] = bool(add_generation_prompt)
        if not continue_final_message:
            return self._run(variables)
        if add_generation_prompt:
            raise InputError("continue_final_message needs add_generation_prompt to be false", "continue_final_message")
        final_text = append_mark(checked, CONTINUE_MARK)
        return _cut_at_mark(self._run(variables) if "content" in self.source else "", final_text)

    def content_formats(self) -> ContentFormats:
        """Return the content formats that the template takes, tested once: some only take lists of parts, and drop
        strings."""
        if self._content_formats is None:
            parts = [{"type": "image"}, {"type": "text", "text": PROBE_TEXT}]
            self._content_formats = ContentFormats(self._accepts_content(PROBE_TEXT), self._accepts_content(parts))
        return self._content_formats

    def _accepts_content(self, content: Any) -> bool:
        variables = {**self.special_tokens, "messages": [{"role": "user", "content": content}], "tools": None}
        try:
            text = self._run({**variables, "documents": None, "add_generation_prompt": False})
        except InputError:
            return False
        return PROBE_TEXT in text and "'type'" not in text  # else it printed the parts as a Python list

    def _check_variable(self, name: str, param: str) -> None:
        if name not in (self._read_variables if param == "documents" else self.variables):
            known = ", ".join(sorted(self.variables)) or "none"
            raise InputError(f"the chat template has no variable {name[:60]!r} to set; it has: {known[:200]}", param)

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            text = self._process.render(variables, self.max_seconds, self.max_bytes)
        except RenderError as error:
            raise InputError(f"chat template: {error}", "messages") from error
        if text is None:
            raise InputError(f"the chat's prompt may have at most {self.max_bytes} bytes", "messages")
        return text

    @classmethod
    def find(
        cls, folder: Path, override: str | None = None, process: TemplateProcess | None = None
    ) -> ChatTemplate | None:
        """Return a model folder's template: the operator's file `override`, else chat_template.jinja, else the one in
        tokenizer_config.json (of several, "default"); None if there is none."""
        folder, remedy, most = Path(folder), "Give --chat-template a UTF-8 file", MAX_BYTES_BY_FILE["chat template"]
        config = tokenizer_config(folder)
        if override is not None:
            if not os.path.lexists(override):
                raise StartupError(f"There is no chat template {override}", "Give --chat-template a file")
            source: str | None = read_bounded_text(override, most, f"the chat template {override}", remedy)
        elif file := find_checkpoint_file(folder, "chat_template.jinja"):
            source = read_bounded_text(file, most, f"the chat template of {folder}", remedy, follow=False)
        else:
            source = _template_from_config(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens(config), process=process)


def _cut_at_mark(rendered: str, final: str) -> str:
    """Return `rendered` up to CONTINUE_MARK, which follows the last message. The position is found as in
    transformers."""
    if final.strip() not in rendered or CONTINUE_MARK.strip() not in rendered:
        cause = "the last message does not appear in the chat template's output as it is, so it can't be continued"
        raise InputError(cause, "continue_final_message")
    at = rendered.rindex(CONTINUE_MARK.strip())
    is_whole = rendered[at:].startswith(CONTINUE_MARK)  # else the template strips messages
    return rendered[:at] if is_whole else rendered[:at].rstrip()


def _template_from_config(value: Any) -> str | None:
    """Return the source in tokenizer_config.json: a string, or a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value or None
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    wanted = [entry for entry in entries if entry.get("name") == "default"] or entries
    source = wanted[-1].get("template") if wanted and (len(entries) == 1 or wanted is not entries) else None
    if not isinstance(source, str):
        raise StartupError("tokenizer_config.json has chat templates, but no default one", "Give one: --chat-template")
    return source


def _documents(documents: Any) -> list[dict[str, str]] | None:
    if documents is None:
        return None
    if not isinstance(documents, list | tuple) or len(documents) > MAX_DOCUMENTS:
        raise InputError(f"documents must be a list of at most {MAX_DOCUMENTS} objects", "documents")
    for i, document in enumerate(documents):
        if not isinstance(document, Mapping) or len(document) > MAX_DOCUMENT_ENTRIES:
            raise InputError(f"documents[{i}] must be an object of at most {MAX_DOCUMENT_ENTRIES} strings", "documents")
        for name, value in document.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InputError(f"documents[{i}] has {short_repr(name)}: {short_repr(value)}, no string", "documents")
    return [dict(document) for document in documents]
