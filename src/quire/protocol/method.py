"""Decoding methods: how the branches of a request continue, in terms of fork, append and free (PagedAttention §5.2).

A method gets the live branches of its request with their most likely next tokens, and returns the branches of the next
step. A branch that is continued twice is forked, one that is not continued is freed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from quire.protocol.step_plan import TopLogprobs


class Branch(NamedTuple):
    """A live branch: its prompt and outputs, the sum of its log-probabilities, and its candidates: `top` has the
    `Method.top` most likely next tokens and their log-probabilities, most likely first."""

    tokens: Seq[int]
    prompt_len: int
    logprob: float
    top: TopLogprobs


class Choice(NamedTuple):
    """Continue branch `parent` (an index into the live branches) with `token` of log-probability `logprob`."""

    parent: int
    token: int
    logprob: float


class Ending(NamedTuple):
    """Branch `parent` ends with `token`; results are returned by `score`, highest first. `reason` is "stop" or
    "length"."""

    parent: int
    token: int
    logprob: float
    score: float
    reason: str
    stop_reason: int | None = None


class Advance(NamedTuple):
    """The branches of the next step, in order, and those that end now. Without choices the request ends."""

    choices: tuple[Choice, ...]
    endings: tuple[Ending, ...] = ()


class Context(NamedTuple):
    """The parameters of a request that its method gets."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int


class Method(Protocol):
    """The decoding method of one request. At most `width` branches are live, 1 to --max-num-seqs. `width`, `top` and
    `keep` are read once, when the request is added.

    Numbers are Python's own: int(array[0]), float(tensor). A method that breaks a rule below or raises ends its request
    with finish_reason "error" and the rule as stop_reason; no other request is affected. Stop strings are searched for
    in what all branches have in common, and one that is found there ends the request. One in a result alone cuts its
    text, once all branches have ended."""

    width: int

    def top(self, context: Context) -> int:
        """Return how many of the most likely tokens of each branch `advance` needs, 0 or more. Masked tokens are left
        out, so a branch may have fewer."""
        ...

    def advance(self, branches: Seq[Branch], context: Context) -> Advance | None:
        """Return how the live branches continue. Called once a step, with the branches in the order of the last
        choices; their `tokens` are read-only.

        At most `width` choices. A `token` is any id of the vocabulary, among the candidates or not; log-probabilities
        and scores are finite. Branches must end before they have more than context.max_tokens outputs; whether they end
        at context.eos_ids is up to the method. Only a method of a session may return None; then the caller changes the
        branches."""
        ...

    def keep(self) -> int:
        """Return how many ended branches to keep, at least 1: those with the best scores."""
        ...
