"""Decoding without memory: what a sampled token does to its sequence, stop conditions, and beam search.

A method is a composition of fork, append and free (PagedAttention §5.2).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import add

from quire.core.grammar_masks import advance_grammar, append_forced_tokens
from quire.core.request import Request
from quire.protocol.method import Advance, Branch, Choice, Context, Ending, Method
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SeqSlice, SliceResult


def append_token(
    request: Request, seq: Sequence, sampled: SliceResult, sample_index: int, eos_ids: frozenset[int], max_len: int
) -> tuple[int, ...]:
    """Append the sampled token at `sample_index` to `seq`, then the tokens that its grammar forces, and set its finish
    reason if it ends there. Return the appended tokens."""
    token = sampled.tokens[sample_index]
    if request.max_tokens == 0 and not sampled.error:  # the step was only for the prompt
        seq.finish_reason = "length"
        return ()
    seq.tokens.append(token)
    if sampled.top_logprobs and sample_index < len(sampled.top_logprobs):  # there are none of a token with an error
        seq.cumulative_logprob += sampled.top_logprobs[sample_index].logprob
        if request.params.returns_best_of and request.params.num_logprobs >= 0:
            seq.top_logprobs.append(sampled.top_logprobs[sample_index])
    if sampled.error:
        seq.finish_reason, seq.stop_reason = "error", sampled.error
        return (token,)
    seq.finish_reason, seq.stop_reason = check_stop(request, seq, token, eos_ids, max_len)
    if seq.matcher is None:
        return (token,)
    run = advance_grammar(request, seq, token, eos_ids)
    if not run:
        return (token,)
    start = len(seq.tokens) - 1
    append_forced_tokens(seq, run, eos_ids, lambda forced: check_stop(request, seq, forced, eos_ids, max_len))
    return tuple(seq.tokens[start:])


def can_append_all(
    request: Request, seq: Sequence, sampled: SliceResult, eos_ids: frozenset[int], max_len: int
) -> bool:
    """Return True if `append_token` would only append each sampled token: none ends the sequence, and there are no
    log-probabilities and no grammar."""
    length, tokens = len(seq.tokens) + len(sampled.tokens), sampled.tokens
    return (
        length < max_len and length - seq.prompt_len < request.max_tokens
        and eos_ids.isdisjoint(tokens) and request.stop_ids.isdisjoint(tokens)
        and seq.matcher is None and not sampled.top_logprobs and not sampled.error
    )  # fmt: skip


def resolve_num_logprobs(request: Request, eos_ids: frozenset[int]) -> int:
    """Return how many of the likeliest tokens a slice returns with its sample; -1: no log-probabilities at all."""
    top = request.params.num_logprobs
    if request.method is not None:
        return max(top, request.method.top(method_context(request.params, request.max_tokens, eos_ids)))
    return max(top, 0) if request.params.returns_best_of else top


def record_prompt_logprobs(seq_slice: SeqSlice, seq: Sequence, sampled: SliceResult) -> None:
    """Store the log-probabilities of a slice's prompt tokens. Those of a recomputed prompt are ignored."""
    for i, top in enumerate(sampled.prompt_logprobs):
        if seq_slice.start + i == len(seq.prompt_logprobs):
            seq.prompt_logprobs.append(top)


def record_pooled(request: Request, seq: Sequence, seq_slice: SeqSlice, sampled: SliceResult) -> bool:
    """Store the pooled hidden state of a slice. Return True if the sequence ends there. After a recomputation the
    slices come again; for "mean" from position 0 on, and the sum starts over."""
    if seq.finish_reason is not None:
        return False
    if sampled.error:
        seq.finish_reason, seq.stop_reason = "error", sampled.error
    elif sampled.pooled:
        added = seq_slice.start > 0 and request.params.pooling == "mean"
        seq.pooled = tuple(map(add, seq.pooled, sampled.pooled)) if added else sampled.pooled
    if seq.finish_reason is None and seq.computed == seq.prompt_len:
        seq.finish_reason = "stop"
        if request.params.pooling == "mean":
            seq.pooled = tuple(total / seq.prompt_len for total in seq.pooled)
    return seq.finish_reason is not None


