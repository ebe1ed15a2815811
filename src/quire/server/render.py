"""Render outputs as OpenAI's JSON. One renderer makes the chunks of a stream and, from merged outputs, a whole
response.

What depends only on a prompt is rendered once for all its choices. Long lists are rendered in slices (json_pieces.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from quire.core.outputs import BranchOutput
from quire.core.request import DraftCounts
from quire.protocol.step_plan import TopLogprobs
from quire.server.answer_size import MAX_BYTES
from quire.server.errors import to_failure
from quire.server.generation import Generation
from quire.server.json_pieces import (
    SHORT_CHARS,
    SLICE_ENTRIES,
    JsonPieces,
    TokenIdStrings,
    TokenStrings,
    WritePace,
    WriterTurns,
    ids_json,
    json_array,
    logprob_json,
)
from quire.server.message_parser import ChoiceParser, MessageParts
from quire.server.output_queue import IndexedOutputs, OutputQueue
from quire.server.request_models import ChatRequest, CompletionRequest, StreamOptions
from quire.server.request_params import last_assistant_text
from quire.text.input_processor import InputProcessor, Prompt

DONE = b"data: [DONE]\n\n"


def sse_event(payload: dict[str, Any]) -> bytes:
    """Return a server-sent event. The JSON is ASCII, so it has no line breaks."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


class UsageCounter:
    """Counts the tokens of one HTTP request, for all prompts and branches."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompt_lengths = [len(prompt.ids) for prompt in prompts]
        self.completion_tokens: dict[int, int] = {}  # by choice
        self.cached_tokens: dict[int, int] = {}  # by prompt
        self.drafts: dict[int, DraftCounts] = {}  # by prompt; empty without draft tokens
        self.reasoning_tokens: dict[int, int] = {}  # by choice; empty if the model has no reasoning

    def add(self, at: int, choice: int, output: BranchOutput) -> None:
        """Count an output of a choice of prompt `at`."""
        self.completion_tokens[choice] = self.completion_tokens.get(choice, 0) + len(output.tokens)
        self.cached_tokens[at] = output.cached_tokens
        if output.drafts.drafted:
            self.drafts[at] = output.drafts

    def choice_json(self, at: int, choice: int) -> str:
        """Return the usage of one choice so far as JSON."""
        completion, cached = self.completion_tokens.get(choice, 0), self.cached_tokens.get(at, 0)
        drafts = (self.drafts[at],) if at in self.drafts else ()
        return self._to_json(self.prompt_lengths[at], completion, cached, self.reasoning_tokens.get(choice, 0), drafts)

    def total_json(self) -> str:
        """Return OpenAI's usage object as JSON."""
        completion, cached = sum(self.completion_tokens.values()), sum(self.cached_tokens.values())
        reasoning, drafts = sum(self.reasoning_tokens.values()), tuple(self.drafts.values())
        return self._to_json(sum(self.prompt_lengths), completion, cached, reasoning, drafts)

    def _to_json(
        self, prompt: int, completion: int, cached: int, reasoning: int, drafts: tuple[DraftCounts, ...]
    ) -> str:
        parts = [f'"reasoning_tokens":{reasoning}'] if self.reasoning_tokens else []
        if drafts:
            # branches that best_of does not return had accepted tokens, too
            accepted = min(sum(counts.accepted for counts in drafts), completion)
            rejected = sum(counts.drafted for counts in drafts) - accepted
            parts.append(f'"accepted_prediction_tokens":{accepted},"rejected_prediction_tokens":{rejected}')
        details = f',"completion_tokens_details":{{{",".join(parts)}}}' if parts else ""
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{prompt + completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{cached}}}{details}}}'
        )


class ChoicePieces(NamedTuple):
    """The JSON that an output adds to choice `index`, which continues prompt `at`."""

    at: int
    index: int  # type: ignore[assignment]  # hides tuple's method, which is not used
    pieces: JsonPieces


class LogprobLists(NamedTuple):
    """The parallel lists of a completion's log-probabilities: `tokens`, `token_logprobs`, `top_logprobs` and
    `text_offset`, each in slices. `next_offset` is where the text of the next token begins."""

    columns: tuple[JsonPieces, ...]
    next_offset: int

    def concat(self, other: LogprobLists) -> LogprobLists:
        """Return the lists with those of `other` appended."""
        return LogprobLists(tuple(mine + more for mine, more in zip(self.columns, other.columns)), other.next_offset)

    def to_json(self) -> JsonPieces:
        """Return the object of the legacy format."""
        pieces: JsonPieces = []
        for name, slices in zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), self.columns):
            pieces += [f'{"," if pieces else "{"}"{name}":', *json_array(slices)]
        return [*pieces, "}"]


