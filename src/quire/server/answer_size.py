"""Limits on the size of one answer, and of all answers in progress. n, the number of prompts, max_tokens and logprobs
are each limited on their own; here their product is limited, before anything is queued.

A token takes about 5 to 15 bytes of JSON, a log-probability about 60 to 110, so an answer within these limits has at
most MAX_BYTES. Tokens of unusual length cannot exceed that either, since the writer of the answer counts bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError, Overloaded
from quire.protocol.sampling_params import SamplingParams

MAX_TOKENS = 1 << 22  # in one answer
MAX_LOGPROBS = 1 << 19  # in one answer
MAX_EMBEDDING_NUMBERS = 1 << 23  # elements of embeddings in one answer
NUMBERS_PER_LOGPROB = 8  # elements of embeddings that are counted as one log-probability
MAX_BYTES = 64_000_000  # of one answer without embeddings
MAX_EMBEDDING_BYTES = 16 * MAX_EMBEDDING_NUMBERS  # of one answer with embeddings: 16 bytes a number at most
MAX_ANSWER_LOGPROBS = max(MAX_LOGPROBS, MAX_EMBEDDING_NUMBERS // NUMBERS_PER_LOGPROB)
MAX_HELD_LOGPROBS = 16 * MAX_LOGPROBS  # in all answers in progress
MAX_HELD_BYTES = 16 * MAX_BYTES  # of answers that are written but not yet sent


class AnswerSize(NamedTuple):
    """The most tokens and log-probabilities that an answer may hold."""

    tokens: int
    logprobs: int


class EchoedPrompt(NamedTuple):
    """How much of a prompt an answer repeats: the number of `copies`, whether they have its text or ids, and the number
    of log-probabilities per token (0: none)."""

    copies: int = 0
    has_text: bool = False
    logprobs: int = 0


def _logprobs_per_token(params: SamplingParams) -> int:
    return 0 if params.num_logprobs < 0 else 1 + (len(params.logprob_token_ids or ()) or params.num_logprobs)


def answer_size(params: SamplingParams, prompts: Sequence[int], max_len: int, echoed: EchoedPrompt) -> AnswerSize:
    """Return the size of the answer to prompts of the given lengths in tokens. Branches that are not returned count
    too, since they are held in memory."""
    most = max_len if params.max_tokens is None else params.max_tokens
    output = params.width * sum(min(most, max(max_len - length, 0)) for length in prompts)
    scored = echoed.copies * sum(prompts)
    return AnswerSize(
        output + scored * echoed.has_text, output * _logprobs_per_token(params) + scored * echoed.logprobs
    )


def limit_answer(
    params: SamplingParams, prompts: Sequence[int], max_len: int, echoed: EchoedPrompt
) -> tuple[SamplingParams, AnswerSize]:
    """Return `params` for an answer within the limits, and the answer's size. Without max_tokens it is set to what the
    limits allow. Raise InputError if the answer would exceed the limits."""
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
            f"{max(_logprobs_per_token(params), echoed.logprobs)} a token), and the limit is {MAX_LOGPROBS}: "
            f"ask for less of {name}, max_tokens, logprobs or prompts",
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
    """Return the size of an answer with `texts` embeddings of `hidden` numbers. Raise InputError for the field `field`
    if it exceeds the limit."""
    numbers = texts * hidden
    if numbers > MAX_EMBEDDING_NUMBERS:
        raise InputError(
            f"{texts} embeddings of {hidden} numbers are {numbers}, and the limit is {MAX_EMBEDDING_NUMBERS}: give "
            f"at most {MAX_EMBEDDING_NUMBERS // hidden} texts at once",
            field,
        )
    return AnswerSize(0, -(-numbers // NUMBERS_PER_LOGPROB))


class AnswerBudget:
    """Limits what all answers in progress hold: log-probabilities until an answer is sent, and bytes from when it is
    written. Each of `num_frontends` frontends has an equal share of both limits, but at least enough for one answer."""

    def __init__(self, num_frontends: int = 1) -> None:
        self.logprobs = self.bytes = 0
        self._num_frontends = num_frontends

    def reserve(self, size: AnswerSize) -> None:
        """Reserve the size of an answer. Raise Overloaded if the limit would be exceeded."""
        most = min(MAX_HELD_LOGPROBS, max(MAX_HELD_LOGPROBS // self._num_frontends, MAX_ANSWER_LOGPROBS))
        if self.logprobs + size.logprobs > most:
            raise Overloaded(
                f"answers under way hold up to {self.logprobs} log-probabilities ({NUMBERS_PER_LOGPROB} numbers of "
                f"embeddings are one); with the {size.logprobs} of this one they are more than {most}"
            )
        self.logprobs += size.logprobs

    def add_bytes(self, bytes: int) -> None:
        """Count the bytes of a written answer. Raise Overloaded if the limit would be exceeded."""
        most = min(MAX_HELD_BYTES, max(MAX_HELD_BYTES // self._num_frontends, MAX_EMBEDDING_BYTES))
        if self.bytes + bytes > most:
            raise Overloaded(f"answers that wait for their clients hold {self.bytes} bytes; the limit is {most}")
        self.bytes += bytes

    def release(self, size: AnswerSize, bytes: int = 0) -> None:
        """Release an answer's size and bytes."""
        self.logprobs -= size.logprobs
        self.bytes -= bytes
