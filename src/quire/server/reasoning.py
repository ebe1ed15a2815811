"""Reasoning models over HTTP: where an output's thoughts are told from its answer, and what a request asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError
from quire.server.protocol import ChatRequest
from quire.server.structured import field_of
from quire.text.prompts import Prompt
from quire.text.thoughts import FORMATS, OFF, Opening, ThoughtFormat, Thoughts, opening_of
from quire.text.tokenizer import Tokenizer
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.structured import ANY, NAME, Structured

BUDGET = "thinking_token_budget"
ENDING = 64  # tokens of a prompt, in which its last marker is looked for


class Thinking(NamedTuple):
    """How the outputs of one request are read. `begin`, `end`: markers' token ids. `spell`: the bytes of a token.
    `shown`: thoughts are returned."""

    format: ThoughtFormat
    opening: Opening
    begin: tuple[int, ...]
    end: tuple[int, ...]
    spell: Callable[[int], bytes]
    shown: bool = True

    def reader(self) -> Thoughts:
        """Of one output."""
        return Thoughts(self.format, self.opening)

    def counter(self) -> Counter:
        """Of one output's tokens."""
        return Counter(self)


class Counter:
    """Counts tokens of thoughts, markers aside, by what each spells: the same however many come at once."""

    def __init__(self, thinking: Thinking) -> None:
        self.count = 0
        self._reader, self._spell = thinking.reader(), thinking.spell
        self._held = 0  # tokens that may be a marker's

    def add(self, tokens: Iterable[int]) -> None:
        """More of the output."""
        reader = self._reader
        for token in tokens:
            if not reader.thinking and reader.phase != "before":
                return
            marked = reader.marked
            reader.push(self._spell(token).decode("latin-1"))
            if reader.marking:
                self._held += 1
            elif reader.thinking and reader.marked == marked:
                self.count, self._held = self.count + self._held + 1, 0
            else:
                self._held = 0


class Reasoning:
    """What a server knows of its model's thoughts. `name` is a format's, or "off"."""

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.format = None if name == OFF or tokenizer is None else FORMATS[name]
        self._begin: tuple[int, ...] = ()
        self._end: tuple[int, ...] = ()
        self._special = False
        if self.format is not None and tokenizer is not None:
            self._begin, self._end = (
                tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.format.begin, self.format.end)
            )
            self._special = not tokenizer.special_ids.isdisjoint((*self._begin, *self._end))

    def of(self, request: ChatRequest, prompt: Prompt, continued: str | None = None) -> Thinking | None:
        """How the outputs of `prompt` are read; None: they have no thoughts. `continued`: the message that they go on
        with. InputError for a budget where there are none to bound."""
        budget = request.thinking_token_budget
        if budget is not None and not 0 <= budget < 2**31:
            raise InputError(f"{BUDGET} must be from 0 to {2**31 - 1}, got {str(budget)[:40]}", BUDGET)
        if self.format is None or self._tokenizer is None:
            if budget is not None:
                raise InputError(f"{BUDGET}: nothing is known of this model's thoughts; see --reasoning-parser", BUDGET)
            return None
        text = prompt.text
        if text is None:  # it was cut
            text = self._tokenizer.decode(prompt.ids[-ENDING:], skip_special_tokens=False)
        opening = opening_of(self.format, text, continued)
        if opening == "closed":
            return None
        shown = request.include_reasoning is not False
        return Thinking(self.format, opening, self._begin, self._end, self._tokenizer.token_bytes, shown)

    def applied(self, params: SamplingParams, request: ChatRequest, thinking: Thinking | None) -> SamplingParams:
        """`params` of outputs with thoughts: a form, and a budget, which a grammar sees to, need the marker that ends
        them; markers that are special tokens are needed in the text."""
        if thinking is None:
            return params
        budget, form = request.thinking_token_budget, params.structured
        if form is None and budget is None:
            special = self._special and request.skip_special_tokens is None
            return replace(params, skip_special_tokens=False) if special else params
        field = field_of(request) if budget is None else BUDGET
        if len(self._end) != 1 and budget is None and thinking.opening == "maybe":
            return params  # the form from the first token on, and no thoughts
        if len(self._end) != 1:
            raise InputError(f"{field}: {thinking.format.end!r} is no token here, so no grammar knows its end", field)
        opening = thinking.begin if thinking.opening == "maybe" else ()
        form = form or Structured(ANY, "", self._end)
        try:
            params = replace(params, structured=replace(form, after=self._end, opening=opening, budget=budget))
        except InputError as error:
            raise InputError(str(error).replace(NAME, field), error.param) from error
        return replace(params, skip_special_tokens=False) if self._special else params
