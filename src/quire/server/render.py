"""Outputs as OpenAI's JSON: one renderer makes a stream's chunks and, from all outputs merged, a whole response.

What a prompt contributes is written once for all choices; long lists are written in slices (see pieces.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple

from quire.control.outcomes import Output
from quire.server.pieces import SLICE, Pace, Pieces, Words, array, finite, numbers
from quire.server.protocol import ChatRequest, CompletionRequest
from quire.server.reading import Parts, Reading
from quire.server.reasoning import Thinking
from quire.server.tools import Toolbox
from quire.text.prompts import Prompt, Prompts
from quire.vocabulary.plan import Top

NO_TOOLS = Toolbox()


class Usage:
    """Tokens of one HTTP request, over its prompts and branches."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = [len(prompt.ids) for prompt in prompts]
        self.completions: dict[int, int] = {}  # by choice
        self.cached: dict[int, int] = {}
        self.thoughts: dict[int, int] = {}  # of completions, by choice, where models think

    def add(self, at: int, choice: int, tokens: int, cached: int) -> None:
        """`tokens` more of a choice, an output of prompt `at`, of which `cached` tokens were reused."""
        self.completions[choice] = self.completions.get(choice, 0) + tokens
        self.cached[at] = cached

    def so_far(self, at: int, choice: int) -> str:
        """The usage of one choice until now, as JSON."""
        prompt, completion = self.prompts[at], self.completions.get(choice, 0)
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{prompt + completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached.get(at, 0)}}}{self._details(choice)}}}'
        )

    def _details(self, *choices: int) -> str:
        tokens = sum(self.thoughts.get(choice, 0) for choice in choices)
        return f',"completion_tokens_details":{{"reasoning_tokens":{tokens}}}' if self.thoughts else ""

    def total(self) -> str:
        """OpenAI's usage object, as JSON."""
        prompt, completion = sum(self.prompts), sum(self.completions.values())
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{prompt + completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{sum(self.cached.values())}}}{self._details(*self.thoughts)}}}'
        )


class Scored(NamedTuple):
    """A token beside its Top; None for a prompt's first token, which has no probability."""

    token: int
    top: Top | None


class Choice(NamedTuple):
    """What an output adds to choice `index`, which continues prompt `at`."""

    at: int
    index: int
    pieces: Pieces


def _leaders(top: Top, k: int) -> dict[int, float]:
    """The chosen token and the k most likely ones."""
    return {top.token: top.logprob, **dict(zip(top.ids[:k], top.logprobs[:k]))}


async def prompt_logprobs(tops: Sequence[Top], k: int, words: Words, pace: Pace) -> Pieces:
    """vLLM's prompt_logprobs: for each prompt token, and the `k` most likely ones in its place, {id: {logprob, rank,
    decoded_token}}; null for the first."""
    slices = ["null"]
    for start in range(0, len(tops), SLICE):
        slices.append(",".join(_ranked(top, k, words) for top in tops[start : start + SLICE]))
        await pace(slices[-1])
    return array(slices)


def _ranked(top: Top, k: int, words: Words) -> str:
    ranked = {id: (value, rank) for rank, (id, value) in enumerate(zip(top.ids[:k], top.logprobs), 1)}
    named = {top.token: (top.logprob, top.rank), **ranked}
    return "{" + ",".join(
        f'"{id}":{{"logprob":{finite(value)},"rank":{rank},"decoded_token":{words.quoted(id)}}}'
        for id, (value, rank) in named.items()
    ) + "}"  # fmt: skip


