"""Decoding methods: how the branches of a request go on, said as fork, append and free (PagedAttention §5.2).

A method sees the live branches of its request with their most likely next tokens, and answers with the branches of the
next step. A branch that is continued twice is forked, one that isn't continued is freed. It never sees memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from quire.protocol.step_plan import TopLogprobs


class Branch(NamedTuple):
    """A live branch: its prompt and outputs, the sum of its log-probabilities, and what could follow: `top` has the
    `Method.top` most likely next tokens and their log-probabilities, most likely first."""

    tokens: Seq[int]
    prompt_len: int
    logprob: float
    top: TopLogprobs


class Choice(NamedTuple):
    """Continue branch `parent` (an index into the live ones) with `token`, of log-probability `logprob`."""

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
    """The branches of the next step, in order, and those that end now. No choices: the request ends."""

    choices: tuple[Choice, ...]
    endings: tuple[Ending, ...] = ()


class Context(NamedTuple):
    """What a method may know of its request."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int


class Method(Protocol):
    """One request's decoding method. `width` branches at most are live; `top` candidates are returned for each. Width,
    top and keep are asked for once, when the request is added. docs/decoding.md says what becomes of a method that
    breaks its contract: its request ends with an error, and no other."""

    width: int

    def top(self, context: Context) -> int:
        """How many most likely tokens of each branch `advance` needs."""
        ...

    def advance(self, branches: Seq[Branch], context: Context) -> Advance | None:
        """Called once a step, with all live branches in the order of the last choices. They must end before they have
        more than context.max_tokens outputs. None is for sessions alone, whose caller changes the branches."""
        ...

    def keep(self) -> int:
        """How many ended branches may still be returned: the best that many by score are kept."""
        ...
