"""Branching: what a step of a decoding method does to the branches of its request (PagedAttention §5.2: fork, append,
free). A method is asked once all live branches have their candidates; then those that it doesn't continue leave, those
that it continues more than once are forked, and all are appended to. Knows no memory: a Hands does what needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.control.checked import Misbehaved, ReadOnly
from quire.control.decoding import context_of
from quire.control.request import Request, Sequence, Status
from quire.vocabulary.method import Branch, Choice, Ending
from quire.vocabulary.plan import Sampled, Top

Pair = tuple[Sequence, Sequence]
"""A parent and its child."""


class Hands(NamedTuple):
    """What the scheduler does for a method's step."""

    new_id: Callable[[], int]
    fork: Callable[[Request, list[Pair]], None]  # children share their parents' pages; else the request is preempted
    leave: Callable[[Sequence], None]  # it is freed
    born: Callable[[Request, Sequence, Sequence], None]  # the device is told of a sequence, and of its parent
    finish: Callable[[Request, Sequence, str, str], None]  # it ends early: why, and what the error was


class Branching:
    """The steps of the requests that have a method."""

    def __init__(self, hands: Hands, eos_ids: frozenset[int]) -> None:
        self.hands, self.eos_ids = hands, eos_ids

    def sampled(self, request: Request, seq: Sequence, sampled: Sampled) -> bool:
        """The candidates of one branch have come. Returns whether that completed a step of the request's method; if no
        branch is live then, the request has ended. A row's error ends all branches; `seq` is left to be retired."""
        if sampled.error:
            self._fail(request, seq, sampled.error)
            return False
        request.candidates[seq.id] = sampled.tops[0]
        if len(request.candidates) < len(request.live):
            return False
        try:
            return self._advance(request)
        except Misbehaved as wrong:
            self._fail(request, seq, str(wrong))
            return False

    def fork(self, request: Request, seq: Sequence) -> Sequence:
        """A new branch of a running request, as `seq` is now; `seq` must be quiet."""
        child = seq.fork(self.hands.new_id(), len(request.live), seq.seed)
        seq.branches = 0
        request.live.append(child)
        self.hands.fork(request, [(seq, child)])
        if request.status is Status.RUNNING:
            self.hands.born(request, child, seq)
        return child

    def _fail(self, request: Request, seq: Sequence, why: str) -> None:
        request.candidates, request.results = {}, []
        seq.finish, seq.stop_reason = "error", why
        for other in [other for other in request.live if other is not seq]:
            self.hands.finish(request, other, "error", why)

    def _advance(self, request: Request) -> bool:
        """Ask the method, and do what it says. False if it hasn't decided: then its branches stay as they are, until
        somebody changes them. Misbehaved, and then nothing changed, if it says what can't be done."""
        assert request.method is not None
        live, tops = request.live, request.candidates
        branches = [Branch(ReadOnly(seq.tokens), seq.prompt_len, seq.cumulative_logprob, tops[seq.id]) for seq in live]
        advance = request.method.advance(branches, context_of(request.params, request.max_tokens, self.eos_ids))
        if advance is None:
            return False
        request.candidates = {}
        self._endings(request, advance.endings, tops)
        parents = [live[choice.parent] for choice in advance.choices]
        going = set(parents)
        for seq in live:
            seq.branches = 0
            if seq not in going:
                self.hands.leave(seq)
        self._continue(request, parents, advance.choices, tops)
        return True

    def _endings(self, request: Request, endings: Seq[Ending], tops: dict[int, Top]) -> None:
        """Note the branches that end, as copies: the same one may go on otherwise. The best are kept."""
        assert request.method is not None
        for ending in endings:
            parent = request.live[ending.parent]
            ended = parent.fork(self.hands.new_id(), 0, parent.seed)
            extend(request, ended, ending, tops[parent.id])
            ended.finish, ended.stop_reason = ending.reason, ending.stop_reason
            request.results.append((ending.score, ended))
        request.results.sort(key=lambda result: -result[0])
        del request.results[request.method.keep() :]

    def _continue(self, request: Request, parents: list[Sequence], choices: Seq[Choice], tops: dict[int, Top]) -> None:
        """The branches of the next step are those of `choices`, in their order: a parent's first continuation is the
        parent itself, and the others are its children."""
        request.live = []
        forks: list[Pair] = []
        continued: set[Sequence] = set()
        for parent in parents:
            seq = parent
            if parent in continued:
                seq = parent.fork(self.hands.new_id(), len(request.live), parent.seed)
                forks.append((parent, seq))
            continued.add(parent)
            request.live.append(seq)
        self.hands.fork(request, forks)
        for seq, parent, choice in zip(request.live, parents, choices):
            extend(request, seq, choice, tops[parent.id])
        if request.status is Status.RUNNING:
            for parent, child in forks:
                self.hands.born(request, child, parent)
            if request.sampling.needs_history:  # the device has recorded its own choice, which wasn't the method's
                for parent in dict.fromkeys(parents):
                    self.hands.born(request, parent, parent)


def extend(request: Request, seq: Sequence, chosen: Choice | Ending, top: Top) -> None:
    """Append what a method chose, with what its log-probabilities looked like."""
    seq.tokens.append(chosen.token)
    seq.cumulative_logprob += chosen.logprob
    if (count := request.params.logprobs) is not None:
        rank = top.ids.index(chosen.token) + 1 if chosen.token in top.ids else 0
        seq.tops.append(Top(chosen.token, chosen.logprob, rank, top.ids[:count], top.logprobs[:count]))
