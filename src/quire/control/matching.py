"""Structured output: sequences go on in their grammars with each token, and what they may draw next goes down as masks.

Grammars come with requests (vocabulary.structured), as methods do: nothing here knows how one is made. A matcher lives
with its sequence, so preemption and prefix hits are nothing to it; a fork copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quire.control.request import Request, Sequence
from quire.vocabulary.plan import Mask, Row

JUMP = 4
"""Tokens from which on a forced run is appended at once. Fewer are drawn, one a step: steps of which each row computes
one token are the fastest."""

Stop = Callable[[int], tuple[str | None, int | None]]
"""Why a sequence ends behind a token, its grammar aside."""


def masks_of(rows: Iterable[Row], by_slot: Mapping[int, tuple[Request, Sequence]]) -> tuple[Mask, ...]:
    """What those rows may draw whose sequences have a grammar; all of them at once. One that has ended in the meantime
    may draw anything: it isn't looked at."""
    found = [(row.slot, *by_slot[row.slot]) for row in rows if row.sample]
    asked = [
        (slot, request, seq.matcher) for slot, request, seq in found if seq.matcher is not None and seq.finish is None
    ]
    if not asked:
        return ()
    grammar = asked[0][1].params.grammar
    assert grammar is not None, "who has a matcher has a grammar"
    masks = grammar.masks([matcher for _, _, matcher in asked])
    return tuple([Mask(slot, mask) for (slot, _, _), mask in zip(asked, masks)])


def waits(request: Request, seq: Sequence, late: bool) -> bool:
    """Whether what follows a token that is under way is left until it comes. With masks that may be `late` only where
    a forced run will be appended behind it."""
    assert seq.matcher is not None, "it has a grammar"
    return not late or (request.top == -1 and len(seq.matcher.forced()) > JUMP)


def follow(request: Request, seq: Sequence, token: int, eos_ids: frozenset[int], stop: Stop) -> None:
    """`seq` has drawn `token`: go on in its grammar. Tokens that the grammar leaves no choice about are appended as if
    drawn, where nobody asks for their log-probabilities: all of them are computed in one row (jump-ahead)."""
    assert seq.matcher is not None, "it has a grammar"
    _match(seq, token, eos_ids)
    if seq.matcher is None:
        return
    run = seq.matcher.forced()
    if request.top != -1 or len(run) < JUMP or seq.planned > seq.computed:  # a row for the first of them is under way
        return
    for forced in run:
        if seq.finish is not None or seq.matcher is None:
            return
        seq.tokens.append(forced)
        seq.finish, seq.stop_reason = stop(forced)
        _match(seq, forced, eos_ids)


def _match(seq: Sequence, token: int, eos_ids: frozenset[int]) -> None:
    """Go on behind the last token. A grammar leaves end tokens where it may end, so there the sequence does. One that
    leaves everything from here on is let go."""
    assert seq.matcher is not None, "it has a grammar"
    if why := seq.matcher.accept(token):
        seq.finish, seq.stop_reason = "error", why
    elif token in eos_ids:
        seq.finish, seq.stop_reason = "stop", None
    elif seq.matcher.free():
        seq.matcher = None
