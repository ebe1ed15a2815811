"""How much one answer may hold. Each of n, prompts, max_tokens and logprobs is bounded by itself; here their product
is, before anything is queued.

An answer's tokens take some 5 to 15 bytes of JSON each, its log-probabilities some 60 to 110, so these limits keep it
below MAX_BYTES; tokens of unusual length can't break that either, since the answer's writer counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError, Overloaded
from quire.vocabulary.params import SamplingParams

MAX_TOKENS = 1 << 22  # in one answer
MAX_LOGPROBS = 1 << 19  # in one answer
MAX_NUMBERS = 1 << 22  # of embeddings in one answer
NUMBERS = 8  # of embeddings take the room of one log-probability
MAX_BYTES = 64_000_000  # of one answer
MAX_HELD = 16 * MAX_LOGPROBS  # in the answers under way
MAX_HELD_BYTES = 16 * MAX_BYTES  # of answers that are written and not yet sent


class Size(NamedTuple):
    """What an answer holds at the most: tokens, and log-probabilities of tokens."""

    tokens: int
    logprobs: int


class Shown(NamedTuple):
    """What of a prompt an answer shows: in how many `copies`, its text or ids, and how many log-probabilities a token
    (0: none)."""

    copies: int = 0
    text: bool = False
    logprobs: int = 0


def _each(params: SamplingParams) -> int:
    return 0 if params.top < 0 else 1 + (len(params.logprob_token_ids or ()) or params.top)


def size_of(params: SamplingParams, prompts: Sequence[int], max_len: int, shown: Shown) -> Size:
    """The size of the answer to prompts of these lengths. Branches that aren't returned count too: they are held."""
    most = max_len if params.max_tokens is None else params.max_tokens
    output = params.width * sum(min(most, max(max_len - length, 0)) for length in prompts)
    scored = shown.copies * sum(prompts)
    return Size(output + scored * shown.text, output * _each(params) + scored * shown.logprobs)


def bounded(params: SamplingParams, prompts: Sequence[int], max_len: int, shown: Shown) -> tuple[SamplingParams, Size]:
    """`params` whose answer keeps the limits, and its size: where max_tokens isn't given it is what the limits leave.
    InputError if they leave nothing."""
    size = size_of(params, prompts, max_len, shown)
    if params.max_tokens is None and (size.tokens > MAX_TOKENS or size.logprobs > MAX_LOGPROBS):
        scored, branches = shown.copies * sum(prompts), params.width * len(prompts)
        left = (MAX_TOKENS - scored * shown.text) // branches
        if _each(params):
            left = min(left, (MAX_LOGPROBS - scored * shown.logprobs) // (branches * _each(params)))
        params = replace(params, max_tokens=max(left, params.min_tokens, 1))
        size = size_of(params, prompts, max_len, shown)
    name = "beam_width" if params.beam_width else "best_of" if params.ranked else "n"
    asked = f"{params.width} x {len(prompts)} outputs of {params.max_tokens} tokens to {sum(prompts)} prompt tokens"
    if size.logprobs > MAX_LOGPROBS:
        raise InputError(
            f"the answer would hold {size.logprobs} log-probabilities ({asked}, {max(_each(params), shown.logprobs)} "
            f"a token), and the limit is {MAX_LOGPROBS}: ask for less of {name}, max_tokens, logprobs or prompts",
            "logprobs" if _each(params) else "prompt_logprobs",
        )
    if size.tokens > MAX_TOKENS:
        raise InputError(
            f"the answer would hold {size.tokens} tokens ({asked}), and the limit is {MAX_TOKENS}: "
            f"ask for less of {name}, max_tokens or prompts",
            name,
        )
    return params, size


def embedded(texts: int, hidden: int, name: str) -> Size:
    """The size of the answer to so many texts, each of which is given `hidden` numbers. InputError, for the field
    `name`, if it is too large."""
    numbers = texts * hidden
    if numbers > MAX_NUMBERS:
        raise InputError(
            f"{texts} embeddings of {hidden} numbers are {numbers}, and the limit is {MAX_NUMBERS}: give at most "
            f"{MAX_NUMBERS // hidden} texts at once",
            name,
        )
    return Size(0, -(-numbers // NUMBERS))


class Held:
    """What the answers under way may hold together: log-probabilities until they are sent, and bytes once they are
    written. One of `share` fronts has its part of both, in which a single answer fits."""

    def __init__(self, share: int = 1) -> None:
        self.logprobs = self.bytes = 0
        self._share = share

    def add(self, size: Size) -> None:
        """Count an answer in. Overloaded if there are too many."""
        most = min(MAX_HELD, max(MAX_HELD // self._share, MAX_LOGPROBS))
        if self.logprobs + size.logprobs > most:
            raise Overloaded(
                f"answers under way hold up to {self.logprobs} log-probabilities ({NUMBERS} numbers of embeddings are "
                f"one); with the {size.logprobs} of this one they are more than {most}"
            )
        self.logprobs += size.logprobs

    def weigh(self, bytes: int) -> None:
        """It is written, and has so many bytes. Overloaded if there are too many."""
        most = min(MAX_HELD_BYTES, max(MAX_HELD_BYTES // self._share, MAX_BYTES))
        if self.bytes + bytes > most:
            raise Overloaded(f"answers that wait for their clients hold {self.bytes} bytes; the limit is {most}")
        self.bytes += bytes

    def drop(self, size: Size, bytes: int = 0) -> None:
        """Count it out."""
        self.logprobs -= size.logprobs
        self.bytes -= bytes
