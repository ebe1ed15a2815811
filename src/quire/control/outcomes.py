"""Outcomes: what the events of a step come to for whoever asked, as Outputs. Most branches tell their tokens as they
come; those of a method tell what all of them agree on, until the best are known; best_of waits for its end.

Knows tokens alone: text, and what ends a branch for the sake of it, is the readers' (quire.text.transcript). Knows
neither runner nor memory.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.control.request import Event, Request, Sequence, Status
from quire.vocabulary.plan import Top


class Output(NamedTuple):
    """What a step brought for one branch of a request. `finish_reason` is None while the branch goes on; `done` says
    that the whole request ended. `cached_tokens` come with each, `prompt_tops` with the first of branch 0,
    `pooled` [hidden] with the end of a request that has pooling: the last token's hidden state, or the mean of all.
    `text` is empty until a Transcript read it."""

    request: str
    branch: int
    tokens: tuple[int, ...]
    text: str
    tops: tuple[Top, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    done: bool
    cumulative_logprob: float
    prompt_tops: tuple[Top, ...] | None = None
    cached_tokens: int = 0
    pooled: tuple[float, ...] = ()


class Stats:
    """Counters since the start; plain numbers that a server exports."""

    __slots__ = (
        "computed_tokens", "finished", "generated_tokens", "idle_seconds", "prompt_tokens", "restarts", "rows",
        "step_seconds", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps = self.rows = self.prompt_tokens = self.generated_tokens = 0
        self.restarts = 0  # of the runner, those that failed included
        self.computed_tokens = 0  # of prompts and outputs, in steps that were collected
        self.step_seconds = 0.0
        self.idle_seconds = 0.0  # in which the device waited for the host between two steps
        self.finished: dict[str, int] = {}

    def copy(self) -> Stats:
        """These numbers, as they are now."""
        other = Stats()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.finished = dict(self.finished)
        return other


class Outcomes:
    """Counts what it tells in `stats`."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def of(self, events: list[Event], now: float) -> list[Output]:
        """The outputs of a step's events."""
        outputs: list[Output] = []
        for request, seq, tokens, tops in events:
            if request.aborted:
                continue
            if request.first_token is None:
                request.first_token = now
            self.stats.generated_tokens += len(tokens)
            if request.params.ranked:
                if request.status is Status.DONE and not request.reported:
                    outputs += self._ranked(request)
            elif seq is None:
                outputs += self._together(request)
            else:
                outputs.append(self._alone(request, seq, tokens, tops))
        return outputs

    def aborted(self, request: Request, told: list[Sequence]) -> list[Output]:
        """The last outputs of an aborted request: of the branches in `told`, or of those that it would return."""
        if request.method is not None or request.params.ranked:
            return self._without(request, "abort")
        return [self._alone(request, seq, (), ()) for seq in told]

    def stopped(self, request: Request, seq: Sequence) -> bool:
        """Whoever reads a branch ended it, and knows: it isn't told. Whether the whole request has ended."""
        self._end(request, seq.finish or "")
        return request.reported == len(request.live) + len(request.done)

    def stopped_together(self, request: Request) -> None:
        """The same of a request whose branches are returned together: all of it has ended."""
        for _ in range(request.params.n):
            self._end(request, "stop")

    # Each branch by itself

    def _alone(self, request: Request, seq: Sequence, tokens: tuple[int, ...], tops: tuple[Top, ...]) -> Output:
        done = False
        if seq.finish is not None:
            self._end(request, seq.finish)
            done = request.reported == len(request.live) + len(request.done)
        first = len(seq.tokens) - seq.prompt_len <= len(tokens)
        return Output(
            request.id, seq.index, tokens, "", tops, seq.finish, seq.stop_reason, done, seq.cumulative_logprob,
            tuple(seq.prompt_tops) if first and not seq.index and request.params.prompt_logprobs is not None else None,
            request.cached_tokens, seq.pooled,
        )  # fmt: skip

    # Branches of which some are returned

    def _ranked(self, request: Request) -> list[Output]:
        """best_of: the n branches of the highest cumulative log-probability, best first."""
        best = sorted(request.done, key=_rank)[: request.params.n]
        return [self._part(request, branch, seq, seq.prompt_len, len(seq.tokens)) for branch, seq in enumerate(best)]

    def _together(self, request: Request) -> list[Output]:
        """What a method's step settled: the tokens that all its branches agree on, or at its end the best results."""
        n = request.params.n
        if request.status is not Status.DONE:
            every = [seq for _, seq in request.results] + request.live
            start, end = _settled(request, every)
            request.settled += end - start
            return [self._part(request, branch, every[0], start, end) for branch in range(n)] if end > start else []
        best = [seq for _, seq in request.results[:n]]
        if not best:  # an error ended all of them; or, in a session, the last was freed
            last = next((seq for seq in request.done if seq.finish == "error"), request.done[-1])
            return self._without(request, last.finish or "", last.stop_reason)
        start = best[0].prompt_len + request.settled
        told = [self._part(request, branch, seq, start, len(seq.tokens)) for branch, seq in enumerate(best)]
        if len(best) < n:
            told += self._without(request, "error", f"there are only {len(best)} results", first=len(best))
        return told

    def _part(self, request: Request, branch: int, seq: Sequence, start: int, end: int) -> Output:
        """Tokens [start, end) of what branch `branch` of the request turns out to be."""
        tokens = tuple(seq.tokens[start:end])
        tops = tuple(seq.tops[start - seq.prompt_len : end - seq.prompt_len])
        finish = seq.finish if request.status is Status.DONE else None
        first = start == seq.prompt_len and not branch and request.params.prompt_logprobs is not None
        if request.method is not None:
            self.stats.generated_tokens += len(tokens)
        done = False
        if finish is not None:
            self._end(request, finish)
            done = branch == request.params.n - 1
        return Output(
            request.id, branch, tokens, "", tops, finish, seq.stop_reason if finish is not None else None, done,
            seq.cumulative_logprob, tuple(seq.prompt_tops) if first else None, request.cached_tokens,
        )  # fmt: skip

    def _without(self, request: Request, why: str, reason: int | str | None = None, first: int = 0) -> list[Output]:
        """The end of a request whose branches are returned together; those from `first` on have no results."""
        outputs = []
        for branch in range(first, request.params.n):
            self._end(request, why)
            done = branch == request.params.n - 1
            outputs.append(Output(request.id, branch, (), "", (), why, reason, done, 0.0))
        return outputs

    # What all of them do

    def _end(self, request: Request, why: str) -> None:
        """A branch's end is told."""
        self.stats.finished[why] = self.stats.finished.get(why, 0) + 1
        request.reported += 1


def _settled(request: Request, every: list[Sequence]) -> tuple[int, int]:
    """From where on, and up to where, all of `every` have the same tokens that weren't told yet."""
    first = every[0]
    start, end = first.prompt_len + request.settled, min(len(seq.tokens) for seq in every)
    end = next((i for i in range(start, end) if any(s.tokens[i] != first.tokens[i] for s in every)), end)
    return start, end


def _rank(seq: Sequence) -> tuple[bool, float, int]:
    """The order of best_of's branches: one that failed comes last, whatever its log-probability."""
    return seq.finish == "error", -seq.cumulative_logprob, seq.index
