"""What users give, as token ids: strings, ids, messages; and parameters completed by the model's own defaults.

The edge that LLM, AsyncLLM and the server share. Bad input ends here as InputError, before anything is queued.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quire.config import EngineConfig
from quire.core.validation import EngineLimits, check_salt
from quire.errors import InputError, Overloaded, PromptTooLong, StartupError, input_error_at
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.text.chat_messages import ImageSource, read_messages
from quire.text.images.loader import ImageLoader, merge_adjacent, split_multi_modal
from quire.text.images.processor import TOKEN_ESCAPE, escape_image_tokens, escape_image_tokens_in_json
from quire.text.tools import Tool, read_tools

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from quire.text.chat_template import ChatTemplate
    from quire.text.text_backend import TextBackend
    from quire.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # text longer than this is worth another thread, where an event loop would wait
LONG_CHARS = 100_000  # text longer than this waits for threads of its own, so that chats don't wait for it
LONG_THREADS = 2
GRAMMAR_THREADS = 2
MAX_WAITING = 256  # conversations that wait for the chat template, which writes one at a time; and forms for grammars
CHARS_PER_TOKEN = 32  # text longer than so many characters for each token that fits is refused before tokenising
PREFIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class Prompt(NamedTuple):
    """A prompt as text, when it was given so, and as token ids; its pictures, and what the encoder gets of each."""

    text: str | None
    ids: list[int]
    images: tuple[ImageItem, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()


class PromptTruncation(NamedTuple):
    """How a prompt is cut: to its last `max_tokens`, or with `keep_first` to its first ones."""

    max_tokens: int
    keep_first: bool = False

    def apply(self, prompt: Prompt) -> Prompt:
        """The prompt, cut. One that loses tokens has no text any more."""
        if len(prompt.ids) <= self.max_tokens:
            return prompt
        if prompt.images:
            raise InputError("a prompt with pictures can't be cut", "truncate_prompt_tokens")
        return Prompt(None, prompt.ids[: self.max_tokens] if self.keep_first else prompt.ids[-self.max_tokens :])


class BoundedThreadPool:
    """So many threads for work of unknown cost, which holds up nothing but its like. `waiting_text` waits for it, "
    "in errors."""

    def __init__(self, count: int, name: str, waiting_text: str) -> None:
        self.count, self.name, self.waiting_text = count, name, waiting_text
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. Overloaded if too much waits."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} {self.waiting_text}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=self.name)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1


CONFIG_ALIASES = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp"}


