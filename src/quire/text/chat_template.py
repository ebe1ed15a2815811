"""Chat templates: convert messages to one prompt string.

Templates run sandboxed and bounded in a process of their own (template_process.py). Invalid messages and errors of a
template are InputErrors.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import InputError, StartupError, short_repr
from quire.files import MAX_BYTES_BY_FILE, find_checkpoint_file, read_bounded_text
from quire.text.chat_messages import (
    ContentFormats,
    ParsedMessages,
    append_mark,
    read_messages,
    to_template_messages,
)
from quire.text.images.processor import ImageProcessor
from quire.text.template_fit import TemplateTraits, fit_messages, is_plain, probe_traits
from quire.text.template_process import RenderError, RenderTimeout, TemplateProcess
from quire.text.tokenizer_files import special_tokens, tokenizer_config
from quire.text.tools import JsonCopier, Tool

MAX_DOCUMENTS = 1024
MAX_DOCUMENT_ENTRIES = 64  # of a document
MAX_VALUES, MAX_DEPTH = 4096, 16  # of the variables that a request sets
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # end of the message to continue, as in transformers
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
NO_DEFAULT = ("The model has chat templates, but no default one", "Give one: --chat-template")
MAX_LATE_PROBES = 8  # renders of probes that exceed their time, until what they show is taken as it is
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
        self._traits: TemplateTraits | None = None
        self._late_probes = 0
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
        return self.render_parsed(read_messages(messages), None, add_generation_prompt, **options)

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
        """Return the prompt. The conversation is converted to what the template can express (template_fit.py).
        `kwargs` may set the template's other `variables`, with plain JSON values; other names have no effect, as in
        vLLM.

        With `continue_final_message`, which excludes `add_generation_prompt`, the prompt ends within the last message.
        Raise InputError for invalid arguments, for errors of the template and for exceeded limits."""
        if documents is not None and "documents" not in self._read_variables:
            raise InputError("the chat template does not use documents: put them into a message", "documents")
        copier = JsonCopier("chat template variables", "chat_template_kwargs", MAX_VALUES, MAX_DEPTH)
        known = {name: value for name, value in kwargs.items() if name in self.variables}
        variables = {name: copier.copy(value, f"chat template variables: {name}") for name, value in known.items()}
        variables = {**self.special_tokens, **variables}
        messages, takes_tools = conversation.messages, "tools" in self._read_variables
        if tools or not is_plain(messages):
            messages = fit_messages(messages, self.traits(processor), None if takes_tools else tools)
        entries = [tool.definition for tool in tools] or None if takes_tools else None
        formatted = self._format(messages, processor)
        variables |= {"messages": formatted, "tools": entries, "documents": _documents(documents)}
        variables["add_generation_prompt"] = bool(add_generation_prompt)
        if not continue_final_message:
            return self._run(variables)
        if add_generation_prompt:
            raise InputError("continue_final_message needs add_generation_prompt to be false", "continue_final_message")
        final_text = append_mark(formatted, CONTINUE_MARK)
        return _cut_at_mark(self._run(variables) if "content" in self.source else "", final_text)

    def _format(self, messages: list[dict[str, Any]], processor: ImageProcessor | None) -> list[dict[str, Any]]:
        """Return the messages in the content format that the template takes."""
        if processor is None:
            return [dict(message) for message in messages]
        return to_template_messages(messages, self.content_formats(), processor.placeholder_text)

    def traits(self, processor: ImageProcessor | None) -> TemplateTraits:
        """Return what the template can express, tested once, or again after a probe was late."""
        if self._traits is not None:
            return self._traits
        late_before = self._late_probes
        traits = probe_traits(
            self.source,
            lambda messages, tools: self._probe(self._format([*messages], processor), tools),
        )
        if self._is_final(late_before):
            self._traits = traits
        return traits

    def _is_final(self, late_before: int) -> bool:
        """Return True if the result of probes is kept: none of them was late, or MAX_LATE_PROBES were before. Before
        them `late_before` probes were."""
        return late_before in (self._late_probes, MAX_LATE_PROBES)

    def _probe(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = ()) -> str | None:
        """Return the prompt of messages, or None if the template fails. Count it as late if it exceeds its time."""
        entries = [tool.definition for tool in tools] or None
        variables = {**self.special_tokens, "messages": messages, "tools": entries, "documents": None}
        try:
            return self._run({**variables, "add_generation_prompt": False})
        except InputError as error:
            if isinstance(error.__cause__, RenderTimeout):
                self._late_probes = min(self._late_probes + 1, MAX_LATE_PROBES)
            return None

    def content_formats(self) -> ContentFormats:
        """Return the content formats that the template takes, tested as traits are: some only take lists of parts, and
        drop strings."""
        if self._content_formats is not None:
            return self._content_formats
        late_before, parts = self._late_probes, [{"type": "image"}, {"type": "text", "text": PROBE_TEXT}]
        formats = ContentFormats(self._accepts_content(PROBE_TEXT), self._accepts_content(parts))
        if self._is_final(late_before):
            self._content_formats = formats
        return formats

    def _accepts_content(self, content: Any) -> bool:
        text = self._probe([{"role": "user", "content": content}]) or ""
        return PROBE_TEXT in text and "'type'" not in text  # else it printed the parts as a Python list

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
        """Return a model folder's template, or None if there is none: the operator's file `override`, else
        chat_template.jinja, else that of chat_template.json (a processor's), else that of tokenizer_config.json. Of
        several named templates, `tool_use` is for requests with tools and `default` for others. Those two names are
        looked for in additional_chat_templates/ as well."""
        folder, remedy, most = Path(folder), "Give --chat-template a UTF-8 file", MAX_BYTES_BY_FILE["chat template"]
        config = tokenizer_config(folder)
        if override is not None:
            if not os.path.lexists(override):
                raise StartupError(f"There is no chat template {override}", "Give --chat-template a file")
            sources = {DEFAULT: read_bounded_text(override, most, f"the chat template {override}", remedy)}
        else:

            def read(name: str) -> str | None:
                file = find_checkpoint_file(folder, name)
                what = f"{name} of {folder}"
                return None if file is None else read_bounded_text(file, most, what, remedy, follow=False)

            source = read("chat_template.jinja")
            if source is None and (text := read("chat_template.json")) is not None:
                source = _parse_template_file(text).get("chat_template")
            sources = _read_sources(config.get("chat_template") if source is None else source)
            for name in (DEFAULT, TOOL_USE):
                if (named := read(f"additional_chat_templates/{name}.jinja")) is not None:
                    sources.setdefault(name, named)
        if not sources:
            return None
        if DEFAULT not in sources:
            raise StartupError(*NO_DEFAULT)
        return cls(_combine_sources(sources), special_tokens(config), process=process)


def _cut_at_mark(rendered: str, final: str) -> str:
    """Return `rendered` up to CONTINUE_MARK, which follows the last message. The position is found as in
    transformers."""
    if final.strip() not in rendered or CONTINUE_MARK.strip() not in rendered:
        cause = "the last message does not appear in the chat template's output as it is, so it can't be continued"
        raise InputError(cause, "continue_final_message")
    at = rendered.rindex(CONTINUE_MARK.strip())
    is_whole = rendered[at:].startswith(CONTINUE_MARK)  # else the template strips messages
    return rendered[:at] if is_whole else rendered[:at].rstrip()


def _parse_template_file(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"chat_template.json is no JSON: {str(error)[:80]}", "Give one: --chat-template") from error
    return value if isinstance(value, dict) else {"chat_template": value}


def _read_sources(value: Any) -> dict[str, str]:
    """Return the sources of templates by name. `value` is one source, or a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return {DEFAULT: value} if value else {}
    entries = value if isinstance(value, list) else []
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if len(named) == 1:  # the only one is the default, whatever its name
        named = {DEFAULT: next(iter(named.values()))}
    if not isinstance(named.get(DEFAULT), str):
        raise StartupError(*NO_DEFAULT)
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _combine_sources(sources: Mapping[str, str]) -> str:
    """Return one template for requests with tools and without. The empty outputs protect white space at the ends of
    the sources from Jinja's trimming around tags."""
    if TOOL_USE not in sources:
        return sources[DEFAULT]
    tool_use, default = (sources[name].removesuffix("\n") for name in (TOOL_USE, DEFAULT))
    empty = "{{ '' }}"
    return f"{{% if tools %}}{empty}{tool_use}{empty}{{% else %}}{empty}{default}{empty}{{% endif %}}"


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
