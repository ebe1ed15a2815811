"""Outcomes: what the events of a step come to for whoever asked, as Outputs. Most branches tell their tokens as they
come; those of a method tell what all of them agree on, until the best are known; best_of waits for its end.

Knows tokens alone: text, and what ends a branch for the sake of it, is the readers' (quire.text.request_detokenizer).
Knows neither runner nor memory.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.core.request import Request, RequestStatus, SeqEvent
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import TopLogprobs


class BranchOutput(NamedTuple):
    """What a step brought for one branch of a request. `finish_reason` is None while the branch goes on; `done` says
    that the whole request ended. `cached_tokens` come with each, `prompt_logprobs` with the first of branch 0,
    `pooled` [hidden] with the end of a request that has pooling: the last token's hidden state, or the mean of all.
    `text` is empty until a Transcript read it."""

    request_id: str
    branch: int
    tokens: tuple[int, ...]
    text: str
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    done: bool
    cumulative_logprob: float
    prompt_logprobs: tuple[TopLogprobs, ...] | None = None
    cached_tokens: int = 0
    pooled: tuple[float, ...] = ()


class EngineStats:
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

    def copy(self) -> EngineStats:
        """These numbers, as they are now."""
        other = EngineStats()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.finished = dict(self.finished)
        return other


class OutputBuilder:
    """Counts what it tells in `stats`."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def build(self, events: list[SeqEvent], now: float) -> list[BranchOutput]:
        """The outputs of a step's events."""
        outputs: list[BranchOutput] = []
        for request, seq, tokens, tops in events:
            if request.aborted:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            self.stats.generated_tokens += len(tokens)
            if request.params.returns_best_of:
                if request.status is RequestStatus.DONE and not request.num_reported:
                    outputs += self._best_of_outputs(request)
            elif seq is None:
                outputs += self._method_outputs(request)
            else:
                outputs.append(self._branch_output(request, seq, tokens, tops))
        return outputs

    def build_aborted(self, request: Request, seqs: list[Sequence]) -> list[BranchOutput]:
        """The last outputs of an aborted request: of the branches in `seqs`, or of those that it would return."""
        if request.method is not None or request.params.returns_best_of:
            return self._outputs_without_result(request, "abort")
        return [self._branch_output(request, seq, (), ()) for seq in seqs]

    def record_stop(self, request: Request, seq: Sequence) -> bool:
        """Whoever reads a branch ended it, and knows: it isn't told. Whether the whole request has ended."""
        self._count_end(request, seq.finish_reason or "")
        return request.num_reported == len(request.live_seqs) + len(request.finished_seqs)

    def record_stop_of_all(self, request: Request) -> None:
        """The same of a request whose branches are returned together: all of it has ended."""
        for _ in range(request.params.n):
            self._count_end(request, "stop")

    # Each branch by itself

    def _branch_output(
        self, request: Request, seq: Sequence, tokens: tuple[int, ...], top_logprobs: tuple[TopLogprobs, ...]
    ) -> BranchOutput:
        done = False
        if seq.finish_reason is not None:
            self._count_end(request, seq.finish_reason)
            done = request.num_reported == len(request.live_seqs) + len(request.finished_seqs)
        first = len(seq.tokens) - seq.prompt_len <= len(tokens)
        wants_prompt_logprobs = first and not seq.branch_index and request.params.prompt_logprobs is not None
        return BranchOutput(
            request.id, seq.branch_index, tokens, "", top_logprobs, seq.finish_reason, seq.stop_reason, done,
            seq.cumulative_logprob,
            tuple(seq.prompt_logprobs) if wants_prompt_logprobs else None,
            request.cached_tokens, seq.pooled,
        )  # fmt: skip

    # Branches of which some are returned

    def _best_of_outputs(self, request: Request) -> list[BranchOutput]:
        """best_of: the n branches of the highest cumulative log-probability, best first."""
        best = sorted(request.finished_seqs, key=_best_of_key)[: request.params.n]
        return [
            self._range_output(request, branch, seq, seq.prompt_len, len(seq.tokens)) for branch, seq in enumerate(best)
        ]

    def _method_outputs(self, request: Request) -> list[BranchOutput]:
        """What a method's step settled: the tokens that all its branches agree on, or at its end the best results."""
        n = request.params.n
        if request.status is not RequestStatus.DONE:
            every = [seq for _, seq in request.results] + request.live_seqs
            start, end = _agreed_range(request, every)
            request.agreed_tokens += end - start
            return (
                [self._range_output(request, branch, every[0], start, end) for branch in range(n)]
                if end > start
                else []
            )
        best = [seq for _, seq in request.results[:n]]
        if not best:  # an error ended all of them; or, in a session, the last was freed
            last = next(
                (seq for seq in request.finished_seqs if seq.finish_reason == "error"), request.finished_seqs[-1]
            )
            return self._outputs_without_result(request, last.finish_reason or "", last.stop_reason)
        start = best[0].prompt_len + request.agreed_tokens
        told = [self._range_output(request, branch, seq, start, len(seq.tokens)) for branch, seq in enumerate(best)]
        if len(best) < n:
            told += self._outputs_without_result(
                request, "error", f"there are only {len(best)} results", first=len(best)
            )
        return told

    def _range_output(self, request: Request, branch: int, seq: Sequence, start: int, end: int) -> BranchOutput:
        """Tokens [start, end) of what branch `branch` of the request turns out to be."""
        tokens = tuple(seq.tokens[start:end])
        tops = tuple(seq.top_logprobs[start - seq.prompt_len : end - seq.prompt_len])
        finish = seq.finish_reason if request.status is RequestStatus.DONE else None
        first = start == seq.prompt_len and not branch and request.params.prompt_logprobs is not None
        if request.method is not None:
            self.stats.generated_tokens += len(tokens)
        done = False
        if finish is not None:
            self._count_end(request, finish)
            done = branch == request.params.n - 1
        return BranchOutput(
            request.id, branch, tokens, "", tops, finish, seq.stop_reason if finish is not None else None, done,
            seq.cumulative_logprob, tuple(seq.prompt_logprobs) if first else None, request.cached_tokens,
        )  # fmt: skip

    def _outputs_without_result(
        self, request: Request, why: str, reason: int | str | None = None, first: int = 0
    ) -> list[BranchOutput]:
        """The end of a request whose branches are returned together; those from `first` on have no results."""
        outputs = []
        for branch in range(first, request.params.n):
            self._count_end(request, why)
            done = branch == request.params.n - 1
            outputs.append(BranchOutput(request.id, branch, (), "", (), why, reason, done, 0.0))
        return outputs

    # What all of them do

    def _count_end(self, request: Request, why: str) -> None:
        """A branch's end is told."""
        self.stats.finished[why] = self.stats.finished.get(why, 0) + 1
        request.num_reported += 1


def _agreed_range(request: Request, seqs: list[Sequence]) -> tuple[int, int]:
    """From where on, and up to where, all of `seqs` have the same tokens that weren't told yet."""
    first = seqs[0]
    start, end = first.prompt_len + request.agreed_tokens, min(len(seq.tokens) for seq in seqs)
    end = next((i for i in range(start, end) if any(s.tokens[i] != first.tokens[i] for s in seqs)), end)
    return start, end


def _best_of_key(seq: Sequence) -> tuple[bool, float, int]:
    """The order of best_of's branches: one that failed comes last, whatever its log-probability."""
    return seq.finish_reason == "error", -seq.cumulative_logprob, seq.branch_index