def engine_config(model: str | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration for `model`: a folder, a hub id, or None or "" for the bundled one. Sizes of a layout may have
    vLLM's names."""
    named = {CONFIG_ALIASES.get(name, name): value for name, value in settings.items()}
    if len(named) < len(settings):
        raise StartupError(
            "a setting is given by two names", f"Give one of {', '.join(map(': '.join, CONFIG_ALIASES.items()))}"
        )
    return EngineConfig(model=model or "", **named)


class InputProcessor:
    """Prompts and parameters for one model. `limits` are its engine's; `defaults` generation_config.json's sampling
    parameters; `image_loader` is for pictures, where the model sees."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        limits: EngineLimits,
        defaults: Mapping[str, Any],
        image_loader: ImageLoader | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """`eos_ids` are the model's end tokens, where they aren't just the tokenizer's."""
        self.tokenizer, self.chat_template, self.limits, self.image_loader = (
            tokenizer,
            chat_template,
            limits,
            image_loader,
        )
        self.text_backend = _make_text_backend(tokenizer, limits.vocab_size, eos_ids)
        names = {field.name for field in fields(SamplingParams)}
        self.defaults = {name: value for name, value in defaults.items() if name in names}
        self._long_text_pool: ThreadPoolExecutor | None = None
        self._template_pool = BoundedThreadPool(1, "quire-chat-template", "conversations wait for the chat template")
        self._grammar_pool = BoundedThreadPool(
            GRAMMAR_THREADS, "quire-forms", "outputs of some form wait for their grammars"
        )

    @property
    def max_len(self) -> int:
        """The most tokens of a sequence."""
        return self.limits.max_len

    async def offload(self, num_chars: int, work: Callable[[], T]) -> T:
        """What `work` returns, which reads so many characters: done here if they are few, else on another thread, and
        if they are very many on one of a few of their own."""
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
    ) -> list[Prompt]:
        """Several texts or lists of token ids as prompts, cut; or one, with its pictures. One that is too long is found
        before others are tokenised: all lengths are looked at first, and the longest text is the first to be tokenised.
        `field_names` are their names in errors.
        """
        several, field_names = len(given) > 1, field_names or [f"prompt[{at}]" for at in range(len(given))]
        for place, item in zip(field_names, given, strict=True):
            with input_error_at(place, several):
                self._check_length(item, truncation)
        if images and len(given) > 1:
            raise InputError(f"pictures go with one prompt, and there are {len(given)}", "multi_modal_data")
        seen = await self._load_images(images, salt)

        def encode() -> list[Prompt]:
            found: dict[int, Prompt] = {}
            for at in sorted(range(len(given)), key=lambda at: -len(given[at])):
                with input_error_at(field_names[at], several):
                    prompt = self._tokenize(given[at], add_special_tokens, seen, images)
                    found[at] = prompt if truncation is None else truncation.apply(prompt)
                    self._check_length(found[at].ids, None)
            return [found[at] for at in range(len(given))]

        return await self.offload(sum(map(num_chars, given)), encode)

    async def process_prompt_async(self, given: Any, salt: str = "") -> Prompt:
        """A prompt, as `process_prompt` takes it."""
        content, pictures = split_multi_modal(given)
        seen = await self._load_images(pictures, salt)
        return await self.offload(num_chars(content), partial(self._tokenize, content, True, seen, pictures))

    async def _load_images(self, images: Sequence[ImageSource], salt: str) -> list[ImagePixels]:
        """Pictures as the encoder gets them."""
        return await self._require_image_loader(images).load_async(images, salt) if images else []

    def _require_image_loader(self, images: Sequence[ImageSource]) -> ImageLoader:
        if self.image_loader is None:
            raise InputError(f"{images[0].param} is a picture, and this model reads only text", images[0].param)
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
    ) -> Prompt:
        """A conversation, as `process_chat` takes it, cut. Templates are programs of unknown cost: always on "
        "another thread."""
        self._check_num_chars(estimate_chars(messages))
        work = partial(
            self.render_chat, messages, add_generation_prompt, continue_final_message, documents, tools, **variables
        )  # fmt: skip
        text, pictures = await self._template_pool.run(work)
        seen = await self._load_images(pictures, salt)
        prompt = await self.offload(len(text), lambda: self._tokenize(text, add_special_tokens, seen, pictures))
        prompt = prompt if truncation is None else truncation.apply(prompt)
        self._check_length(prompt.ids, None)
        return prompt

    async def run_grammar_work(self, work: Callable[[], T]) -> T:
        """What `work` returns, which makes a grammar. Overloaded if too many wait."""
        return await self._grammar_pool.run(work)

    def make_truncation(self, tokens: int, keep_first: bool, max_output_tokens: int) -> PromptTruncation:
        """vLLM's truncate_prompt_tokens: -1 leaves room for `max_output_tokens` tokens. InputError for what is no "
        "length."""
        if tokens != -1 and not 1 <= tokens < 2**31:
            raise InputError(
                f"truncate_prompt_tokens must be -1, or between 1 and {2**31 - 1}, got {str(tokens)[:40]}",
                "truncate_prompt_tokens",
            )
        return PromptTruncation(tokens if tokens != -1 else max(self.max_len - max_output_tokens, 1), keep_first)

    def _check_length(self, given: Any, truncation: PromptTruncation | None) -> None:
        """PromptTooLong for token ids that don't fit, unless they will be cut, and for a text that can't."""
        if isinstance(given, str):
            self._check_num_chars(len(given))
        elif truncation is None and len(given) >= self.max_len:
            self.limits.check_length(len(given))

    def _check_num_chars(self, count: int) -> None:
        if count > CHARS_PER_TOKEN * self.max_len:
            raise PromptTooLong(
                f"the prompt has {count} characters, but at most {CHARS_PER_TOKEN * self.max_len} "
                f"are read for {self.max_len} tokens",
                "prompt",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text_backend`. InputError without a tokenizer, PromptTooLong for text that can't fit."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer: give prompts as token ids", "prompt")
        self._check_num_chars(len(text))
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode_token(self, token: int) -> str:
        """A token as text, for log-probabilities."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)

    def id_to_token(self, token: int) -> str:
        """A token as the vocabulary spells it; "" without a tokenizer or for an id without a token."""
        return "" if self.tokenizer is None else self.tokenizer.id_to_token(token)

    def process_prompt(self, given: Any, add_special_tokens: bool = True) -> Prompt:
        """A prompt given as a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}; in both of the latter
        "multi_modal_data": {"image": one or a list} may have its pictures, as data: URIs, bytes of files, arrays or PIL
        images."""
        content, pictures = split_multi_modal(given)
        seen = self._require_image_loader(pictures).load(pictures, "") if pictures else []
        return self._tokenize(content, add_special_tokens, seen, pictures)

    def _tokenize(
        self, given: Any, add_special_tokens: bool, pixels: Sequence[ImagePixels], images: Sequence[ImageSource]
    ) -> Prompt:
        """A text or token ids as a prompt, with pictures in their places."""
        if isinstance(given, str):
            if self.image_loader is None:
                return Prompt(given, self.encode(given, add_special_tokens))
            eyes = self.image_loader.processor
            text = eyes.normalize_placeholders(given) if images else escape_image_tokens(given, eyes.reserved_texts)
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
        continue_final_message: bool = False,
        documents: Messages | None = None,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Prompt:
        """A conversation, as `render_chat`; `tools` as OpenAI has them. The template adds the special tokens itself."""
        told = read_tools(tools) if tools else ()
        text, pictures = self.render_chat(
            messages, add_generation_prompt, continue_final_message, documents, told, **kwargs
        )
        seen = self._require_image_loader(pictures).load(pictures, "") if pictures else []
        return self._tokenize(text, add_special_tokens, seen, pictures)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Messages | None = None,
        tools: Sequence[Tool] = (),
        **kwargs: Any,
    ) -> tuple[str, list[ImageSource]]:
        """A conversation as the model's chat template writes it, with `tools` to call, and its pictures. `kwargs` are
        variables of the template."""
        if self.chat_template is None:
            raise InputError("this model has no chat template: use completions, or start with --chat-template", "model")
        eyes = self.image_loader.processor if self.image_loader is not None else None
        conversation = read_messages(messages, eyes)
        if eyes is not None and self.image_loader is not None:
            self.image_loader.check_count(conversation.images)
            tools = [
                tool._replace(definition=escape_image_tokens_in_json(tool.definition, eyes.reserved_texts))
                for tool in tools
            ]
            documents = escape_image_tokens_in_json(documents, eyes.reserved_texts)
        text = self.chat_template.render_parsed(
            conversation, eyes, add_generation_prompt, continue_final_message, documents, tools, **kwargs
        )
        return text, conversation.images

    def process_prefix(self, name: str, given: Any) -> list[int]:
        """Token ids of a prefix to register as `name`: a string or token ids. InputError for a bad name too."""
        if not isinstance(name, str) or not PREFIX_NAME.fullmatch(name):
            raise InputError(
                f"a prefix's name has 1 to 64 letters, digits, '.', '_' or '-', got {str(name)[:60]!r}", "name"
            )
        prompt = self.process_prompt(given)
        if prompt.images:
            raise InputError("a registered prefix can't have pictures", "prefix")
        return prompt.ids

    def close(self) -> None:
        """End the processes of the chat template and of grammars."""
        if self.chat_template is not None:
            self.chat_template.close()
        if self.text_backend is not None and self.text_backend.grammars is not None:
            self.text_backend.grammars.close()

    def validate(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams,
        salt: str,
        images: Sequence[Sequence[ImageItem]] = (),
    ) -> tuple[list[list[int]], SamplingParams]:
        """Token ids of (id, prompt), with these pictures in them if there are any, and `make_params` resolved: all that
        can be refused without the engine's memory is refused here, before anything reaches the engine. InputError names
        what is wrong."""
        check_salt(salt)
        params.check_vocabulary(self.limits.vocab_size)
        each = zip(prompts, images or repeat(()))
        return [self.limits.check_prompt(prompt, seen) for (_, prompt), seen in each], self.resolve_params(params)

    def resolve_params(self, params: SamplingParams) -> SamplingParams:
        """`make_params` as the engine needs them: bad words as token ids, stop strings compiled. It costs what they are
        long, so it is done here and not on the engine's thread. InputError for words that can't be banned."""
        return params if self.text_backend is None else self.text_backend.resolve(params)

    async def nearest_supported(self, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """`make_params` with the nearest form that there is a grammar of, and the places of the keywords that it "
        "lacks."""
        grammars = None if self.text_backend is None else self.text_backend.grammars
        if params.structured is None or grammars is None or grammars.is_cached(params.structured):
            return params, ()
        form, lost = await self.run_grammar_work(partial(grammars.nearest_supported, params.structured))
        return replace(params, structured=form), lost

    def is_grammar_ready(self, params: SamplingParams) -> bool:
        """Whether `resolve_params` needn't compile a grammar, which is of unknown cost."""
        asked = params.structured
        if (
            asked is None
            or params.grammar is not None
            or self.text_backend is None
            or self.text_backend.grammars is None
        ):
            return True
        return self.text_backend.grammars.is_cached(asked)

    def make_params(self, **given: Any) -> SamplingParams:
        """Parameters: what is `given`, else the model's defaults (generation_config.json), else SamplingParams'."""
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
    """Of a text; 0 of anything else."""
    return len(given) if isinstance(given, str) else 0


def estimate_chars(messages: Any) -> int:
    """About how many characters a conversation has; it isn't checked yet, and may be anything."""
    said = messages if isinstance(messages, list | tuple) else ()
    contents = [message.get("content") for message in said if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return sum(map(num_chars, (*contents, *(part.get("text") for part in parts if isinstance(part, Mapping)))))