class Lists(NamedTuple):
    """The four parallel lists of a completion's log-probabilities, in slices. The next token's text begins at `end`."""

    tokens: Pieces
    chosen: Pieces
    leaders: Pieces
    offsets: Pieces
    end: int

    def then(self, other: Lists) -> Lists:
        """Both, one after the other."""
        return Lists(*(mine + more for mine, more in zip(self[:4], other[:4])), other.end)

    def json(self) -> Pieces:
        """The legacy format's object."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        pieces = []
        for name, slices in zip(names, self):
            pieces += [f'{"," if pieces else "{"}"{name}":', *array(slices)]
        return [*pieces, "}"]


def ending(output: Output) -> str:
    """How a choice ended, if it did."""
    if output.finish_reason is None and output.stop_reason is None:
        return ',"finish_reason":null,"stop_reason":null'
    return f',"finish_reason":{json.dumps(output.finish_reason)},"stop_reason":{json.dumps(output.stop_reason)}'


class Answer:
    """What both kinds of answers have in common. `index` of a choice: prompt * n + branch."""

    objects = ("", "")  # of a response, and of a chunk
    around = ("", "")  # a chunk's text, between its index and its log-probabilities
    scored = False  # with log-probabilities

    def __init__(
        self, id: str, model: str, request: CompletionRequest | ChatRequest, prompts: list[Prompt], words: Words
    ) -> None:
        self.id, self.prompts, self.usage, self.pace = id, prompts, Usage(prompts), Pace()
        self.words, self.request = words, request
        self.n = request.n or 1
        self.with_ids = bool(request.return_token_ids)
        self._head = f'"created":{int(time.time())},"model":{json.dumps(model)},"system_fingerprint":null,"choices":['

    def head(self, whole: bool) -> str:
        """A response, or a chunk of one, up to its first choice."""
        return f'{{"id":{json.dumps(self.id)},"object":"{self.objects[0 if whole else 1]}",{self._head}'

    @property
    def plain(self) -> bool:
        """Whether all that a stream's chunks have is text, so that `brief` writes them."""
        return not (self.scored or self.with_ids or self.request.echo)

    def brief(self, at: int, output: Output) -> Choice | None:
        """`choice`, for a chunk of a plain stream: nothing is awaited."""
        index = at * self.n + output.branch
        self.usage.add(at, index, len(output.tokens), output.cached_tokens)
        if not output.text and output.finish_reason is None:
            return None
        before, after = self.around
        text = quoted(output.text)
        return Choice(at, index, [f'{{"index":{index},{before}{text}{after}null{ending(output)}}}'])

    async def opening(self) -> list[Choice]:
        """Chunks that come before any output."""
        return []

    async def tail(self, whole: bool) -> Pieces:
        """What a response has beside its choices and its usage; a stream's first chunk too."""
        return []

    async def _ids(self, name: str, ids: Iterable[int]) -> Pieces:
        return [f',"{name}":', *(await numbers(ids, self.pace) if self.with_ids else ["null"])]


