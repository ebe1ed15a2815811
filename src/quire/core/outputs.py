"""Turns a step's events into outputs. Most branches report their tokens as they come. The branches of a method report
what all of them agree on, until the best are known; best_of reports at its end.

Outputs have tokens only: clients make text of them and check stop strings (quire.text.request_detokenizer).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire.config import MAX_DRAFT_TOKENS
from quire.core.request import NO_DRAFT_COUNTS, DraftCounts, Request, RequestStatus, SeqEvent
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import StepPlan, StepResult, TopLogprobs


class BranchOutput(NamedTuple):
    """The output of a step for one branch of a request. `finish_reason` is None while the branch goes on; `done`: the
    whole request has ended. Every output has `cached_tokens` and `drafts`, the first one of branch 0 `prompt_logprobs`,
    and the last one of a request with pooling `pooled` [hidden]: the hidden state of the last token, or the mean of
    all. The client sets `text`, and on a stop string also `finish_reason`, `stop_reason` and `done`."""

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
    drafts: DraftCounts = NO_DRAFT_COUNTS


class MergedOutput:
    """The outputs of one branch since the last read, merged: tokens, texts and log-probabilities follow each other, all
    else is the last output's. Tokens are appended to `tokens`; an array("i") takes the least memory."""

    __slots__ = ("last", "prompt_tops", "texts", "tokens", "tops")

    def __init__(self, tokens: list[int] | array[int] | None = None) -> None:
        self.tokens = [] if tokens is None else tokens
        self.texts: list[str] = []
        self.tops: list[TopLogprobs] = []
        self.prompt_tops: tuple[TopLogprobs, ...] | None = None
        self.last: BranchOutput | None = None

    def add(self, output: BranchOutput) -> None:
        """Merge an output."""
        self.tokens.extend(output.tokens)
        if output.text:
            self.texts.append(output.text)
        self.tops += output.top_logprobs
        if output.prompt_logprobs is not None:
            self.prompt_tops = output.prompt_logprobs
        self.last = output

    def to_output(self) -> BranchOutput:
        """Return all of them as one BranchOutput."""
        assert self.last is not None, "no output was merged"
        return self.last._replace(
            tokens=tuple(self.tokens), text="".join(self.texts), top_logprobs=tuple(self.tops),
            prompt_logprobs=self.prompt_tops,
        )  # fmt: skip


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, which a server exports as metrics."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    restarts: int = 0  # of the runner, failed ones included
    computed_tokens: int = 0  # of prompts and outputs, in collected steps
    step_seconds: float = 0.0
    idle_seconds: float = 0.0  # the device waited for the host between two steps
    finished: dict[str, int] = field(default_factory=dict)
    num_drafts: int = 0  # slices with draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that were accepted
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)  # by position in their slice

    @property
    def acceptance_rate(self) -> float:
        """The share of the draft tokens that were accepted."""
        return self.accepted_tokens / max(self.draft_tokens, 1)

    @property
    def mean_accepted_length(self) -> float:
        """The mean number of tokens from a slice with draft tokens: the accepted ones, and the sample after them."""
        return 1 + self.accepted_tokens / max(self.num_drafts, 1)

    def copy(self) -> EngineStats:
        """Return a copy of the counters."""
        return replace(self, finished=dict(self.finished), accepted_per_pos=list(self.accepted_per_pos))

    def record_drafts(self, plan: StepPlan, result: StepResult) -> None:
        """Count the draft tokens of a collected step."""
        for row, sampled in zip(plan.slices, result.slice_results):
            if row.draft_tokens:
                accepted = len(sampled.tokens) - 1
                self.num_drafts += 1
                self.draft_tokens += len(row.draft_tokens)
                self.accepted_tokens += accepted
                self.computed_tokens += accepted
                for i in range(accepted):
                    self.accepted_per_pos[i] += 1


