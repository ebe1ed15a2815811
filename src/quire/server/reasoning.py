"""Reasoning models over HTTP: how reasoning is separated from the answer, and which reasoning options a request has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import ANY_OUTPUT, PARAM_NAME, Structured
from quire.server.request_models import ChatRequest
from quire.server.request_params import structured_field
from quire.text.harmony import HarmonyParser
from quire.text.input_processor import Prompt
from quire.text.reasoning_parser import (
    OFF,
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    ReasoningStart,
    new_parser,
    reasoning_start,
)
from quire.text.tokenizer import Tokenizer

BUDGET_FIELD = "thinking_token_budget"
PROMPT_END_TOKENS = 64  # last tokens of a prompt that are searched for its last marker


class RequestReasoning(NamedTuple):
    """How the outputs of one request are parsed. `begin` and `end` are the token ids of the markers around reasoning.
    `token_bytes` returns the bytes of a token. `is_returned`: reasoning is part of the response."""

    format: ReasoningFormat
    start: ReasoningStart
    begin: tuple[int, ...]
    end: tuple[int, ...]
    token_bytes: Callable[[int], bytes]
    is_returned: bool = True

    def new_parser(self) -> ReasoningParser | HarmonyParser:
        """Return a parser for one output."""
        return new_parser(self.format, self.start)


class ReasoningTokenCounter:
    """Counts reasoning tokens without markers. It parses the text of each token by itself, so the count does not depend
    on how many tokens arrive at once."""

    def __init__(self, reasoning: RequestReasoning) -> None:
        self.count = 0
        self._parser, self._token_bytes = reasoning.new_parser(), reasoning.token_bytes
        self._pending = 0  # tokens that may belong to a marker

    def add(self, tokens: Iterable[int]) -> None:
        """Add tokens of the output."""
        parser = self._parser
        for token in tokens:
            if not parser.in_reasoning and parser.phase != "before":
                return
            begin_seen = parser.begin_seen
            parser.push(self._token_bytes(token).decode("latin-1"))
            if parser.in_marker:
                self._pending += 1
            elif parser.in_reasoning and parser.begin_seen == begin_seen:
                self.count, self._pending = self.count + self._pending + 1, 0
            else:
                self._pending = 0


class ModelReasoning:
    """The reasoning format of the model. `name` is the name of a format, or "off"."""

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.format = None if name == OFF or tokenizer is None else REASONING_FORMATS[name]
        self._begin: tuple[int, ...] = ()
        self._end: tuple[int, ...] = ()
        self._special = False
        self._end_is_exact = False  # the tokens of `end` are always the same
        if self.format is not None and tokenizer is not None:
            self._begin, self._end = (
                tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.format.begin, self.format.end)
            )
            self._special = not tokenizer.special_ids.isdisjoint((*self._begin, *self._end))
            ends = {*self._end[:1], *self._end[-1:]}  # added tokens, which no merge crosses
            self._end_is_exact = len(self._end) == 1 or (bool(ends) and ends <= tokenizer.added_tokens.keys())

    def for_request(
        self, request: ChatRequest, prompt: Prompt, continued: str | None = None
    ) -> RequestReasoning | None:
        """Return how the outputs of `prompt` are parsed, or None if they have no reasoning. `continued` is the message
        that they continue. Raise InputError for a budget if the model has no known reasoning format."""
        budget = request.thinking_token_budget
        if budget is not None and not 0 <= budget < 2**31:
            raise InputError(f"{BUDGET_FIELD} must be from 0 to {2**31 - 1}, got {str(budget)[:40]}", BUDGET_FIELD)
        if self.format is None or self._tokenizer is None:
            if budget is not None:
                raise InputError(
                    f"{BUDGET_FIELD}: this model's reasoning format is unknown; see --reasoning-parser", BUDGET_FIELD
                )
            return None
        text = prompt.text
        if text is None:  # the prompt was truncated
            text = self._tokenizer.decode(prompt.ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        start = reasoning_start(self.format, text, continued)
        if start == "closed":
            return None
        is_returned = request.include_reasoning is not False
        return RequestReasoning(self.format, start, self._begin, self._end, self._tokenizer.token_bytes, is_returned)

    def apply_to(
        self, params: SamplingParams, request: ChatRequest, reasoning: RequestReasoning | None
    ) -> SamplingParams:
        """Return `params` for outputs with reasoning. Structured output and a budget are enforced by a grammar, which
        needs the end marker as one token. Markers that are special tokens must be part of the text."""
        if reasoning is None:
            return params
        budget, form = request.thinking_token_budget, params.structured
        if form is None and budget is None:
            special = self._special and request.skip_special_tokens is None
            return replace(params, skip_special_tokens=False) if special else params
        field = structured_field(request) if budget is None else BUDGET_FIELD
        if not self._end_is_exact and budget is None and reasoning.start == "maybe":
            return params  # the structured output starts at the first token, without reasoning
        if not self._end_is_exact:
            raise InputError(
                f"{field}: {reasoning.format.end!r} is not one token of this model, so a grammar can't find it", field
            )
        opening = reasoning.begin if reasoning.start == "maybe" else ()
        form = form or Structured(ANY_OUTPUT, "", self._end)
        try:
            params = replace(params, structured=replace(form, after=self._end, opening=opening, budget=budget))
        except InputError as error:
            raise InputError(str(error).replace(PARAM_NAME, field), error.param) from error
        return replace(params, skip_special_tokens=False) if self._special else params
