"""Branching: what a step of a decoding method does to the branches of its request (PagedAttention §5.2: fork, append,
free). The method is called once all live branches have their candidates. Branches that it doesn't continue are freed,
those that it continues more than once are forked, and tokens are appended to all. BranchOps does what needs a memory.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.checked_method import MethodError, ReadOnlyTokens
from quire.core.decoding import method_context
from quire.core.request import Request, RequestStatus
from quire.protocol.method import Branch, Choice, Ending
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SliceResult, TopLogprobs

ForkPair = tuple[Sequence, Sequence]
"""A parent and its child."""


class BranchOps(NamedTuple):
    """The scheduler's functions that a method's step needs."""

    new_id: Callable[[], int]
    fork: Callable[[Request, list[ForkPair]], None]  # shares the parents' pages, or preempts the request
    free: Callable[[Sequence], None]
    init_slot: Callable[[Request, Sequence, Sequence], None]  # of a sequence, from its parent
    finish: Callable[[Request, Sequence, str, str], None]  # early, with a finish reason and an error


class MethodDriver:
    """Runs the steps of requests that have a method."""

    def __init__(self, ops: BranchOps, eos_ids: frozenset[int]) -> None:
        self.ops, self.eos_ids = ops, eos_ids

    def on_candidates(self, request: Request, seq: Sequence, sampled: SliceResult) -> bool:
        """Record the candidates of one branch. Return True if this completed a step of the request's method; if no
        branch is live then, the request has ended. An error of a slice ends all branches; the caller retires `seq`."""
        if sampled.error:
            self._fail(request, seq, sampled.error)
            return False
        request.candidates[seq.id] = sampled.top_logprobs[0]
        if len(request.candidates) < len(request.live_seqs):
            return False
        try:
            return self._advance(request)
        except MethodError as error:
            self._fail(request, seq, str(error))
            return False

    def fork(self, request: Request, seq: Sequence) -> Sequence:
        """Fork a new branch of a running request from `seq`, which must not be in flight. Return it."""
        child = seq.fork(self.ops.new_id(), len(request.live_seqs), seq.seed)
        seq.num_forks = 0
        request.live_seqs.append(child)
        self.ops.fork(request, [(seq, child)])
        if request.status is RequestStatus.RUNNING:
            self.ops.init_slot(request, child, seq)
        return child

    def _fail(self, request: Request, seq: Sequence, why: str) -> None:
        request.candidates, request.results = {}, []
        seq.finish_reason, seq.stop_reason = "error", why
        for other in [other for other in request.live_seqs if other is not seq]:
            self.ops.finish(request, other, "error", why)

    def _advance(self, request: Request) -> bool:
        """Call the method and apply its choices. Return False if it suspends its branches: then they stay as they are
        until the caller continues them. Raise MethodError, and change nothing, if its answer is invalid."""
        assert request.method is not None
        live, tops = request.live_seqs, request.candidates
        branches = [
            Branch(ReadOnlyTokens(seq.tokens), seq.prompt_len, seq.cumulative_logprob, tops[seq.id]) for seq in live
        ]
        advance = request.method.advance(branches, method_context(request.params, request.max_tokens, self.eos_ids))
        if advance is None:
            return False
        request.candidates = {}
        self._record_endings(request, advance.endings, tops)
        parents = [live[choice.parent] for choice in advance.choices]
        continued = set(parents)
        for seq in live:
            seq.num_forks = 0
            if seq not in continued:
                self.ops.free(seq)
        self._continue_branches(request, parents, advance.choices, tops)
        return True

    def _record_endings(self, request: Request, endings: Seq[Ending], tops: dict[int, TopLogprobs]) -> None:
        """Add copies of the ended branches to the results, of which the best are kept. A branch may end and go on
        too."""
        assert request.method is not None
        for ending in endings:
            parent = request.live_seqs[ending.parent]
            ended = parent.fork(self.ops.new_id(), 0, parent.seed)
            append_choice(request, ended, ending, tops[parent.id])
            ended.finish_reason, ended.stop_reason = ending.reason, ending.stop_reason
            request.results.append((ending.score, ended))
        request.results.sort(key=lambda result: -result[0])
        del request.results[request.method.keep() :]

    def _continue_branches(
        self, request: Request, parents: list[Sequence], choices: Seq[Choice], tops: dict[int, TopLogprobs]
    ) -> None:
        """Make the branches of the next step, in the order of `choices`. The first continuation of a parent is the
        parent itself, the others are its children."""
        request.live_seqs = []
        forks: list[ForkPair] = []
        continued: set[Sequence] = set()
        for parent in parents:
            seq = parent
            if parent in continued:
                seq = parent.fork(self.ops.new_id(), len(request.live_seqs), parent.seed)
                forks.append((parent, seq))
            continued.add(parent)
            request.live_seqs.append(seq)
        self.ops.fork(request, forks)
        for seq, parent, choice in zip(request.live_seqs, parents, choices):
            append_choice(request, seq, choice, tops[parent.id])
        if request.status is RequestStatus.RUNNING:
            for parent, child in forks:
                self.ops.init_slot(request, child, parent)
            if request.device_params.needs_history:  # the device recorded its own sample, not the choice
                for parent in dict.fromkeys(parents):
                    self.ops.init_slot(request, parent, parent)


def append_choice(request: Request, seq: Sequence, choice: Choice | Ending, top: TopLogprobs) -> None:
    """Append the token that a method chose, with its log-probabilities."""
    seq.tokens.append(choice.token)
    seq.cumulative_logprob += choice.logprob
    if (count := request.params.logprobs) is not None:
        rank = top.ids.index(choice.token) + 1 if choice.token in top.ids else 0
        seq.top_logprobs.append(TopLogprobs(choice.token, choice.logprob, rank, top.ids[:count], top.logprobs[:count]))