class OutputBuilder:
    """Builds outputs and counts them in `stats`."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def build(self, events: list[SeqEvent], now: float) -> list[BranchOutput]:
        """Return the outputs of a step's events."""
        outputs: list[BranchOutput] = []
        generated_tokens = 0
        for request, seq, tokens, tops in events:
            if request.aborted:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            generated_tokens += 0 if request.hands_over else len(tokens)
            if request.params.returns_best_of:
                if request.status is RequestStatus.DONE and not request.num_reported:
                    outputs += self._best_of_outputs(request)
            elif seq is None:
                outputs += self._method_outputs(request)
            else:
                output = self._branch_output(request, seq, tokens, tops)
                outputs += _copies(output, request.params.n) if request.max_tokens == 0 else [output]
        self.stats.generated_tokens += generated_tokens
        return outputs

    def build_aborted(self, request: Request, seqs: list[Sequence]) -> list[BranchOutput]:
        """Return the last outputs of an aborted request: of the branches `seqs`, or of the branches to be returned."""
        if request.method is not None or request.params.returns_best_of:
            return self._outputs_without_result(request, "abort")
        return [self._branch_output(request, seq, (), ()) for seq in seqs]

    def record_stop(self, request: Request, seq: Sequence) -> bool:
        """Count a branch that its client ended, without an output. Return True if the whole request has ended."""
        self._count_end(request, seq.finish_reason or "")
        return request.num_reported == len(request.live_seqs) + len(request.finished_seqs)

    def record_stop_of_all(self, request: Request) -> None:
        """Count the end, by its client, of a request whose branches are returned together."""
        for _ in range(request.params.n):
            self._count_end(request, "stop")

    # Independent branches

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
            request.id, seq.branch_index, tokens, "", top_logprobs if tokens else (), seq.finish_reason,
            seq.stop_reason, done, seq.cumulative_logprob,
            tuple(seq.prompt_logprobs) if wants_prompt_logprobs else None,
            request.cached_tokens, seq.pooled, request.draft_counts,
        )  # fmt: skip

    # best_of and methods

    def _best_of_outputs(self, request: Request) -> list[BranchOutput]:
        """Return the n branches of best_of with the highest cumulative log-probability, best first."""
        best = sorted(request.finished_seqs, key=_best_of_key)[: request.params.n]
        return [
            self._range_output(request, branch, seq, seq.prompt_len, len(seq.tokens)) for branch, seq in enumerate(best)
        ]

    def _method_outputs(self, request: Request) -> list[BranchOutput]:
        """Return the new tokens that all branches of a method agree on, or at its end the best results."""
        n = request.params.n
        if request.status is not RequestStatus.DONE:
            seqs = [seq for _, seq in request.results] + request.live_seqs
            start, end = _agreed_range(request, seqs)
            request.agreed_tokens += end - start
            if end == start:
                return []
            return [self._range_output(request, branch, seqs[0], start, end) for branch in range(n)]
        best = [seq for _, seq in request.results[:n]]
        if not best:  # an error ended all of them; or, in a session, the last was freed
            last = next(
                (seq for seq in request.finished_seqs if seq.finish_reason == "error"), request.finished_seqs[-1]
            )
            return self._outputs_without_result(request, last.finish_reason or "", last.stop_reason)
        start = best[0].prompt_len + request.agreed_tokens
        outputs = [self._range_output(request, branch, seq, start, len(seq.tokens)) for branch, seq in enumerate(best)]
        if len(best) < n:
            outputs += self._outputs_without_result(
                request, "error", f"there are only {len(best)} results", first=len(best)
            )
        return outputs

    def _range_output(self, request: Request, branch: int, seq: Sequence, start: int, end: int) -> BranchOutput:
        """Return an output of branch `branch` with the tokens [start, end) of `seq`."""
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
            drafts=request.draft_counts,
        )  # fmt: skip

    def _outputs_without_result(
        self, request: Request, why: str, reason: int | str | None = None, first: int = 0
    ) -> list[BranchOutput]:
        """Return the ends of the branches from `first` on, for which a method or best_of has no results."""
        outputs = []
        for branch in range(first, request.params.n):
            self._count_end(request, why)
            done = branch == request.params.n - 1
            outputs.append(BranchOutput(request.id, branch, (), "", (), why, reason, done, 0.0))
        return outputs

    def _count_end(self, request: Request, why: str) -> None:
        """Count the end of a branch."""
        if not request.hands_over:
            self.stats.finished[why] = self.stats.finished.get(why, 0) + 1
        request.num_reported += 1


def _copies(output: BranchOutput, n: int) -> list[BranchOutput]:
    """Return `n` branches with the same output. The first has the log-probabilities of the prompt."""
    return [
        output._replace(branch=i, done=i == n - 1, prompt_logprobs=None if i else output.prompt_logprobs)
        for i in range(n)
    ]


def _agreed_range(request: Request, seqs: list[Sequence]) -> tuple[int, int]:
    """Return the range [start, end) of tokens that all of `seqs` share and that were not reported yet."""
    first = seqs[0]
    start, end = first.prompt_len + request.agreed_tokens, min(len(seq.tokens) for seq in seqs)
    end = next((i for i in range(start, end) if any(s.tokens[i] != first.tokens[i] for s in seqs)), end)
    return start, end


def _best_of_key(seq: Sequence) -> tuple[bool, float, int]:
    """Return the sort key of best_of: failed branches come last, whatever their log-probability."""
    return seq.finish_reason == "error", -seq.cumulative_logprob, seq.branch_index
