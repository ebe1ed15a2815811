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
    """The decoding method of one request. At most `width` branches are live. `width`, `top` and `keep` are read once,
    when the request is added. If a method breaks its contract, its request ends with an error (see
    docs/decoding.md)."""

    width: int

    def top(self, context: Context) -> int:
        """Return how many of the most likely tokens of each branch `advance` needs."""
        ...

    def advance(self, branches: Seq[Branch], context: Context) -> Advance | None:
        """Return how the live branches continue. Called once a step, with the branches in the order of the last
        choices. They must end before they have more than context.max_tokens outputs. Only a method of a session may
        return None; then the caller changes the branches."""
        ...

    def keep(self) -> int:
        """Return how many ended branches to keep: those with the best scores."""
        ...