def finish_json(output: BranchOutput) -> str:
    """Return the members of JSON that say how a choice ended, null if it has not."""
    if output.finish_reason is None and output.stop_reason is None:
        return ',"finish_reason":null,"stop_reason":null'
    return f',"finish_reason":{json.dumps(output.finish_reason)},"stop_reason":{json.dumps(output.stop_reason)}'


class RenderSettings:
    """What all renderers of a server share: the model's name, the strings of its tokens, and the turns of writers."""

    def __init__(self, model: str, input_processor: InputProcessor) -> None:
        self.model, self.input_processor, self.writer_turns = model, input_processor, WriterTurns()
        self.token_strings, self.token_id_strings = TokenStrings(input_processor), TokenIdStrings(input_processor)


class Renderer:
    """Renders the outputs of a request as OpenAI's choices. The index of a choice is prompt * n + branch.

    A stream consists of `opening_events`, an event for each output (`choice` and `event`; `choice_nowait` if
    `can_write_now`), `closing_events` and `final_event`. With usage every chunk has a usage: null except in the last
    one, or that of the choice so far.
    """

    object_names = ("", "")  # of a response, and of a chunk
    text_wrapper = ("", "")  # the JSON before and after a chunk's text, between its index and its log-probabilities
    has_logprobs = False

    def __init__(self, generation: Generation, settings: RenderSettings) -> None:
        self.request = request = generation.request
        self.id, self.prompts, self.usage = generation.id, generation.prompts, UsageCounter(generation.prompts)
        # A stream's chunks are not held in memory, so their number is not limited.
        self.pace = WritePace(settings.writer_turns, math.inf if request.stream else MAX_BYTES)
        by_id = request.return_tokens_as_token_ids
        self.token_strings = settings.token_id_strings if by_id else settings.token_strings
        self.input_processor, self.n = settings.input_processor, request.n or 1
        self.returns_ids, self.num_logprob_ids = bool(request.return_token_ids), len(request.logprob_token_ids or ())
        options = request.stream_options or StreamOptions()
        self._usage = bool(options.include_usage)
        self._continuous = self._usage and bool(options.continuous_usage_stats)
        model = json.dumps(settings.model)
        self._head = f'"created":{int(time.time())},"model":{model},"system_fingerprint":null,"choices":['
        self._chunk_head = f"data: {self._head_of(self.object_names[1])}"

    def _head_of(self, object_name: str) -> str:
        """Return the JSON of a response or chunk up to its first choice."""
        return f'{{"id":{json.dumps(self.id)},"object":"{object_name}",{self._head}'

    async def whole(self, outputs: OutputQueue) -> JsonPieces:
        """Return the whole answer, once all outputs are complete."""
        pieces = [self._head_of(self.object_names[0])]
        for at, output in await outputs.collect():
            choice = await self.choice(at, output, whole=True)
            if choice is not None:
                pieces += ([","] if len(pieces) > 1 else []) + choice.pieces
        return [*pieces, "]", *await self.extra_members(whole=True), f',"usage":{self.usage.total_json()}}}']

    async def opening_events(self) -> list[JsonPieces]:
        """Return the events before any output. The first one has the members of `extra_members`."""
        tail = await self.extra_members(whole=False)
        openings = self.opening_choices()
        return [self.event(opening, () if at else tail) for at, opening in enumerate(openings)]

    def event(self, choice: ChoicePieces, tail: Sequence[str] = ()) -> JsonPieces:
        """Return the event of a choice. `tail` is JSON that follows the choices."""
        usage = ""
        if self._usage:
            so_far = self.usage.choice_json(choice.at, choice.index) if self._continuous else "null"
            usage = f',"usage":{so_far}'
        return [self._chunk_head, *choice.pieces, "]", *tail, usage, "}\n\n"]

    def closing_events(self) -> JsonPieces:
        """Return the events after all outputs."""
        return [self._chunk_head, f'],"usage":{self.usage.total_json()}}}\n\n'] if self._usage else []

    def final_event(self, error: BaseException | None) -> bytes:
        """Return the last event of the stream: [DONE], or the error."""
        return DONE if error is None else sse_event(to_failure(error).body())

    @property
    def is_text_only(self) -> bool:
        """Return True if the chunks of a stream have only text. Then `choice_nowait` can render them."""
        return not (self.has_logprobs or self.returns_ids or self.request.echo)

    def can_write_now(self, outputs: IndexedOutputs) -> bool:
        """Return True if the events of `outputs` are short."""
        return sum(len(output.text) for _, output in outputs) <= SHORT_CHARS

    def choice_nowait(self, at: int, output: BranchOutput) -> ChoicePieces | None:
        """Return the chunk of a text-only stream for an output, or None if it adds nothing. Like `choice`, without
        awaiting."""
        index = at * self.n + output.branch
        self.usage.add(at, index, output)
        if not output.text and output.finish_reason is None:
            return None
        before, after = self.text_wrapper
        text = quoted(output.text)
        return ChoicePieces(at, index, [f'{{"index":{index},{before}{text}{after}null{finish_json(output)}}}'])

    async def choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        """Return the JSON that `output` adds to its choice, or None if it adds nothing."""
        if not self.is_text_only or whole:
            return await self.full_choice(at, output, whole)
        await self.pace(output.text)
        return self.choice_nowait(at, output)

    async def full_choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        """Do what `choice` does for a whole answer or one with more than text."""
        raise NotImplementedError

    def opening_choices(self) -> list[ChoicePieces]:
        """Return the chunks that come before any output."""
        return []

    async def extra_members(self, whole: bool) -> JsonPieces:
        """Return the members of a response in addition to its choices and usage. A stream has them in its first
        chunk."""
        return []

    def _adds_something(self, output: BranchOutput) -> bool:
        return bool(
            output.text
            or output.finish_reason
            or (output.top_logprobs and self.has_logprobs)
            or (output.tokens and self.returns_ids)
        )

    async def _ids_member(self, name: str, ids: Iterable[int]) -> JsonPieces:
        return [f',"{name}":', *(await ids_json(ids, self.pace) if self.returns_ids else ["null"])]

    async def _prompt_logprobs_json(self, tops: Sequence[TopLogprobs]) -> JsonPieces:
        """Return vLLM's prompt_logprobs: null for the first prompt token, and for each other one an object {id:
        {logprob, rank, decoded_token}} with that token and the most likely ones."""
        if self.request.prompt_logprobs is None:
            return ["null"]
        slices = ["null"]
        for start in range(0, len(tops), SLICE_ENTRIES):
            slices.append(",".join(map(self._prompt_token_json, tops[start : start + SLICE_ENTRIES])))
            await self.pace(slices[-1])
        return json_array(slices)

    def _prompt_token_json(self, top: TopLogprobs) -> str:
        k = self.request.prompt_logprobs
        ranked = {id: (value, rank) for rank, (id, value) in enumerate(zip(top.ids[:k], top.logprobs), 1)}
        named = {top.token: (top.logprob, top.rank), **ranked}
        name = self.token_strings.token_json
        return "{" + ",".join(
            f'"{id}":{{"logprob":{logprob_json(value)},"rank":{rank},"decoded_token":{name(id)}}}'
            for id, (value, rank) in named.items()
        ) + "}"  # fmt: skip


