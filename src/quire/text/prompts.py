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
from quire.control.edge import Limits, check_salt
from quire.errors import InputError, Overloaded, PromptTooLong, StartupError, about
from quire.text.eyes import GUARD, guarded, guarded_within
from quire.text.messages import Given, read_messages
from quire.text.sight import Sight, joined, pictured
from quire.text.tools import Tool, read_tools
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from quire.text.chat import ChatTemplate
    from quire.text.stream import TokenText
    from quire.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # text longer than this is worth another thread, where an event loop would wait
LONG_CHARS = 100_000  # text longer than this waits for threads of its own, so that chats don't wait for it
LONG_THREADS = 2
FORM_THREADS = 2
MAX_WAITING = 256  # conversations that wait for the chat template, which writes one at a time; and forms for grammars
CHARS_PER_TOKEN = 32  # text longer than so many characters for each token that fits is refused before tokenising
PREFIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class Prompt(NamedTuple):
    """A prompt as text, when it was given so, and as token ids; its pictures, and what the encoder gets of each."""

    text: str | None
    ids: list[int]
    media: tuple[Medium, ...] = ()
    pixels: tuple[Pixels, ...] = ()


class Cut(NamedTuple):
    """How a prompt is cut: to its last `tokens`, or with `first` to its first ones."""

    tokens: int
    first: bool = False

    def of(self, prompt: Prompt) -> Prompt:
        """The prompt, cut. One that loses tokens has no text any more."""
        if len(prompt.ids) <= self.tokens:
            return prompt
        if prompt.media:
            raise InputError("a prompt with pictures can't be cut", "truncate_prompt_tokens")
        return Prompt(None, prompt.ids[: self.tokens] if self.first else prompt.ids[-self.tokens :])


class Threads:
    """So many threads for work of unknown cost, which holds up nothing but its like. `what` waits for it, in errors."""

    def __init__(self, count: int, name: str, what: str) -> None:
        self.count, self.name, self.what = count, name, what
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def do(self, work: Callable[[], T]) -> T:
        """What `work` returns. Overloaded if too much waits."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} {self.what}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=self.name)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1


LONG = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp"}


def engine_config(model: str | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration for `model`: a folder, a hub id, or None or "" for the bundled one. Sizes of a layout may have
    vLLM's names."""
    named = {LONG.get(name, name): value for name, value in settings.items()}
    if len(named) < len(settings):
        raise StartupError("a setting is given by two names", f"Give one of {', '.join(map(': '.join, LONG.items()))}")
    return EngineConfig(model=model or "", **named)


