"""The messages between the control plane and the data plane: one StepPlan down, one StepResult up, a step.

Immutable plain values (tuples of integers, strings and floats): they can be sent to other ranks, logged, replayed and
diffed. PagedAttention §4.6: "the scheduler first prepares the message with input token IDs ... and the block table".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.vocabulary.params import SamplingParams

LAST = -1
"""In `Row.tokens`: this slot's most recent sample, which only the device has seen."""


class Birth(NamedTuple):
    """A sequence gets a slot (on admission, fork or swap-in): all that the device must know of it.

    A slot's next birth is its death. With `parent` >= 0 the child starts with the parent slot's sampling state.
    `history` is the tokens so far (prompt first, `prompt_len` of them), and given only when `params` need it.
    """

    slot: int
    seq: int
    parent: int
    params: SamplingParams | None
    seed: int
    prompt_len: int
    history: tuple[int, ...] = ()
    length: int = 0  # tokens that the sequence has at birth: `length - prompt_len` of them are output
    top: int = -1  # most likely tokens to return with each sample; -1: no log-probabilities at all


class Row(NamedTuple):
    """One sequence's share of a step: compute `tokens` at positions start, start + 1, ...

    `sample` tokens are drawn from the logits of the last position (0: none; n > 1: one for each branch to be forked,
    the i-th with the seed of branch i). `score[i]` is a prompt token whose log-probability after tokens[i] is wanted.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    sample: int
    score: tuple[int, ...] = ()


# Journal entries: effects on tables and pages, in order.


class Table(NamedTuple):
    """tables[group][slot, at : at + len(pages)] = pages."""

    slot: int
    group: int
    at: int
    pages: tuple[int, ...]


class Copy(NamedTuple):
    """Copy the content of page `src` to page `dst`, all layers of the group."""

    group: int
    src: int
    dst: int


class Out(NamedTuple):
    """Copy page `page` to host page `host`."""

    group: int
    page: int
    host: int


class In(NamedTuple):
    """Copy host page `host` to page `page`."""

    group: int
    host: int
    page: int


class Poison(NamedTuple):
    """Debug mode: page `page` is given out anew; fill it with NaN, so that reading before writing shows."""

    group: int
    page: int


Entry = Table | Copy | Out | In | Poison
Journal = tuple[Entry, ...]


class StepPlan(NamedTuple):
    """One step: births, then the journal in order, then the rows. `ahead` is journal work to do while it computes."""

    births: tuple[Birth, ...]
    journal: Journal
    rows: tuple[Row, ...]
    ahead: Journal = ()


class Top(NamedTuple):
    """The log-probability of one token, its rank (1 is the most likely), and the k most likely alternatives."""

    token: int
    logprob: float
    rank: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class Sampled(NamedTuple):
    """What a row produced: `tokens` drawn (one a branch), `tops` beside each when log-probabilities were asked for, and
    `scores`, one for each of the row's `score` tokens. `error` is set when the row's logits were not finite."""

    tokens: tuple[int, ...]
    tops: tuple[Top, ...] = ()
    scores: tuple[Top, ...] = ()
    error: str = ""


class StepResult(NamedTuple):
    """One Sampled a row, in plan order, and the step's duration."""

    samples: tuple[Sampled, ...]
    seconds: float