class CompletionRenderer(Renderer):
    """Renders /v1/completions."""

    object_names = ("text_completion", "text_completion")
    text_wrapper = '"text":', ',"logprobs":'
    request: CompletionRequest

    def __init__(self, generation: Generation, settings: RenderSettings) -> None:
        super().__init__(generation, settings)
        request = self.request
        self.has_logprobs = request.logprobs is not None or self.num_logprob_ids > 0
        self._offsets: dict[int, int] = {}  # by choice, where the next token's text begins
        self._prompt_tops: dict[int, tuple[TopLogprobs, ...]] = {}  # a prompt is scored once, before its branches
        self._echoed: dict[int, tuple[str, LogprobLists]] = {}
        self._prompt_scores: dict[int, JsonPieces] = {}

    async def full_choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        index = at * self.n + output.branch
        first = index not in self._offsets
        if output.prompt_logprobs is not None:
            self._prompt_tops.setdefault(at, output.prompt_logprobs)
        self.usage.add(at, index, output)
        echoed, scored = first and bool(self.request.echo), self.has_logprobs
        offset = self._offsets.setdefault(index, 0)
        if not (self._adds_something(output) or echoed):
            return None
        text, lists = quoted(output.text), LogprobLists(([], [], [], []), offset)
        if echoed:
            before, lists = await self._echo(at)
            text = before[:-1] + text[1:]
        if scored:
            scores, k = list(zip(output.tokens, output.top_logprobs)), self.num_logprob_ids or self.request.logprobs
            lists = lists.concat(await self._logprob_lists(scores, k or 0, lists.next_offset))
            self._offsets[index] = lists.next_offset
        await self.pace(text)
        before, after = self.text_wrapper
        logprobs = lists.to_json() if scored else ["null"]
        pieces = [f'{{"index":{index},{before}', text, after, *logprobs, finish_json(output)]
        if whole or self.returns_ids:
            pieces += await self._ids_member("token_ids", output.tokens)
            if whole or first:
                pieces += await self._ids_member("prompt_token_ids", self.prompts[at].ids)
        if whole:
            pieces += [',"prompt_logprobs":', *await self._prompt_scores_of(at)]
        return ChoicePieces(at, index, [*pieces, "}"])

    async def _echo(self, at: int) -> tuple[str, LogprobLists]:
        """Return a prompt's text as JSON, and its lists of log-probabilities."""
        if at in self._echoed:
            for slices in self._echoed[at][1].columns:
                self.pace.count(*slices)
            return self._echoed[at]
        prompt, tokenizer = self.prompts[at], self.input_processor.tokenizer
        text = prompt.text
        if text is None:
            decode = partial(tokenizer.decode, prompt.ids, skip_special_tokens=False) if tokenizer is not None else str
            text = await self.input_processor.offload(len(prompt.ids), decode)
        scored: list[tuple[int, TopLogprobs | None]] = []
        if self.has_logprobs:  # the first token of a prompt has no probability
            scored = [(prompt.ids[0], None), *zip(prompt.ids[1:], self._prompt_tops.get(at, ()))]
        self._echoed[at] = json.dumps(text), await self._logprob_lists(scored, self.request.logprobs or 0, 0)
        return self._echoed[at]

    async def _prompt_scores_of(self, at: int) -> JsonPieces:
        if at in self._prompt_scores:
            self.pace.count(*self._prompt_scores[at])
        else:
            self._prompt_scores[at] = await self._prompt_logprobs_json(self._prompt_tops.get(at, ()))
        return self._prompt_scores[at]

    async def _logprob_lists(
        self, scored: Sequence[tuple[int, TopLogprobs | None]], k: int, offset: int
    ) -> LogprobLists:
        """Return the lists of tokens with their log-probabilities, and up to `k` alternatives for each."""
        columns: tuple[JsonPieces, ...] = ([], [], [], [])
        for start in range(0, len(scored), SLICE_ENTRIES):
            part = scored[start : start + SLICE_ENTRIES]
            ends = list(accumulate((self.token_strings.length(token) for token, _ in part), initial=offset))
            offset = ends.pop()
            entries = (
                (self.token_strings.logprob_name(token) for token, _ in part),
                ("null" if top is None else logprob_json(top.logprob) for _, top in part),
                ("null" if top is None else self._alternatives(top, k) for _, top in part),
                map(str, ends),
            )
            for column, texts in zip(columns, entries):
                column.append(",".join(texts))
            await self.pace(*(column[-1] for column in columns))
        return LogprobLists(columns, offset)

    def _alternatives(self, top: TopLogprobs, k: int) -> str:
        """Return the sampled token and the `k` most likely ones, with their log-probabilities, by name. If tokens have
        the same name, the first one gets it and the others are called "token_id:N", so that none is lost."""
        named: dict[str, str] = {}
        for id, value in {top.token: top.logprob, **dict(zip(top.ids[:k], top.logprobs[:k]))}.items():
            name = self.token_strings.logprob_name(id)
            named[f'"token_id:{id}"' if name in named else name] = logprob_json(value)
        return "{" + ",".join(f"{name}:{value}" for name, value in named.items()) + "}"


