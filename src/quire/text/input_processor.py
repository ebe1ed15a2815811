"""Conversion of user input (strings, ids, messages) to token ids, and of parameters with the model's defaults.

LLM, AsyncLLM and the server share it. Invalid input raises InputError here, before anything is queued.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quire.config import EngineConfig, parse_speculative_config
from quire.core.validation import EngineLimits, check_salt
from quire.errors import InputError, StartupError, input_error_at
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.text.bounded_threads import BoundedThreads
from quire.text.chat_messages import ImageSource, read_messages
from quire.text.images.loader import ImageLoader, merge_adjacent, split_multi_modal
from quire.text.images.processor import TOKEN_ESCAPE, escape_image_tokens, escape_image_tokens_in_json
from quire.text.tools import Tool, read_tools

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from quire.text.chat_template import ChatTemplate
    from quire.text.grammars.compiler import GrammarCompiler
    from quire.text.text_backend import TextBackend
    from quire.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # longer text is processed on another thread, off the event loop
LONG_CHARS = 100_000  # longer text uses threads of its own, so that chats do not wait for it
LONG_THREADS = 2
GRAMMAR_THREADS = 2
MAX_WAITING = 256  # conversations that wait for the chat template, and forms that wait for grammars
CHARS_PER_TOKEN = 32  # longer text than this per token of max_len is refused before it is tokenized
PREFIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class Prompt(NamedTuple):
    """A prompt: its text if given as text, its token ids, its images, and the encoder's input of each. `notes` name the
    parts of a conversation that were dropped or changed."""

    text: str | None
    ids: list[int]
    images: tuple[ImageItem, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()
    notes: tuple[str, ...] = ()


class PromptTruncation(NamedTuple):
    """Truncation of a prompt to its last `max_tokens` tokens, or with `keep_first` to its first ones."""

    max_tokens: int
    keep_first: bool = False

    def apply(self, prompt: Prompt) -> Prompt:
        """Return the truncated prompt. If tokens are removed, it has no text."""
        if len(prompt.ids) <= self.max_tokens:
            return prompt
        if prompt.images:
            raise InputError("a prompt with images can't be truncated", "truncate_prompt_tokens")
        return Prompt(None, prompt.ids[: self.max_tokens] if self.keep_first else prompt.ids[-self.max_tokens :])


CONFIG_ALIASES = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "enable_expert_parallel": "expert_parallel",
}  # fmt: skip


def engine_config(model: str | None, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration for `model`: a folder, a hub id, or None or "" for the bundled model. Parallel sizes may
    have vLLM's names, and speculative_config may be an object of vLLM's form (see parse_speculative_config)."""
    named = {CONFIG_ALIASES.get(name, name): value for name, value in settings.items()}
    if len(named) < len(settings):
        raise StartupError(
            "a setting is given by two names", f"Give one of {', '.join(map(': '.join, CONFIG_ALIASES.items()))}"
        )
    if (speculative := named.pop("speculative_config", None)) is not None:
        given = parse_speculative_config(speculative, named.get("tp", 1))
        if twice := next((name for name in given if name in named), None):
            raise StartupError(f"speculative_config and {twice} are both given", "Give one of them")
        named |= given
    return EngineConfig.of(model=model or "", **named)


