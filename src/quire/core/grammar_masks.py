"""Structured output: sequences go on in their grammars with each token, and what they may draw next goes down as masks.

Grammars come with requests (vocabulary.structured), as methods do: nothing here knows how one is made. A matcher lives
with its sequence, so preemption and prefix hits are nothing to it; a fork copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quire.core.request import Request
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SeqSlice, TokenBitmask
from quire.protocol.structured_output import GrammarMatcher

JUMP_AHEAD_MIN_TOKENS = 4
"""Tokens from which on a forced run is appended at once. Fewer are drawn, one a step: steps of which each row computes
one token are the fastest."""

StopCheck = Callable[[int], tuple[str | None, int | None]]
"""Why a sequence ends behind a token, its grammar aside."""


def build_masks(
    slices: Iterable[SeqSlice], by_slot: Mapping[int, tuple[Request, Sequence]]
) -> tuple[TokenBitmask, ...]:
    """What those rows may draw whose sequences have a grammar; all of them at once. One that has ended in the meantime
    may draw anything: it isn't looked at."""
    slots, matchers, grammar = list[int](), list[GrammarMatcher](), None
    for row in slices:
        if row.num_samples:
            request, seq = by_slot[row.slot]
            if seq.matcher is not None and seq.finish_reason is None:
                slots.append(row.slot)
                matchers.append(seq.matcher)
                grammar = grammar or request.params.grammar
    return () if grammar is None else tuple(map(TokenBitmask, slots, grammar.compute_masks(matchers)))


def must_wait_for_token(request: Request, seq: Sequence, deferred_masks: bool) -> bool:
    """Whether what follows a token that is under way is left until it comes. With masks that may be `deferred_masks`
    only where a forced run will be appended behind it."""
    assert seq.matcher is not None, "it has a grammar"
    return not deferred_masks or (
        request.num_logprobs == -1 and len(seq.matcher.forced_tokens()) > JUMP_AHEAD_MIN_TOKENS
    )


def advance_grammar(request: Request, seq: Sequence, token: int, eos_ids: frozenset[int]) -> tuple[int, ...]:
    """`seq` has drawn `token`: go on in its grammar. Tokens that the grammar leaves no choice about are returned, to be
    appended as if drawn, where nobody asks for their log-probabilities: all of them are computed in one row
    (jump-ahead)."""
    _accept_token(seq, token, eos_ids)
    if seq.matcher is None:
        return ()
    run = seq.matcher.forced_tokens()
    if (
        len(run) < JUMP_AHEAD_MIN_TOKENS or request.num_logprobs != -1 or seq.planned > seq.computed
    ):  # a row for the first of them is under way
        return ()
    return run


def append_forced_tokens(seq: Sequence, run: Iterable[int], eos_ids: frozenset[int], stop: StopCheck) -> None:
    """Append a forced run, as far as the sequence goes."""
    for forced in run:
        if seq.finish_reason is not None or seq.matcher is None:
            return
        seq.tokens.append(forced)
        seq.finish_reason, seq.stop_reason = stop(forced)
        _accept_token(seq, forced, eos_ids)


def _accept_token(seq: Sequence, token: int, eos_ids: frozenset[int]) -> None:
    """Go on behind the last token. A grammar leaves end tokens where it may end, so there the sequence does. One that
    leaves everything from here on is let go."""
    matcher = seq.matcher
    assert matcher is not None, "it has a grammar"
    if why := matcher.accept(token):
        seq.finish_reason, seq.stop_reason = "error", why
    elif token in eos_ids:
        seq.finish_reason, seq.stop_reason = "stop", None
    elif matcher.is_unconstrained():
        seq.matcher = None
