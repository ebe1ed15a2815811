"""Reasoning models over HTTP: where an output's thoughts are told from its answer, and what a request asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import ANY_OUTPUT, PARAM_NAME, Structured
from quire.server.request_models import ChatRequest
from quire.server.structured import structured_field
from quire.text.input_processor import Prompt
from quire.text.reasoning_parser import (
    OFF,
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    ReasoningStart,
    reasoning_start,
)
from quire.text.tokenizer import Tokenizer

BUDGET_FIELD = "thinking_token_budget"
PROMPT_END_TOKENS = 64  # tokens of a prompt, in which its last marker is looked for


class RequestReasoning(NamedTuple):
    """How the outputs of one request are read. `begin`, `end`: markers' token ids. `token_bytes`: the bytes of a token.
    `is_returned`: thoughts are returned."""

    format: ReasoningFormat
    start: ReasoningStart
    begin: tuple[int, ...]
    end: tuple[int, ...]
    token_bytes: Callable[[int], bytes]
    is_returned: bool = True

    def new_parser(self) -> ReasoningParser:
        """Of one output."""
        return ReasoningParser(self.format, self.start)

    def new_counter(self) -> ReasoningTokenCounter:
        """Of one output's tokens."""
        return ReasoningTokenCounter(self)


class ReasoningTokenCounter:
    """Counts tokens of thoughts, markers aside, by what each spells: the same however many come at once."""

    def __init__(self, reasoning: RequestReasoning) -> None:
        self.count = 0
        self._parser, self._token_bytes = reasoning.new_parser(), reasoning.token_bytes
        self._pending = 0  # tokens that may be a marker's

    def add(self, tokens: Iterable[int]) -> None:
        """More of the output."""
        reader = self._parser
        for token in tokens:
            if not reader.in_reasoning and reader.phase != "before":
                return
            marked = reader.begin_seen
            reader.push(self._token_bytes(token).decode("latin-1"))
            if reader.in_marker:
                self._pending += 1
            elif reader.in_reasoning and reader.begin_seen == marked:
                self.count, self._pending = self.count + self._pending + 1, 0
            else:
                self._pending = 0


class ModelReasoning:
    """What a server knows of its model's thoughts. `name` is a format's, or "off"."""

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.format = None if name == OFF or tokenizer is None else REASONING_FORMATS[name]
        self._begin: tuple[int, ...] = ()
        self._end: tuple[int, ...] = ()
        self._special = False
        if self.format is not None and tokenizer is not None:
            self._begin, self._end = (
                tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.format.begin, self.format.end)
            )
            self._special = not tokenizer.special_ids.isdisjoint((*self._begin, *self._end))

    def for_request(
        self, request: ChatRequest, prompt: Prompt, continued: str | None = None
    ) -> RequestReasoning | None:
        """How the outputs of `prompt` are read; None: they have no thoughts. `continued`: the message that they go on
        with. InputError for a budget where there are none to bound."""
        budget = request.thinking_token_budget
        if budget is not None and not 0 <= budget < 2**31:
            raise InputError(f"{BUDGET_FIELD} must be from 0 to {2**31 - 1}, got {str(budget)[:40]}", BUDGET_FIELD)
        if self.format is None or self._tokenizer is None:
            if budget is not None:
                raise InputError(
                    f"{BUDGET_FIELD}: nothing is known of this model's thoughts; see --reasoning-parser", BUDGET_FIELD
                )
            return None
        text = prompt.text
        if text is None:  # it was cut
            text = self._tokenizer.decode(prompt.ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        opening = reasoning_start(self.format, text, continued)
        if opening == "closed":
            return None
        shown = request.include_reasoning is not False
        return RequestReasoning(self.format, opening, self._begin, self._end, self._tokenizer.token_bytes, shown)

    def apply_to(
        self, params: SamplingParams, request: ChatRequest, reasoning: RequestReasoning | None
    ) -> SamplingParams:
        """`params` of outputs with thoughts: a form, and a budget, which a grammar sees to, need the marker that ends
        them; markers that are special tokens are needed in the text."""
        if reasoning is None:
            return params
        budget, form = request.thinking_token_budget, params.structured
        if form is None and budget is None:
            special = self._special and request.skip_special_tokens is None
            return replace(params, skip_special_tokens=False) if special else params
        field = structured_field(request) if budget is None else BUDGET_FIELD
        if len(self._end) != 1 and budget is None and reasoning.start == "maybe":
            return params  # the form from the first token on, and no thoughts
        if len(self._end) != 1:
            raise InputError(f"{field}: {reasoning.format.end!r} is no token here, so no grammar knows its end", field)
        opening = reasoning.begin if reasoning.start == "maybe" else ()
        form = form or Structured(ANY_OUTPUT, "", self._end)
        try:
            params = replace(params, structured=replace(form, after=self._end, opening=opening, budget=budget))
        except InputError as error:
            raise InputError(str(error).replace(PARAM_NAME, field), error.param) from error
        return replace(params, skip_special_tokens=False) if self._special else params
