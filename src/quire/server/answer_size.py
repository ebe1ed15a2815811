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
from quire.protocol.sampling_params import SamplingParams

MAX_TOKENS = 1 << 22  # in one answer
MAX_LOGPROBS = 1 << 19  # in one answer
MAX_EMBEDDING_NUMBERS = 1 << 22  # of embeddings in one answer
NUMBERS_PER_LOGPROB = 8  # of embeddings take the room of one log-probability
MAX_BYTES = 64_000_000  # of one answer
MAX_HELD_LOGPROBS = 16 * MAX_LOGPROBS  # in the answers under way
MAX_HELD_BYTES = 16 * MAX_BYTES  # of answers that are written and not yet sent


class AnswerSize(NamedTuple):
    """What an answer holds at the most: tokens, and log-probabilities of tokens."""

    tokens: int
    logprobs: int


class EchoedPrompt(NamedTuple):
    """What of a prompt an answer shows: in how many `copies`, its text or ids, and how many log-probabilities a token
    (0: none)."""

    copies: int = 0
    has_text: bool = False
    logprobs: int = 0


def _logprobs_per_token(params: SamplingParams) -> int:
    return 0 if params.num_logprobs < 0 else 1 + (len(params.logprob_token_ids or ()) or params.num_logprobs)


def answer_size(params: SamplingParams, prompts: Sequence[int], max_len: int, echoed: EchoedPrompt) -> AnswerSize:
    """The size of the answer to prompts of these lengths. Branches that aren't returned count too: they are held."""
    most = max_len if params.max_tokens is None else params.max_tokens
    output = params.width * sum(min(most, max(max_len - length, 0)) for length in prompts)
    scored = echoed.copies * sum(prompts)
    return AnswerSize(
        output + scored * echoed.has_text, output * _logprobs_per_token(params) + scored * echoed.logprobs
    )


def limit_answer(
    params: SamplingParams, prompts: Sequence[int], max_len: int, echoed: EchoedPrompt
) -> tuple[SamplingParams, AnswerSize]:
    """`params` whose answer keeps the limits, and its size: where max_tokens isn't given it is what the limits leave.
    InputError if they leave nothing."""
    size = answer_size(params, prompts, max_len, echoed)
    if params.max_tokens is None and (size.tokens > MAX_TOKENS or size.logprobs > MAX_LOGPROBS):
        scored, branches = echoed.copies * sum(prompts), params.width * len(prompts)
        left = (MAX_TOKENS - scored * echoed.has_text) // branches
        if _logprobs_per_token(params):
            left = min(left, (MAX_LOGPROBS - scored * echoed.logprobs) // (branches * _logprobs_per_token(params)))
        params = replace(params, max_tokens=max(left, params.min_tokens, 1))
        size = answer_size(params, prompts, max_len, echoed)
    name = "beam_width" if params.beam_width else "best_of" if params.returns_best_of else "n"
    asked = f"{params.width} x {len(prompts)} outputs of {params.max_tokens} tokens to {sum(prompts)} prompt tokens"
    if size.logprobs > MAX_LOGPROBS:
        raise InputError(
            f"the answer would hold {size.logprobs} log-probabilities ({asked}, "
            f"{max(_logprobs_per_token(params), echoed.logprobs)} "
            f"a token), and the limit is {MAX_LOGPROBS}: ask for less of {name}, max_tokens, logprobs or prompts",
            "logprobs" if _logprobs_per_token(params) else "prompt_logprobs",
        )
    if size.tokens > MAX_TOKENS:
        raise InputError(
            f"the answer would hold {size.tokens} tokens ({asked}), and the limit is {MAX_TOKENS}: "
            f"ask for less of {name}, max_tokens or prompts",
            name,
        )
    return params, size


def embeddings_size(texts: int, hidden: int, field: str) -> AnswerSize:
    """The size of the answer to so many texts, each of which is given `hidden` numbers. InputError, for the field
    `field`, if it is too large."""
    numbers = texts * hidden
    if numbers > MAX_EMBEDDING_NUMBERS:
        raise InputError(
            f"{texts} embeddings of {hidden} numbers are {numbers}, and the limit is {MAX_EMBEDDING_NUMBERS}: give "
            f"at most "
            f"{MAX_EMBEDDING_NUMBERS // hidden} texts at once",
            field,
        )
    return AnswerSize(0, -(-numbers // NUMBERS_PER_LOGPROB))


class AnswerBudget:
    """What the answers under way may hold together: log-probabilities until they are sent, and bytes once they are
    written. One of `num_frontends` fronts has its part of both, in which a single answer fits."""

    def __init__(self, num_frontends: int = 1) -> None:
        self.logprobs = self.bytes = 0
        self._num_frontends = num_frontends

    def reserve(self, size: AnswerSize) -> None:
        """Count an answer in. Overloaded if there are too many."""
        most = min(MAX_HELD_LOGPROBS, max(MAX_HELD_LOGPROBS // self._num_frontends, MAX_LOGPROBS))
        if self.logprobs + size.logprobs > most:
            raise Overloaded(
                f"answers under way hold up to {self.logprobs} log-probabilities ({NUMBERS_PER_LOGPROB} numbers of "
                f"embeddings are "
                f"one); with the {size.logprobs} of this one they are more than {most}"
            )
        self.logprobs += size.logprobs

    def add_bytes(self, bytes: int) -> None:
        """It is written, and has so many bytes. Overloaded if there are too many."""
        most = min(MAX_HELD_BYTES, max(MAX_HELD_BYTES // self._num_frontends, MAX_BYTES))
        if self.bytes + bytes > most:
            raise Overloaded(f"answers that wait for their clients hold {self.bytes} bytes; the limit is {most}")
        self.bytes += bytes

    def release(self, size: AnswerSize, bytes: int = 0) -> None:
        """Count it out."""
        self.logprobs -= size.logprobs
        self.bytes -= bytes
