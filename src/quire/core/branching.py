"""Branching: what a step of a decoding method does to the branches of its request (PagedAttention §5.2: fork, append,
free). A method is asked once all live branches have their candidates; then those that it doesn't continue leave, those
that it continues more than once are forked, and all are appended to. Knows no memory: a Hands does what needs one.
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
    """What the scheduler does for a method's step."""

    new_id: Callable[[], int]
    fork: Callable[
        [Request, list[ForkPair]], None
    ]  # children share their parents' pages; else the request is preempted
    free: Callable[[Sequence], None]  # it is freed
    init_slot: Callable[[Request, Sequence, Sequence], None]  # the device is told of a sequence, and of its parent
    finish: Callable[[Request, Sequence, str, str], None]  # it ends early: why, and what the error was


class MethodDriver:
    """The steps of the requests that have a method."""

    def __init__(self, ops: BranchOps, eos_ids: frozenset[int]) -> None:
        self.ops, self.eos_ids = ops, eos_ids

    def on_candidates(self, request: Request, seq: Sequence, sampled: SliceResult) -> bool:
        """The candidates of one branch have come. Returns whether that completed a step of the request's method; if no
        branch is live then, the request has ended. A row's error ends all branches; `seq` is left to be retired."""
        if sampled.error:
            self._fail(request, seq, sampled.error)
            return False
        request.candidates[seq.id] = sampled.top_logprobs[0]
        if len(request.candidates) < len(request.live_seqs):
            return False
        try:
            return self._advance(request)
        except MethodError as wrong:
            self._fail(request, seq, str(wrong))
            return False

    def fork(self, request: Request, seq: Sequence) -> Sequence:
        """A new branch of a running request, as `seq` is now; `seq` must be quiet."""
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
        """Ask the method, and do what it says. False if it hasn't decided: then its branches stay as they are, until
        somebody changes them. Misbehaved, and then nothing changed, if it says what can't be done."""
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
        going = set(parents)
        for seq in live:
            seq.num_forks = 0
            if seq not in going:
                self.ops.free(seq)
        self._continue_branches(request, parents, advance.choices, tops)
        return True

    def _record_endings(self, request: Request, endings: Seq[Ending], tops: dict[int, TopLogprobs]) -> None:
        """Note the branches that end, as copies: the same one may go on otherwise. The best are kept."""
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
        """The branches of the next step are those of `choices`, in their order: a parent's first continuation is the
        parent itself, and the others are its children."""
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
            if request.device_params.needs_history:  # the device has recorded its own choice, which wasn't the method's
                for parent in dict.fromkeys(parents):
                    self.ops.init_slot(request, parent, parent)


def append_choice(request: Request, seq: Sequence, choice: Choice | Ending, top: TopLogprobs) -> None:
    """Append what a method chose, with what its log-probabilities looked like."""
    seq.tokens.append(choice.token)
    seq.cumulative_logprob += choice.logprob
    if (count := request.params.logprobs) is not None:
        rank = top.ids.index(choice.token) + 1 if choice.token in top.ids else 0
        seq.top_logprobs.append(TopLogprobs(choice.token, choice.logprob, rank, top.ids[:count], top.logprobs[:count]))
