"""Decoding methods as pure functions: what a drawn token means for its sequence, and which branches to fork.

A method is a composition of append, fork and drop (PagedAttention §5.2); nothing here touches memory.
"""

from __future__ import annotations

from quire.plan import Sampled
from quire.request import Request, SamplingParams, Sequence


def branch_seed(seed: int, index: int) -> int:
    """The seed of branch `index` of a request: a result depends on the request's seed and the branch alone."""
    return (seed + index) % 2**63


def append(request: Request, seq: Sequence, sampled: Sampled, draw: int, eos_ids: frozenset[int], max_len: int) -> None:
    """Append the token of `draw` to `seq` and decide whether it ends there."""
    token = sampled.tokens[draw]
    seq.tokens.append(token)
    if sampled.tops:
        seq.cumulative_logprob += sampled.tops[draw].logprob
    if sampled.error:
        seq.finish, seq.stop_reason = "error", sampled.error
        return
    seq.finish, seq.stop_reason = stop(seq, token, request.params, eos_ids, request.max_tokens, max_len)


def stop(
    seq: Sequence, token: int, params: SamplingParams, eos_ids: frozenset[int], max_tokens: int, max_len: int
) -> tuple[str | None, int | None]:
    """Why a sequence ends after `token`: ("stop", None) at an end token, ("stop", id) at a stop token, "length"."""
    outputs = len(seq.tokens) - seq.prompt_len
    if outputs >= params.min_tokens:
        if not params.ignore_eos and token in eos_ids:
            return "stop", None
        if params.stop_token_ids and token in params.stop_token_ids:
            return "stop", token
    if outputs >= max_tokens or len(seq.tokens) >= max_len:
        return "length", None
    return None, None
