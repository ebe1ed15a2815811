"""What users give, as token ids: strings, ids, messages; and parameters completed by the model's own defaults.

The edge that LLM, AsyncLLM and the server share. Bad input ends here as InputError, before anything is queued.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config import EngineConfig
from quire.errors import InputError, PromptTooLong
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.build import Built

INLINE_CHARS = 4096  # text longer than this is worth another thread, where an event loop would wait
CHARS_PER_TOKEN = 32  # text longer than so many characters for each token that fits is refused before tokenising
PREFIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

Messages = Sequence[Mapping[str, Any]]


class Prompt(NamedTuple):
    """A prompt as text, when it was given so, and as token ids."""

    text: str | None
    ids: list[int]


def engine_config(model: str | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration for `model`: a folder, a hub id, or None or "" for the bundled one."""
    return EngineConfig(model=model or "", **settings)


class Prompts:
    """Prompts and parameters for one model. `max_len` bounds the prompt; see Built for the rest."""

    def __init__(self, built: Built) -> None:
        self.tokenizer, self.chat_template = built.tokenizer, built.chat
        self._text = built.engine.text
        self.max_len = built.engine.limits.max_len
        names = {field.name for field in fields(SamplingParams)}
        self.defaults = {name: value for name, value in built.defaults.items() if name in names}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. InputError without a tokenizer, PromptTooLong for text that can't fit."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer: give prompts as token ids", "prompt")
        if len(text) > CHARS_PER_TOKEN * self.max_len:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, but at most {CHARS_PER_TOKEN * self.max_len} "
                f"are read for {self.max_len} tokens",
                "prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode_token(self, token: int) -> str:
        """A token as text, for log-probabilities."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.convert_id(token)

    def prompt(self, given: Any, add_special_tokens: bool = True) -> Prompt:
        """A prompt given as a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
        if isinstance(given, Mapping):
            given = given.get("prompt_token_ids", given.get("prompt"))
        if isinstance(given, str):
            return Prompt(given, self.encode(given, add_special_tokens))
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InputError(
                f"a prompt is a string, a list of token ids or a dict with one of these, got {type(given).__name__}",
                "prompt",
            )
        return Prompt(None, list(given))

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, str]] | None = None,
        **kwargs: Any,
    ) -> Prompt:
        """A conversation, rendered by the model's chat template. The template adds the special tokens itself."""
        if self.chat_template is None:
            raise InputError("this model has no chat template: use completions, or start with --chat-template", "model")
        text = self.chat_template.render(messages, add_generation_prompt, continue_final_message, documents, **kwargs)
        return Prompt(text, self.encode(text, add_special_tokens=False))

    def prefix(self, name: str, given: Any) -> list[int]:
        """Token ids of a prefix to register as `name`: a string or token ids. InputError for a bad name too."""
        if not isinstance(name, str) or not PREFIX_NAME.fullmatch(name):
            raise InputError(
                f"a prefix's name has 1 to 64 letters, digits, '.', '_' or '-', got {str(name)[:60]!r}", "name"
            )
        return self.prompt(given).ids

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` as the engine needs them: bad words as token ids, stop strings compiled. It costs what they are
        long, so it is done here and not on the engine's thread. InputError for words that can't be banned."""
        return params if self._text is None else self._text.resolve(params)

    def params(self, **given: Any) -> SamplingParams:
        """Parameters: what is `given`, else the model's defaults (generation_config.json), else SamplingParams'."""
        return SamplingParams(**{**self.defaults, **given})
