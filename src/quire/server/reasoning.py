"""Reasoning models over HTTP: where an output's thoughts are told from its answer, and what a request asks of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError
from quire.server.protocol import ChatRequest
from quire.text.prompts import Prompt
from quire.text.thoughts import FORMATS, OFF, Opening, ThoughtFormat, Thoughts, opening_of
from quire.text.tokenizer import Tokenizer
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.structured import ANY, NAME, Structured

BUDGET = "thinking_token_budget"


class Thinking(NamedTuple):
    """How the outputs of one request are read. `begin`, `end`: markers' token ids. `shown`: thoughts are returned."""

    format: ThoughtFormat
    opening: Opening
    begin: tuple[int, ...]
    end: tuple[int, ...]
    shown: bool = True

    def reader(self) -> Thoughts:
        """Of one output."""
        return Thoughts(self.format, self.opening)

    def counter(self) -> Counter:
        """Of one output's tokens."""
        return Counter(self)


class Counter:
    """Counts tokens of thoughts, markers aside: by their ids where these are one each, else as the reader is thinking
    when they come."""

    def __init__(self, thinking: Thinking) -> None:
        self.count = 0
        self._begin, self._end = thinking.begin, thinking.end
        self._on, self._over = thinking.opening == "open", False

    def add(self, tokens: Iterable[int], reader: Thoughts) -> None:
        """More of the output, which `reader` has read."""
        if len(self._end) != 1:
            self.count += sum(1 for _ in tokens) if reader.thinking else 0
            return
        for token in tokens:
            if (token,) == self._end:
                self._over = True
            elif (token,) == self._begin:
                self._on = True
            elif self._on and not self._over:
                self.count += 1


class Reasoning:
    """What a server knows of its model's thoughts. `name` is a format's, or "off"."""

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self.format = None if name == OFF or tokenizer is None else FORMATS[name]
        self._begin: tuple[int, ...] = ()
        self._end: tuple[int, ...] = ()
        self._special = False
        if self.format is not None and tokenizer is not None:
            self._begin, self._end = (
                tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.format.begin, self.format.end)
            )
            self._special = not tokenizer.special_ids.isdisjoint((*self._begin, *self._end))

    def of(self, request: ChatRequest, prompt: Prompt) -> Thinking | None:
        """How the outputs of `prompt` are read; None: they have no thoughts. InputError for a budget where there are
        none to bound."""
        budget = request.thinking_token_budget
        if budget is not None and not 0 <= budget < 2**31:
            raise InputError(f"{BUDGET} must be from 0 to {2**31 - 1}, got {str(budget)[:40]}", BUDGET)
        if self.format is None:
            if budget is not None:
                raise InputError(f"{BUDGET}: nothing is known of this model's thoughts; see --reasoning-parser", BUDGET)
            return None
        opening = opening_of(self.format, prompt.text or "", bool(request.continue_final_message))
        if opening == "closed":
            return None
        return Thinking(self.format, opening, self._begin, self._end, request.include_reasoning is not False)

    def applied(self, params: SamplingParams, request: ChatRequest, thinking: Thinking | None) -> SamplingParams:
        """`params` of outputs with thoughts: a form, and a budget, which a grammar sees to, need the marker that ends
        them; markers that are special tokens are needed in the text."""
        if thinking is None:
            return params
        budget, form = request.thinking_token_budget, params.structured
        if form is None and budget is None:
            special = self._special and request.skip_special_tokens is None
            return replace(params, skip_special_tokens=False) if special else params
        field = NAME if budget is None else BUDGET
        if len(self._end) != 1:
            raise InputError(f"{field}: {thinking.format.end!r} is no token here, so no grammar knows its end", field)
        opening = thinking.begin if thinking.opening == "maybe" else ()
        form = form or Structured(ANY, "", self._end)
        try:
            params = replace(params, structured=replace(form, after=self._end, opening=opening, budget=budget))
        except InputError as error:
            raise InputError(str(error).replace(NAME, field), error.param) from error
        return replace(params, skip_special_tokens=False) if self._special else params
