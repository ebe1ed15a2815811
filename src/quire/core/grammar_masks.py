"""Structured output: each token advances the grammar of its sequence, and token bitmasks say what may be sampled next.

Grammars come with requests (quire.protocol.structured_output), as methods do. A matcher belongs to its sequence, so
preemptions and prefix hits don't affect it; a fork copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from quire.core.request import Request
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import FIRST_DRAFT, SeqSlice, TokenBitmask
from quire.protocol.structured_output import GrammarMatcher

JUMP_AHEAD_MIN_TOKENS = 4
"""The least number of forced tokens that are appended at once. Fewer are sampled, one a step: steps in which each slice
computes one token are the fastest."""

StopCheck = Callable[[int], tuple[str | None, int | None]]
"""Returns the finish and the stop reason after a token, the grammar aside."""


BySlot = Mapping[int, tuple[Request, Sequence]]


def needs_proposals(slices: Iterable[SeqSlice], by_slot: BySlot) -> bool:
    """Return True if the masks of some slices depend on tokens that the draft model proposes."""
    return any(
        row.draft_tokens and row.draft_tokens[0] <= FIRST_DRAFT and by_slot[row.slot][1].matcher is not None
        for row in slices
    )


def build_masks(
    slices: Iterable[SeqSlice],
    by_slot: BySlot,
    eos_ids: frozenset[int],
    proposals: Mapping[int, Seq[int]],
) -> tuple[TokenBitmask, ...]:
    """Return the masks of the slices whose sequences have a grammar, computed in one call: one for each position that
    samples. Sequences that have ended get none, as their samples are ignored. `proposals` are the draft model's tokens
    by slot.

    After a draft token that the grammar refuses, or that ends the output, no sample is used: it can't be accepted, or
    nothing follows. Such positions have the mask of the token's own position."""
    slots, indices, matchers, grammar = list[int](), list[int](), list[GrammarMatcher](), None
    for row in slices:
        if row.num_samples:
            request, seq = by_slot[row.slot]
            if seq.matcher is not None and seq.finish_reason is None:
                first, num_masks = len(matchers), 1 + len(row.draft_tokens)
                matchers.append(seq.matcher)
                for token in proposals.get(row.slot, row.draft_tokens):
                    matcher = matchers[-1].copy()
                    if refusal := "it is an end token" if token in eos_ids else matcher.accept(token):
                        message = f"slot {row.slot} has a draft token that its grammar refuses: {refusal}"
                        assert row.slot in proposals, message
                        break
                    matchers.append(matcher)
                slots += [row.slot] * num_masks
                indices += [min(first + i, len(matchers) - 1) for i in range(num_masks)]
                grammar = grammar or request.params.grammar
    if grammar is None:
        return ()
    masks = grammar.compute_masks(matchers)
    return tuple(TokenBitmask(slot, masks[i]) for slot, i in zip(slots, indices))


def cut_drafts(matcher: GrammarMatcher, draft_tokens: tuple[int, ...], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the draft tokens before the first one that a grammar refuses or that ends the output."""
    matcher = matcher.copy()
    for i, token in enumerate(draft_tokens):
        if token in eos_ids or matcher.accept(token):
            return draft_tokens[:i]
    return draft_tokens


def must_wait_for_token(request: Request, seq: Sequence, deferred_masks: bool) -> bool:
    """Return True if a sequence with a sample in flight must not be planned further. With `deferred_masks` that is only
    so if forced tokens will be appended after the sample."""
    assert seq.matcher is not None, "it has a grammar"
    return not deferred_masks or (
        request.num_logprobs == -1 and len(seq.matcher.forced_tokens()) > JUMP_AHEAD_MIN_TOKENS
    )


def advance_grammar(request: Request, seq: Sequence, token: int, eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Advance the grammar of `seq` by the sampled `token`. Return the tokens that the grammar then forces, to be
    appended as if sampled and computed in one slice (jump-ahead). Return none if log-probabilities are wanted."""
    _accept_token(seq, token, eos_ids)
    if seq.matcher is None:
        return ()
    run = seq.matcher.forced_tokens()
    is_in_flight = seq.planned > seq.computed  # a slice samples the first of them already
    if len(run) < JUMP_AHEAD_MIN_TOKENS or request.num_logprobs != -1 or is_in_flight:
        return ()
    return run


def append_forced_tokens(seq: Sequence, run: Iterable[int], eos_ids: frozenset[int], stop: StopCheck) -> None:
    """Append forced tokens until the sequence ends."""
    for forced in run:
        if seq.finish_reason is not None or seq.matcher is None:
            return
        seq.tokens.append(forced)
        seq.finish_reason, seq.stop_reason = stop(forced)
        _accept_token(seq, forced, eos_ids)


def _accept_token(seq: Sequence, token: int, eos_ids: frozenset[int]) -> None:
    """Advance the grammar by the last token. A grammar allows end tokens only where it may end, so an end token ends
    the sequence even with ignore_eos. A grammar that allows everything from here on is dropped."""
    matcher = seq.matcher
    assert matcher is not None, "it has a grammar"
    if why := matcher.accept(token):
        seq.finish_reason, seq.stop_reason = "error", why
    elif token in eos_ids:
        seq.finish_reason, seq.stop_reason = "stop", None
    elif matcher.is_unconstrained():
        seq.matcher = None