class CompletionRenderer(Answer):
    """/v1/completions."""

    objects = ("text_completion", "text_completion")
    around = '"text":', ',"logprobs":'
    request: CompletionRequest

    def __init__(
        self, id: str, model: str, request: CompletionRequest, prompts: list[Prompt], words: Words, text: Prompts
    ) -> None:
        super().__init__(id, model, request, prompts, words)
        self.text = text
        self.named = len(request.logprob_token_ids or ())
        self.scored = request.logprobs is not None or self.named > 0
        self.silent = bool(request.echo) and request.max_tokens == 0
        self._offsets: dict[int, int] = {}  # where the next token's text begins, a choice
        self._prompt_tops: dict[int, tuple[Top, ...]] = {}  # a prompt is scored once, before its branches
        self._echoes: dict[int, tuple[str, Lists]] = {}
        self._scores: dict[int, Pieces] = {}

    async def choice(self, at: int, output: Output, whole: bool) -> Choice | None:
        """What `output` adds to its choice; None when there is nothing to show."""
        if self.plain and not whole:
            await self.pace(output.text)
            return self.brief(at, output)
        index = at * self.n + output.branch
        first = index not in self._offsets
        if output.prompt_tops is not None:
            self._prompt_tops.setdefault(at, output.prompt_tops)
        if self.silent:
            output = output._replace(tokens=(), text="", tops=(), finish_reason="length")
        self.usage.add(at, index, len(output.tokens), output.cached_tokens)
        echoed, scored = first and bool(self.request.echo), self.scored
        offset = self._offsets.setdefault(index, 0)
        news = output.text or output.finish_reason or (output.tops and scored) or (output.tokens and self.with_ids)
        if not (news or echoed):
            return None
        text, lists = quoted(output.text), Lists([], [], [], [], offset)
        if echoed:
            before, lists = await self._echo(at)
            text = before[:-1] + text[1:]
        if scored:
            pairs = list(map(Scored, output.tokens, output.tops))
            more = await self._lists(pairs, self.named or self.request.logprobs or 0, lists.end)
            lists = lists.then(more)
            self._offsets[index] = lists.end
        await self.pace(text)
        before, after = self.around
        pieces = [f'{{"index":{index},{before}', text, after, *(lists.json() if scored else ["null"]), ending(output)]
        if whole or self.with_ids:
            pieces += await self._ids("token_ids", output.tokens)
            if whole or first:
                pieces += await self._ids("prompt_token_ids", self.prompts[at].ids)
        if whole:
            pieces += [',"prompt_logprobs":', *await self._prompt_logprobs(at)]
        return Choice(at, index, [*pieces, "}"])

    async def _echo(self, at: int) -> tuple[str, Lists]:
        """A prompt's text as JSON, and its lists."""
        if at in self._echoes:
            for slices in self._echoes[at][1][:4]:
                self.pace.count(*slices)
            return self._echoes[at]
        prompt, tokenizer = self.prompts[at], self.text.tokenizer
        text = prompt.text
        if text is None:
            decode = partial(tokenizer.decode, prompt.ids, skip_special_tokens=False) if tokenizer is not None else str
            text = await self.text.apart(len(prompt.ids), decode)
        scored: list[Scored] = []
        if self.scored:
            scored = [Scored(prompt.ids[0], None), *map(Scored, prompt.ids[1:], self._prompt_tops.get(at, ()))]
        self._echoes[at] = json.dumps(text), await self._lists(scored, self.request.logprobs or 0, 0)
        return self._echoes[at]

    async def _prompt_logprobs(self, at: int) -> Pieces:
        k = self.request.prompt_logprobs
        if k is None:
            return ["null"]
        if at in self._scores:
            self.pace.count(*self._scores[at])
        else:
            self._scores[at] = await prompt_logprobs(self._prompt_tops.get(at, ()), k, self.words, self.pace)
        return self._scores[at]

    async def _lists(self, scored: list[Scored], k: int, offset: int) -> Lists:
        """The legacy format: four parallel lists, with up to `k` alternatives a token."""
        found = Lists([], [], [], [], offset)
        for start in range(0, len(scored), SLICE):
            some = scored[start : start + SLICE]
            offsets = []
            for item in some:
                offsets.append(offset)
                offset += self.words.length(item.token)
            found.tokens.append(",".join(self.words.named(item.token) for item in some))
            found.chosen.append(",".join("null" if item.top is None else finite(item.top.logprob) for item in some))
            found.leaders.append(",".join(self._alternatives(item, k) for item in some))
            found.offsets.append(",".join(map(str, offsets)))
            await self.pace(found.tokens[-1], found.chosen[-1], found.leaders[-1], found.offsets[-1])
        return found._replace(end=offset)

    def _alternatives(self, item: Scored, k: int) -> str:
        """The drawn token and the `k` most likely ones by their names. Of tokens with one name the first has it, the
        others are "token_id:N", so that none hides another."""
        if item.top is None:
            return "null"
        named: dict[str, str] = {}
        for id, value in _leaders(item.top, k).items():
            name = self.words.named(id)
            named[f'"token_id:{id}"' if name in named else name] = finite(value)
        return "{" + ",".join(f"{name}:{value}" for name, value in named.items()) + "}"