class Prompts:
    """Prompts and parameters for one model. `limits` are its engine's; `defaults` generation_config.json's sampling
    parameters; `sight` is for pictures, where the model sees."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate | None,
        limits: Limits,
        defaults: Mapping[str, Any],
        sight: Sight | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """`eos_ids` are the model's end tokens, where they aren't just the tokenizer's."""
        self.tokenizer, self.chat_template, self.limits, self.sight = tokenizer, chat, limits, sight
        self.text = _text_of(tokenizer, limits.vocab_size, eos_ids)
        names = {field.name for field in fields(SamplingParams)}
        self.defaults = {name: value for name, value in defaults.items() if name in names}
        self._long: ThreadPoolExecutor | None = None
        self._writer = Threads(1, "quire-chat-template", "conversations wait for the chat template")
        self._makers = Threads(FORM_THREADS, "quire-forms", "outputs of some form wait for their grammars")

    @property
    def max_len(self) -> int:
        """The most tokens of a sequence."""
        return self.limits.max_len

    async def apart(self, chars: int, work: Callable[[], T]) -> T:
        """What `work` returns, which reads so many characters: done here if they are few, else on another thread, and
        if they are very many on one of a few of their own."""
        if chars <= INLINE_CHARS:
            return work()
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if chars > LONG_CHARS and self._long is None:
            self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="quire-long-text")
        pool = self._long if chars > LONG_CHARS else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def read(
        self,
        given: Sequence[str | Sequence[int]],
        add_special_tokens: bool = True,
        cut: Cut | None = None,
        pictures: Sequence[Given] = (),
        salt: str = "",
        places: Sequence[str] = (),
    ) -> list[Prompt]:
        """Several texts or lists of token ids as prompts, cut; or one, with its pictures. One that is too long is found
        before others are tokenised: all lengths are looked at first, and the longest text is the first to be tokenised.
        `places` are their names in errors.
        """
        several, places = len(given) > 1, places or [f"prompt[{at}]" for at in range(len(given))]
        for place, item in zip(places, given, strict=True):
            with about(place, several):
                self._check_length(item, cut)
        if pictures and len(given) > 1:
            raise InputError(f"pictures go with one prompt, and there are {len(given)}", "multi_modal_data")
        seen = await self._look(pictures, salt)

        def encode() -> list[Prompt]:
            found: dict[int, Prompt] = {}
            for at in sorted(range(len(given)), key=lambda at: -len(given[at])):
                with about(places[at], several):
                    prompt = self._tokenised(given[at], add_special_tokens, seen, pictures)
                    found[at] = prompt if cut is None else cut.of(prompt)
                    self._check_length(found[at].ids, None)
            return [found[at] for at in range(len(given))]

        return await self.apart(sum(map(characters, given)), encode)

    async def read_one(self, given: Any, salt: str = "") -> Prompt:
        """A prompt, as `prompt` takes it."""
        content, pictures = pictured(given)
        seen = await self._look(pictures, salt)
        return await self.apart(characters(content), partial(self._tokenised, content, True, seen, pictures))

    async def _look(self, pictures: Sequence[Given], salt: str) -> list[Pixels]:
        """Pictures as the encoder gets them."""
        return await self._sight(pictures).look(pictures, salt) if pictures else []

    def _sight(self, pictures: Sequence[Given]) -> Sight:
        if self.sight is None:
            raise InputError(f"{pictures[0].at} is a picture, and this model reads only text", pictures[0].at)
        return self.sight

    async def converse(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        documents: Messages | None = None,
        add_special_tokens: bool = False,
        cut: Cut | None = None,
        variables: Mapping[str, Any],
        salt: str = "",
        tools: Sequence[Tool] = (),
    ) -> Prompt:
        """A conversation, as `chat` takes it, cut. Templates are programs of unknown cost: always on another thread."""
        self._check_characters(spoken(messages))
        work = partial(
            self.written, messages, add_generation_prompt, continue_final_message, documents, tools, **variables
        )  # fmt: skip
        text, pictures = await self._writer.do(work)
        seen = await self._look(pictures, salt)
        prompt = await self.apart(len(text), lambda: self._tokenised(text, add_special_tokens, seen, pictures))
        prompt = prompt if cut is None else cut.of(prompt)
        self._check_length(prompt.ids, None)
        return prompt

    async def formed(self, work: Callable[[], T]) -> T:
        """What `work` returns, which makes a grammar. Overloaded if too many wait."""
        return await self._makers.do(work)

    def cut(self, tokens: int, first: bool, output: int) -> Cut:
        """vLLM's truncate_prompt_tokens: -1 leaves room for `output` tokens. InputError for what is no length."""
        if tokens != -1 and not 1 <= tokens < 2**31:
            raise InputError(
                f"truncate_prompt_tokens must be -1, or between 1 and {2**31 - 1}, got {str(tokens)[:40]}",
                "truncate_prompt_tokens",
            )
        return Cut(tokens if tokens != -1 else max(self.max_len - output, 1), first)

    def _check_length(self, given: Any, cut: Cut | None) -> None:
        """PromptTooLong for token ids that don't fit, unless they will be cut, and for a text that can't."""
        if isinstance(given, str):
            self._check_characters(len(given))
        elif cut is None and len(given) >= self.max_len:
            self.limits.check_length(len(given))

    def _check_characters(self, count: int) -> None:
        if count > CHARS_PER_TOKEN * self.max_len:
            raise PromptTooLong(
                f"the prompt has {count} characters, but at most {CHARS_PER_TOKEN * self.max_len} "
                f"are read for {self.max_len} tokens",
                "prompt",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. InputError without a tokenizer, PromptTooLong for text that can't fit."""
        if self.tokenizer is None:
            raise InputError("this model has no tokenizer: give prompts as token ids", "prompt")
        self._check_characters(len(text))
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode_token(self, token: int) -> str:
        """A token as text, for log-probabilities."""
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.convert_id(token)

    def piece(self, token: int) -> str:
        """A token as the vocabulary spells it; "" without a tokenizer or for an id without a token."""
        return "" if self.tokenizer is None else self.tokenizer.piece(token)

    def prompt(self, given: Any, add_special_tokens: bool = True) -> Prompt:
        """A prompt given as a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}; in both of the latter
        "multi_modal_data": {"image": one or a list} may have its pictures, as data: URIs, bytes of files, arrays or PIL
        images."""
        content, pictures = pictured(given)
        seen = self._sight(pictures).see(pictures, "") if pictures else []
        return self._tokenised(content, add_special_tokens, seen, pictures)

    def _tokenised(
        self, given: Any, add_special_tokens: bool, seen: Sequence[Pixels], pictures: Sequence[Given]
    ) -> Prompt:
        """A text or token ids as a prompt, with pictures in their places."""
        if isinstance(given, str):
            if self.sight is None:
                return Prompt(given, self.encode(given, add_special_tokens))
            eyes = self.sight.eyes
            text = eyes.spelled(given) if pictures else guarded(given, eyes.words)
            first, *others = text.split(GUARD)
            ids = self.encode(first, add_special_tokens)
            for part in others:
                assert self.tokenizer is not None, "the first part was encoded"
                ids += self.tokenizer.encode_inside(part)
            return self._placed(Prompt(given.replace(GUARD, ""), ids), seen, pictures)
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InputError(
                f"a prompt is a string, a list of token ids or a dict with one of these, got {type(given).__name__}",
                "prompt",
            )
        return self._placed(Prompt(None, list(given)), seen, pictures)

    def _placed(self, prompt: Prompt, seen: Sequence[Pixels], pictures: Sequence[Given]) -> Prompt:
        if self.sight is None:
            return prompt
        ids, media = self.sight.placed(prompt.ids, seen, self.limits, pictures)
        if self.sight.eyes.joins:
            media, seen = joined(media, seen)
        return Prompt(prompt.text, ids, media, tuple(seen))

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Messages | None = None,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Prompt:
        """A conversation, as `written`; `tools` as OpenAI has them. The template adds the special tokens itself."""
        told = read_tools(tools) if tools else ()
        text, pictures = self.written(
            messages, add_generation_prompt, continue_final_message, documents, told, **kwargs
        )
        seen = self._sight(pictures).see(pictures, "") if pictures else []
        return self._tokenised(text, add_special_tokens, seen, pictures)

    def written(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Messages | None = None,
        tools: Sequence[Tool] = (),
        **kwargs: Any,
    ) -> tuple[str, list[Given]]:
        """A conversation as the model's chat template writes it, with `tools` to call, and its pictures. `kwargs` are
        variables of the template."""
        if self.chat_template is None:
            raise InputError("this model has no chat template: use completions, or start with --chat-template", "model")
        eyes = self.sight.eyes if self.sight is not None else None
        conversation = read_messages(messages, eyes)
        if eyes is not None and self.sight is not None:
            self.sight.check_count(conversation.pictures)
            tools = [tool._replace(entry=guarded_within(tool.entry, eyes.words)) for tool in tools]
            documents = guarded_within(documents, eyes.words)
        text = self.chat_template.write(
            conversation, eyes, add_generation_prompt, continue_final_message, documents, tools, **kwargs
        )
        return text, conversation.pictures

    def prefix(self, name: str, given: Any) -> list[int]:
        """Token ids of a prefix to register as `name`: a string or token ids. InputError for a bad name too."""
        if not isinstance(name, str) or not PREFIX_NAME.fullmatch(name):
            raise InputError(
                f"a prefix's name has 1 to 64 letters, digits, '.', '_' or '-', got {str(name)[:60]!r}", "name"
            )
        prompt = self.prompt(given)
        if prompt.media:
            raise InputError("a registered prefix can't have pictures", "prefix")
        return prompt.ids

    def close(self) -> None:
        """End the processes of the chat template and of grammars."""
        if self.chat_template is not None:
            self.chat_template.close()
        if self.text is not None and self.text.grammars is not None:
            self.text.grammars.close()

    def checked(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams,
        salt: str,
        media: Sequence[Sequence[Medium]] = (),
    ) -> tuple[list[list[int]], SamplingParams]:
        """Token ids of (id, prompt), with these pictures in them if there are any, and `params` resolved: all that can
        be refused without the engine's memory is refused here, before anything reaches the engine. InputError names
        what is wrong."""
        check_salt(salt)
        params.check_vocabulary(self.limits.vocab_size)
        each = zip(prompts, media or repeat(()))
        return [self.limits.tokens(prompt, seen) for (_, prompt), seen in each], self.resolve(params)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` as the engine needs them: bad words as token ids, stop strings compiled. It costs what they are
        long, so it is done here and not on the engine's thread. InputError for words that can't be banned."""
        return params if self.text is None else self.text.resolve(params)

    async def nearest(self, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """`params` with the nearest form that there is a grammar of, and the places of the keywords that it lacks."""
        grammars = None if self.text is None else self.text.grammars
        if params.structured is None or grammars is None or grammars.holds(params.structured):
            return params, ()
        form, lost = await self.formed(partial(grammars.nearest, params.structured))
        return replace(params, structured=form), lost

    def quick(self, params: SamplingParams) -> bool:
        """Whether `resolve` needn't compile a grammar, which is of unknown cost."""
        asked = params.structured
        if asked is None or params.grammar is not None or self.text is None or self.text.grammars is None:
            return True
        return self.text.grammars.holds(asked)

    def params(self, **given: Any) -> SamplingParams:
        """Parameters: what is `given`, else the model's defaults (generation_config.json), else SamplingParams'."""
        return SamplingParams(**{**self.defaults, **given})


def _text_of(tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int] | None) -> TokenText | None:
    if tokenizer is None:
        return None
    from quire.text.grammars import Grammars
    from quire.text.stream import TokenText

    return TokenText(tokenizer, Grammars(tokenizer, vocab_size, tokenizer.eos_ids if eos_ids is None else eos_ids))


def characters(given: Any) -> int:
    """Of a text; 0 of anything else."""
    return len(given) if isinstance(given, str) else 0


def spoken(messages: Any) -> int:
    """About how many characters a conversation has; it isn't checked yet, and may be anything."""
    said = messages if isinstance(messages, list | tuple) else ()
    contents = [message.get("content") for message in said if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return sum(map(characters, (*contents, *(part.get("text") for part in parts if isinstance(part, Mapping)))))
