"""What an EchoRunner must generate, computed without a memory: the oracle of the tests that use it."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from bench.echo_images import row_state, visible_rows
from bench.echo_pages import RULES
from bench.echo_runner import digest_of_later, draw_token, echo_state, fake_top, is_right_draft
from quire.core.decoding import new_method
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.method import Branch, Context
from quire.protocol.sampling_params import SamplingParams

FULL_GROUP = KVCacheGroup((0,), 16, 16, 1, range(1), run_tokens=1)  # full attention, the default


def expected_proposals(tokens: Seq[int], groups: Seq[KVCacheGroup], prompt: int = 0) -> list[bool]:
    """Return for each position of `tokens`, which are a prompt and what was sampled after it, whether the token that
    the draft model proposes to follow it is the right one."""
    return list(map(is_right_draft, expected_states(tokens, groups, prompt=prompt, is_draft=True)))


def expected_states(
    tokens: Seq[int],
    groups: Seq[KVCacheGroup] = (FULL_GROUP,),
    known: Seq[int] = (),
    prompt: int = 0,
    media: Seq[ImageItem] = (),
    both_ways: bool = False,
    is_draft: bool = False,
) -> list[int]:
    """Return the states of all positions of `tokens`, of which the first `prompt` are the prompt, with these images,
    computed without a memory; with `is_draft` those of the draft model. `known` are the first states."""
    states = np.zeros(len(tokens), dtype=np.int64)
    states[: len(known)] = known
    for p in range(len(known), len(tokens)):
        visible = [
            RULES[group.kind].expected_visible(group, g, tokens, states, p, prompt)
            for g, group in enumerate(groups)
            if group.is_draft == is_draft
        ]
        if media:
            visible.append(visible_images(media, p, groups))
        if both_ways and p < prompt:
            visible.append(digest_of_later(tokens[p + 1 : prompt]))
        states[p] = echo_state(tokens[p], p, visible)
    return [int(state) for state in states]


def expected_tokens(
    prompt: Seq[int],
    params: SamplingParams,
    seed: int,
    *,
    vocab_size: int,
    groups: Seq[KVCacheGroup] = (FULL_GROUP,),
    max_len: int = 2**31,
    eos_ids: frozenset[int] = frozenset(),
    media: Seq[ImageItem] = (),
    both_ways: bool = False,
) -> list[int]:
    """Return the tokens that an EchoRunner must generate for one branch with any memory, batch and schedule.

    `seed` is the branch's own; `groups` are the layer groups.
    """
    tokens, known = list(prompt), list[int]()
    limit = min(params.max_tokens if params.max_tokens is not None else max_len, max_len - len(prompt))
    ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_ids)
    grammar = params.grammar
    matcher = None if grammar is None else grammar.new_matcher()
    for count in range(1, limit + 1):
        known = expected_states(tokens, groups, known, len(prompt), media, both_ways)
        mask = None if grammar is None or matcher is None else grammar.compute_masks([matcher])[0]
        tokens.append(draw_token(known[-1], seed, tokens if params.needs_history else None, vocab_size, mask))
        if matcher is not None and matcher.accept(tokens[-1]):
            break
        if tokens[-1] in ends and count >= params.min_tokens:
            break
    return tokens[len(prompt) :]


class BeamResult(NamedTuple):
    """A result of beam search: its outputs, the sum of their log-probabilities, and its finish reason."""

    tokens: list[int]
    logprob: float
    reason: str
    stop_reason: int | None


def expected_beams(
    prompt: Seq[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    groups: Seq[KVCacheGroup] = (FULL_GROUP,),
    max_len: int = 2**31,
    eos_ids: frozenset[int] = frozenset(),
    media: Seq[ImageItem] = (),
    both_ways: bool = False,
) -> list[BeamResult]:
    """Return the results, best first, that the request's method must have with an EchoRunner and any memory."""
    method = new_method(params)
    assert method is not None, "the parameters have no decoding method"
    limit = min(params.max_tokens if params.max_tokens is not None else max_len, max_len - len(prompt))
    ends = frozenset() if params.ignore_eos else eos_ids
    context = Context(ends, frozenset(params.stop_token_ids or ()), params.min_tokens, limit)
    k = max(method.top(context), params.logprobs or 0)
    live = [(list(prompt), 0.0, list[int]())]
    results: list[tuple[float, BeamResult]] = []
    while live:
        known = [expected_states(tokens, groups, before, len(prompt), media, both_ways) for tokens, _, before in live]
        tops = [fake_top(states[-1], 0, k, vocab_size) for states in known]
        branches = [Branch(tokens, len(prompt), sum, top) for (tokens, sum, _), top in zip(live, tops)]
        advance = method.advance(branches, context)
        assert advance is not None, "beam search never waits"
        for end in advance.endings:
            tokens, logprob, _ = live[end.parent]
            outputs = [*tokens[len(prompt) :], end.token]
            results.append((end.score, BeamResult(outputs, logprob + end.logprob, end.reason, end.stop_reason)))
        results = sorted(results, key=lambda result: -result[0])[: method.keep()]
        live = [([*live[i][0], token], live[i][1] + logprob, known[i]) for i, token, logprob in advance.choices]
    return [result for _, result in results[: params.n]]


def visible_images(media: Seq[ImageItem], position: int, groups: Seq[KVCacheGroup]) -> bytes:
    """Return the image embeddings that the token at a position attends to."""
    visible = visible_rows(media, position, any(group.kind == "cross" for group in groups))
    if visible is None:
        return b""
    i, rows = visible
    states = [row_state(media[i].key, row) for row in rows]
    return struct.pack(f"<{len(states)}q", *states)