class InputProcessor:
    """Prepares prompts and parameters for one model. `limits` are its engine's; `defaults` are the sampling parameters
    of generation_config.json; `image_loader` is for vision models."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        limits: EngineLimits,
        defaults: Mapping[str, Any],
        image_loader: ImageLoader | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """`eos_ids` are the model's end tokens if they differ from the tokenizer's."""
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.limits, self.image_loader = limits, image_loader
        self.text_backend = _make_text_backend(tokenizer, limits.vocab_size, eos_ids)
        names = {field.name for field in fields(SamplingParams)}
        self.defaults = {name: value for name, value in defaults.items() if name in names}
        self._long_text_pool: ThreadPoolExecutor | None = None
        self._template_threads = BoundedThreads(
            1, "quire-chat-template", MAX_WAITING, "{} conversations wait for the chat template"
        )
        self._grammar_threads = BoundedThreads(
            GRAMMAR_THREADS, "quire-forms", MAX_WAITING, "{} outputs of some form wait for their grammars"
        )

    @property
    def max_len(self) -> int:
        """The maximum number of tokens of a sequence."""
        return self.limits.max_len

    async def offload(self, num_chars: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads `num_chars` characters: it runs inline if they are few, else on
        another thread, and on a dedicated pool if they are very many."""
        if num_chars <= INLINE_CHARS:
            return work()
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if num_chars > LONG_CHARS and self._long_text_pool is None:
            self._long_text_pool = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="quire-long-text")
        pool = self._long_text_pool if num_chars > LONG_CHARS else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def process_prompts(
        self,
        given: Sequence[str | Sequence[int]],
        add_special_tokens: bool = True,
        truncation: PromptTruncation | None = None,
        images: Sequence[ImageSource] = (),
        salt: str = "",
        field_names: Sequence[str] = (),
        min_output: int = 1,
    ) -> list[Prompt]:
        """Return several texts or lists of token ids as prompts, truncated; or one with its images. All lengths are
        checked first, and the longest text is tokenized first, so that a prompt that is too long is detected early.
        `field_names` are the prompts' names in errors. A prompt must leave room for `min_output` tokens.
        """
        several, field_names = len(given) > 1, field_names or [f"prompt[{at}]" for at in range(len(given))]
        for field_name, item in zip(field_names, given, strict=True):
            with input_error_at(field_name, several):
                self._check_length(item, truncation, min_output)
        if images and len(given) > 1:
            raise InputError(f"images go with one prompt, and there are {len(given)} prompts", "multi_modal_data")
        pixels = await self._load_images(images, salt)

        def encode() -> list[Prompt]:
            prompts: dict[int, Prompt] = {}
            for at in sorted(range(len(given)), key=lambda at: -len(given[at])):
                with input_error_at(field_names[at], several):
                    prompt = self._tokenize(given[at], add_special_tokens, pixels, images)
                    prompts[at] = prompt if truncation is None else truncation.apply(prompt)
                    self._check_length(prompts[at].ids, None, min_output)
            return [prompts[at] for at in range(len(given))]

        return await self.offload(sum(map(num_chars, given)), encode)

    async def process_prompt_async(self, given: Any, salt: str = "") -> Prompt:
        """Like `process_prompt`, without blocking the event loop."""
        content, images = split_multi_modal(given)
        pixels = await self._load_images(images, salt)
        return await self.offload(num_chars(content), partial(self._tokenize, content, True, pixels, images))

    async def _load_images(self, images: Sequence[ImageSource], salt: str) -> list[ImagePixels]:
        """Return the encoder's input of each image."""
        return await self._require_image_loader(images).load_async(images, salt) if images else []

    def _require_image_loader(self, images: Sequence[ImageSource]) -> ImageLoader:
        if self.image_loader is None:
            raise InputError(f"{images[0].param} is an image, and this model reads only text", images[0].param)
        return self.image_loader

    async def process_chat_async(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        documents: Messages | None = None,
        add_special_tokens: bool = False,
        truncation: PromptTruncation | None = None,
        variables: Mapping[str, Any],
        salt: str = "",
        tools: Sequence[Tool] = (),
        min_output: int | None = 1,
    ) -> Prompt:
        """Like `process_chat`, with truncation. Templates are programs of unknown cost, so they always run on another
        thread. The prompt must leave room for `min_output` tokens; None: it may have any length."""
        checker = self if min_output is not None else self._without_max_len()
        checker._check_num_chars(estimate_chars(messages))
        work = partial(
            self.render_chat, messages, add_generation_prompt, continue_final_message, documents, tools, **variables
        )  # fmt: skip
        text, images, notes = await self._template_threads.run(work)
        pixels = await self._load_images(images, salt)
        prompt = await self.offload(len(text), lambda: checker._tokenize(text, add_special_tokens, pixels, images))
        prompt = prompt if truncation is None else truncation.apply(prompt)
        checker._check_length(prompt.ids, None, min_output or 0)
        return prompt._replace(notes=tuple(notes))

    def _without_max_len(self) -> InputProcessor:
        """Return a copy that takes prompts of any length. The chat template's output is bounded still."""
        other = copy.copy(self)
        other.limits = self.limits._replace(max_len=sys.maxsize)
        return other

    async def run_grammar_work(self, params: SamplingParams, work: Callable[[], T], client: str = "") -> T:
        """Return the result of `work`, which compiles the grammar of `params`. Short grammars overtake long ones, and
        those of another `client`. Raise Overloaded if too many wait."""
        cost = 0 if params.structured is None else len(params.structured.source)
        return await self._grammar_threads.run(work, cost, client)

    def make_truncation(self, tokens: int, keep_first: bool, max_output_tokens: int) -> PromptTruncation:
        """Return the truncation for vLLM's truncate_prompt_tokens: -1 leaves room for `max_output_tokens` tokens. Raise
        InputError for an invalid length."""
        if tokens != -1 and not 1 <= tokens < 2**31:
            raise InputError(
                f"truncate_prompt_tokens must be -1, or between 1 and {2**31 - 1}, got {str(tokens)[:40]}",
                "truncate_prompt_tokens",
            )
        return PromptTruncation(tokens if tokens != -1 else max(self.max_len - max_output_tokens, 1), keep_first)

    def _check_length(self, given: Any, truncation: PromptTruncation | None, min_output: int = 1) -> None:
        """Raise PromptTooLong for token ids that do not fit, unless they will be truncated, and for text that cannot
        fit."""
        if isinstance(given, str):
            self._check_num_chars(len(given))
        elif truncation is None and len(given) >= self.max_len:
            self.limits.check_length(len(given), min_output)

    def _check_num_chars(self, count: int) -> None:
        if count > CHARS_PER_TOKEN * self.max_len:
            most = CHARS_PER_TOKEN * self.max_len
            raise self.limits.length_error(f"{count} characters", f"{most}", f", and at most {most} are read")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raise InputError without a tokenizer, and PromptTooLong for text that cannot
        fit."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer: give prompts as token ids", "prompt")
        self._check_num_chars(len(text))
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode_token(self, token: int) -> str:
        """Return a token as text, for log-probabilities."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)

    def id_to_token(self, token: int) -> str:
        """Return a token as the vocabulary spells it; "" without a tokenizer or for an id without a token."""
        return "" if self.tokenizer is None else self.tokenizer.id_to_token(token)

    def process_prompt(self, given: Any, add_special_tokens: bool = True) -> Prompt:
        """Return a prompt given as a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}. The dicts may
        have "multi_modal_data": {"image": one or a list} with images as data: URIs, bytes of files, arrays or PIL
        images."""
        content, images = split_multi_modal(given)
        pixels = self._require_image_loader(images).load(images, "") if images else []
        return self._tokenize(content, add_special_tokens, pixels, images)

    def _tokenize(
        self, given: Any, add_special_tokens: bool, pixels: Sequence[ImagePixels], images: Sequence[ImageSource]
    ) -> Prompt:
        """Return a text or token ids as a prompt, with images at their placeholders."""
        if isinstance(given, str):
            if self.image_loader is None:
                return Prompt(given, self.encode(given, add_special_tokens))
            processor = self.image_loader.processor
            if images:
                text = processor.normalize_placeholders(given)
            else:
                text = escape_image_tokens(given, processor.reserved_texts)
            first, *others = text.split(TOKEN_ESCAPE)
            ids = self.encode(first, add_special_tokens)
            for part in others:
                assert self.tokenizer is not None, "the first part was encoded"
                ids += self.tokenizer.encode_continuation(part)
            return self._expand_placeholders(Prompt(given.replace(TOKEN_ESCAPE, ""), ids), pixels, images)
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InputError(
                f"a prompt is a string, a list of token ids or a dict with one of these, got {type(given).__name__}",
                "prompt",
            )
        return self._expand_placeholders(Prompt(None, list(given)), pixels, images)

    def _expand_placeholders(
        self, prompt: Prompt, pixels: Sequence[ImagePixels], images: Sequence[ImageSource]
    ) -> Prompt:
        if self.image_loader is None:
            return prompt
        ids, media = self.image_loader.expand_placeholders(prompt.ids, pixels, self.limits, images)
        if self.image_loader.processor.joins_adjacent:
            media, pixels = merge_adjacent(media, pixels)
        return Prompt(prompt.text, ids, media, tuple(pixels))

    def process_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Prompt:
        """Return a conversation as a prompt; see `render_chat`, which takes `options`. `tools` are in OpenAI's form.
        The template adds special tokens itself."""
        checked = read_tools(tools) if tools else ()
        text, images, notes = self.render_chat(messages, add_generation_prompt, tools=checked, **options)
        pixels = self._require_image_loader(images).load(images, "") if images else []
        return self._tokenize(text, add_special_tokens, pixels, images)._replace(notes=tuple(notes))

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Messages | None = None,
        tools: Sequence[Tool] = (),
        **kwargs: Any,
    ) -> tuple[str, list[ImageSource], list[str]]:
        """Return the text that the chat template makes of a conversation with `tools`, the conversation's images, and
        notes on the parts that were dropped or changed. `kwargs` are variables of the template."""
        if self.chat_template is None:
            raise InputError("this model has no chat template: use completions, or start with --chat-template", "model")
        processor = self.image_loader.processor if self.image_loader is not None else None
        conversation = read_messages(messages, processor)
        if processor is not None and self.image_loader is not None:
            self.image_loader.check_count(conversation.images)
            tools = [
                tool._replace(definition=escape_image_tokens_in_json(tool.definition, processor.reserved_texts))
                for tool in tools
            ]
            documents = escape_image_tokens_in_json(documents, processor.reserved_texts)
        text = self.chat_template.render_parsed(
            conversation, processor, add_generation_prompt, continue_final_message, documents, tools, **kwargs
        )
        unread = [f"chat_template_kwargs.{name[:40]} is no variable of the chat template"
                  for name in kwargs if name not in self.chat_template.variables]  # fmt: skip
        return text, conversation.images, [*conversation.notes, *unread]

    def process_prefix(self, name: str, given: Any) -> list[int]:
        """Return the token ids of a prefix to register as `name`, given as a string or token ids. Raise InputError for
        an invalid name too."""
        if not isinstance(name, str) or not PREFIX_NAME.fullmatch(name):
            raise InputError(
                f"a prefix's name has 1 to 64 letters, digits, '.', '_' or '-', got {str(name)[:60]!r}", "name"
            )
        prompt = self.process_prompt(given)
        if prompt.images:
            raise InputError("a registered prefix can't have images", "prefix")
        return prompt.ids

    def replace_chat_template(self, template: ChatTemplate) -> None:
        """Use `template` from now on, and close the previous one."""
        if self.chat_template is not None:
            self.chat_template.close()
        self.chat_template = template

    def close(self) -> None:
        """End the processes of the chat template and of grammars."""
        if self.chat_template is not None:
            self.chat_template.close()
        if self._grammars is not None:
            self._grammars.close()

    def validate(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams,
        salt: str,
        images: Sequence[Sequence[ImageItem]] = (),
    ) -> tuple[list[list[int]], SamplingParams]:
        """Return the token ids of each (id, prompt), with its `images`, and the resolved parameters. All that can be
        refused without the engine's memory is refused here by InputError, before anything reaches the engine."""
        check_salt(salt)
        params.check_vocabulary(self.limits.vocab_size)
        each = zip(prompts, images or repeat(()))
        return [
            self.limits.check_prompt(prompt, seen, params.min_output) for (_, prompt), seen in each
        ], self.resolve_params(params)

    def resolve_params(self, params: SamplingParams) -> SamplingParams:
        """Return `params` as the engine needs them: bad words as token ids, stop strings and grammar compiled. The cost
        is linear in their length, so it is not done on the engine's thread. Raise InputError for words that cannot be
        banned."""
        return params if self.text_backend is None else self.text_backend.resolve(params)

    async def nearest_supported(self, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """Return `params` with the nearest output form that has a grammar, and the pointers of the keywords that it
        lacks."""
        grammars = self._grammars
        if params.structured is None or grammars is None or grammars.is_cached(params.structured):
            return params, ()
        form, dropped = await self.run_grammar_work(params, partial(grammars.nearest_supported, params.structured))
        return replace(params, structured=form), dropped

    def is_grammar_ready(self, params: SamplingParams) -> bool:
        """Return True if `resolve_params` need not compile a grammar, which has unknown cost."""
        grammars = self._grammars
        if params.structured is None or params.grammar is not None or grammars is None:
            return True
        return grammars.is_cached(params.structured)

    @property
    def _grammars(self) -> GrammarCompiler | None:
        return None if self.text_backend is None else self.text_backend.grammars

    def make_params(self, **given: Any) -> SamplingParams:
        """Return parameters: those `given`, else the model's defaults (generation_config.json), else
        SamplingParams'."""
        return SamplingParams(**{**self.defaults, **given})


def _make_text_backend(
    tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int] | None
) -> TextBackend | None:
    if tokenizer is None:
        return None
    from quire.text.grammars.compiler import GrammarCompiler
    from quire.text.text_backend import TextBackend

    return TextBackend(
        tokenizer, GrammarCompiler(tokenizer, vocab_size, tokenizer.eos_ids if eos_ids is None else eos_ids)
    )


def num_chars(given: Any) -> int:
    """Return the length of a text; 0 for anything else."""
    return len(given) if isinstance(given, str) else 0


def estimate_chars(messages: Any) -> int:
    """Return the approximate number of characters of an unchecked conversation, which may be any object."""
    entries = messages if isinstance(messages, list | tuple) else ()
    contents = [message.get("content") for message in entries if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return sum(map(num_chars, (*contents, *(part.get("text") for part in parts if isinstance(part, Mapping)))))