class ChatRenderer(Renderer):
    """Renders /v1/chat/completions. If the request has `echo`, the entry of `echoed_texts` for a conversation precedes
    its outputs."""

    object_names = ("chat.completion", "chat.completion.chunk")
    text_wrapper = '"delta":{"content":', '},"logprobs":'
    request: ChatRequest

    def __init__(self, generation: Generation, settings: RenderSettings) -> None:
        super().__init__(generation, settings)
        request, tool_choice, reasoning = self.request, generation.tool_choice, generation.reasoning
        self.has_reasoning = reasoning is not None
        is_parsed = self.has_reasoning or tool_choice.mode != "none"
        choices = self.n * len(self.prompts)
        self._parsers = [ChoiceParser(tool_choice, reasoning) for _ in range(choices)] if is_parsed else None
        self.echoed_texts = [last_assistant_text(each) if request.echo else "" for each in request.conversations]
        self.has_logprobs = bool(request.logprobs) or self.num_logprob_ids > 0
        self._prompt_tops: tuple[TopLogprobs, ...] = ()

    def opening_choices(self) -> list[ChoicePieces]:
        """Return the first chunk of each choice, which has the role, and with `echo` a second one with the continued
        message."""
        deltas = ['{"role":"assistant","content":""}']
        if self.echoed_texts[0]:
            deltas.append(f'{{"content":{json.dumps(self.echoed_texts[0])}}}')
        return [
            ChoicePieces(0, index, [f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'])
            for delta in deltas
            for index in range(self.n)
        ]

    def choice_nowait(self, at: int, output: BranchOutput) -> ChoicePieces | None:
        if self._parsers is None:
            return super().choice_nowait(at, output)
        self.usage.add(at, output.branch, output)
        parts, output = self._parse(self._parsers[output.branch], output)
        if not parts and output.finish_reason is None:
            return None
        pieces = f'{{"index":{output.branch},"delta":{parts.to_delta()},"logprobs":null{finish_json(output)}}}'
        return ChoicePieces(at, output.branch, [pieces])

    def _parse(self, parser: ChoiceParser, output: BranchOutput) -> tuple[MessageParts, BranchOutput]:
        """Return the parts of the message in an output, and the output with its finish reason in OpenAI's format."""
        parts = parser.push(output.text, output.finish_reason is not None, output.tokens)
        if self.has_reasoning:
            self.usage.reasoning_tokens[output.branch] = parser.reasoning_tokens
        return parts, output._replace(finish_reason=parser.finish_reason(output.finish_reason))

    async def full_choice(self, at: int, output: BranchOutput, whole: bool) -> ChoicePieces | None:
        index = at * self.n + output.branch
        self._prompt_tops = output.prompt_logprobs or self._prompt_tops
        self.usage.add(at, index, output)
        if not self._adds_something(output):
            return None
        parts = MessageParts(output.text)
        if self._parsers is not None:
            parts, output = self._parse(self._parsers[index], output)
        name, text = ("message", parts.to_message(self.echoed_texts[at])) if whole else ("delta", parts.to_delta())
        await self.pace(text)
        scores = await self._logprobs_content(output)
        pieces = [f'{{"index":{index},"{name}":', text, ',"logprobs":', *scores, finish_json(output)]
        if whole or self.returns_ids:
            pieces += await self._ids_member("token_ids", output.tokens)
        return ChoicePieces(at, index, [*pieces, "}"])

    async def extra_members(self, whole: bool) -> JsonPieces:
        """Return the prompt's ids, and for a whole response its log-probabilities. A batch has neither."""
        if len(self.prompts) > 1:
            return [',"prompt_token_ids":null,"prompt_logprobs":null']
        pieces = await self._ids_member("prompt_token_ids", self.prompts[0].ids) if whole or self.returns_ids else []
        if not whole:
            return pieces
        return [*pieces, ',"prompt_logprobs":', *await self._prompt_logprobs_json(self._prompt_tops)]

    async def _logprobs_content(self, output: BranchOutput) -> JsonPieces:
        """Return the log-probabilities of an output's tokens."""
        if not self.has_logprobs:
            return ["null"]
        slices = []
        for start in range(0, len(output.top_logprobs), SLICE_ENTRIES):
            part = zip(output.tokens[start : start + SLICE_ENTRIES], output.top_logprobs[start : start + SLICE_ENTRIES])
            slices.append(",".join(self._token_entry(token, top) for token, top in part))
            await self.pace(slices[-1])
        return ['{"content":', *json_array(slices), ',"refusal":null}']

    def _token_entry(self, token: int, top: TopLogprobs) -> str:
        k = self.num_logprob_ids or self.request.top_logprobs or 0
        values = {token: top.logprob} if self.num_logprob_ids else {}
        values |= zip(top.ids[:k], top.logprobs[:k])
        leaders = ",".join(f"{{{self._token_members(id, value)}}}" for id, value in values.items())
        return f'{{{self._token_members(token, top.logprob)},"top_logprobs":[{leaders}]}}'

    def _token_members(self, token: int, logprob: float) -> str:
        words = self.token_strings
        return f'"token":{words.token_json(token)},"logprob":{logprob_json(logprob)},"bytes":{words.bytes_json(token)}'