class ChatRenderer(Answer):
    """/v1/chat/completions. `before` is what `echo` puts before each output."""

    objects = ("chat.completion", "chat.completion.chunk")
    around = '"delta":{"content":', '},"logprobs":'
    request: ChatRequest

    def __init__(
        self,
        id: str,
        model: str,
        request: ChatRequest,
        prompts: list[Prompt],
        words: Words,
        box: Toolbox = NO_TOOLS,
        thinking: Thinking | None = None,
    ) -> None:
        super().__init__(id, model, request, prompts, words)
        self.thinks = thinking is not None
        reads = self.thinks or box.choice != "none"
        self._readings = [Reading(box, thinking) for _ in range(self.n)] if reads else None
        self.before = last_said(request) if request.echo else ""
        self.named = len(request.logprob_token_ids or ())
        self.scored = bool(request.logprobs) or self.named > 0
        self._prompt_tops: tuple[Top, ...] = ()

    async def opening(self) -> list[Choice]:
        """The first chunk of each choice carries the role; with `echo` the next one the message that is continued."""
        said = ['{"role":"assistant","content":""}']
        if self.before:
            said.append(f'{{"content":{json.dumps(self.before)}}}')
        return [
            Choice(0, index, [f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'])
            for delta in said
            for index in range(self.n)
        ]

    def brief(self, at: int, output: Output) -> Choice | None:
        if self._readings is None:
            return super().brief(at, output)
        self.usage.add(at, output.branch, len(output.tokens), output.cached_tokens)
        parts, output = self._read(self._readings[output.branch], output)
        if not parts and output.finish_reason is None:
            return None
        pieces = f'{{"index":{output.branch},"delta":{parts.delta()},"logprobs":null{ending(output)}}}'
        return Choice(at, output.branch, [pieces])

    def _read(self, reading: Reading, output: Output) -> tuple[Parts, Output]:
        """What an output's text is, and how it ended."""
        parts = reading.push(output.text, output.finish_reason is not None, output.tokens)
        if self.thinks:
            self.usage.thoughts[output.branch] = reading.thought
        return parts, output._replace(finish_reason=reading.finish_reason(output.finish_reason))

    async def choice(self, at: int, output: Output, whole: bool) -> Choice | None:
        """What `output` adds to its choice; None when there is nothing to show."""
        if self.plain and not whole:
            await self.pace(output.text)
            return self.brief(at, output)
        index = output.branch
        self._prompt_tops = output.prompt_tops or self._prompt_tops
        self.usage.add(at, index, len(output.tokens), output.cached_tokens)
        news = output.text or output.finish_reason or (output.tops and self.scored) or (output.tokens and self.with_ids)
        if not news:
            return None
        parts = Parts(output.text)
        if self._readings is not None:
            parts, output = self._read(self._readings[index], output)
        name, text = ("message", parts.message(self.before)) if whole else ("delta", parts.delta())
        await self.pace(text)
        scores = await self._content(output)
        pieces = [f'{{"index":{index},"{name}":', text, ',"logprobs":', *scores, ending(output)]
        if whole or self.with_ids:
            pieces += await self._ids("token_ids", output.tokens)
        return Choice(at, index, [*pieces, "}"])

    async def tail(self, whole: bool) -> Pieces:
        """The prompt's ids, and in a whole response its log-probabilities."""
        pieces = await self._ids("prompt_token_ids", self.prompts[0].ids) if whole or self.with_ids else []
        if not whole:
            return pieces
        k = self.request.prompt_logprobs
        scores = ["null"] if k is None else await prompt_logprobs(self._prompt_tops, k, self.words, self.pace)
        return [*pieces, ',"prompt_logprobs":', *scores]

    async def _content(self, output: Output) -> Pieces:
        """The log-probabilities of an output's tokens."""
        if not self.scored:
            return ["null"]
        slices = []
        for start in range(0, len(output.tops), SLICE):
            some = zip(output.tokens[start : start + SLICE], output.tops[start : start + SLICE])
            slices.append(",".join(self._entry(token, top) for token, top in some))
            await self.pace(slices[-1])
        return ['{"content":', *array(slices), ',"refusal":null}']

    def _entry(self, token: int, top: Top) -> str:
        k = self.named or self.request.top_logprobs or 0
        leaders = ",".join(f"{{{self._named(id, value)}}}" for id, value in zip(top.ids[:k], top.logprobs[:k]))
        return f'{{{self._named(token, top.logprob)},"top_logprobs":[{leaders}]}}'

    def _named(self, token: int, logprob: float) -> str:
        words = self.words
        return f'"token":{words.quoted(token)},"logprob":{finite(logprob)},"bytes":{words.bytes(token)}'


Renderer = CompletionRenderer | ChatRenderer


def last_said(request: ChatRequest) -> str:
    """The text of the last message, if the assistant said it. For messages that the template has taken."""
    last = request.messages[-1]
    content = last.get("content")
    if last.get("role") != "assistant":
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