def check_stop(
    request: Request, seq: Sequence, token: int, eos_ids: frozenset[int], max_len: int
) -> tuple[str | None, int | None]:
    """Return the finish and the stop reason after `token`: ("stop", None) at an end token, ("stop", id) at a stop
    token, ("length", None), or (None, None) if the sequence goes on."""
    length = len(seq.tokens)
    outputs = length - seq.prompt_len
    if outputs >= request.params.min_tokens:
        if token in eos_ids and not request.params.ignore_eos:
            return "stop", None
        if token in request.stop_ids:
            return "stop", token
    if outputs >= request.max_tokens or length >= max_len:
        return "length", None
    return None, None


def new_method(params: SamplingParams) -> Method | None:
    """Return a new method for a request, or None if its branches are independent."""
    if params.beam_width is not None:
        return BeamSearch(params.beam_width, params.length_penalty, params.early_stopping)
    return params.method() if params.method is not None else None


def method_context(params: SamplingParams, max_tokens: int, eos_ids: frozenset[int]) -> Context:
    """Return the context of the method of a request that may generate `max_tokens`."""
    ends = frozenset[int]() if params.ignore_eos else eos_ids
    return Context(ends, frozenset(params.stop_token_ids or ()), params.min_tokens, max_tokens)


class BeamSearch:
    """Beam search (PagedAttention §4.4), with the rules of transformers' `num_beams`.

    The best `width` continuations of all branches that don't end are the next live branches. A continuation that ends
    is a result if it is among the `width` best; its score is logprob / outputs ** length_penalty. The search ends when
    no live branch can beat the worst of `width` results: with `early_stopping` True as soon as there are `width`
    results, with False judged at the current length, with "never" at the length that favours live branches most. Below
    min_tokens no branch ends.
    """

    def __init__(self, width: int, length_penalty: float = 1.0, early_stopping: bool | str = False) -> None:
        self.width, self.length_penalty, self.early_stopping = width, length_penalty, early_stopping
        self.scores: list[float] = []  # of the results so far, best first

    def keep(self) -> int:
        """See Method."""
        return self.width

    def top(self, context: Context) -> int:
        """Return enough candidates that `width` branches can continue one, even if its likeliest tokens all end it."""
        return self.width + len(context.eos_ids | context.stop_ids)

    def advance(self, branches: Seq[Branch], context: Context) -> Advance:
        """See Method. `branches` are in the order of the choices of the last call."""
        outputs = len(branches[0].tokens) - branches[0].prompt_len + 1
        best = sorted(
            (
                (branch.logprob + logprob, -parent, token, logprob)
                for parent, branch in enumerate(branches)
                for token, logprob in zip(branch.top.ids, branch.top.logprobs)
                if outputs > context.min_tokens or (token not in context.eos_ids and token not in context.stop_ids)
            ),
            key=lambda candidate: candidate[:2],
            reverse=True,
        )
        choices: list[Choice] = []
        endings: list[Ending] = []
        running = None  # the best live sum of log-probabilities
        for rank, (total, parent, token, logprob) in enumerate(best):
            if rank >= self.width == len(choices):
                break
            reason = _finish_reason(token, outputs, context)
            if reason is None:
                if len(choices) < self.width:
                    running = total if running is None else running
                    choices.append(Choice(-parent, token, logprob))
            elif rank < self.width:
                score = total / outputs**self.length_penalty
                stopped = token if reason == "stop" and token not in context.eos_ids else None
                endings.append(Ending(-parent, token, logprob, score, reason, stopped))
        self.scores = sorted([*self.scores, *(ending.score for ending in endings)], reverse=True)[: self.width]
        if running is None or self._cannot_improve(running, outputs, context):
            choices = []
        return Advance(tuple(choices), tuple(endings))

    def _cannot_improve(self, running: float, outputs: int, context: Context) -> bool:
        """Return True if no live branch can change the results."""
        if len(self.scores) < self.width:
            return False
        if self.early_stopping is True:
            return True
        length = context.max_tokens if self.early_stopping == "never" and self.length_penalty > 0 else outputs
        attainable: float = running / length**self.length_penalty
        return attainable <= self.scores[-1]


def _finish_reason(token: int, outputs: int, context: Context) -> str | None:
    if token in context.eos_ids or token in context.stop_ids:
        return "stop"
    return "length" if outputs >= context.max_tokens else None
