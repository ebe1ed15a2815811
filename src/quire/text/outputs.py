"""Result types with vLLM's names, and their construction from a request's BranchOutputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from typing import NamedTuple

from quire.core.outputs import BranchOutput
from quire.core.request import Request
from quire.errors import PrefixesFull, PrefixTaken
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import TopLogprobs
from quire.text.output_stream import RequestRecord

Decode = Callable[[int], str | None] | None


class Logprob(NamedTuple):
    """A token's log-probability, its rank in the vocabulary (1: most likely; None if not computed, as for
    logprob_token_ids), and its text (None without a tokenizer)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class RequestMetrics(NamedTuple):
    """Times of a request's events in seconds of the engine's clock, or None."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `logprobs[i]` maps the i-th token, and the most likely alternatives or the logprob_token_ids,
    to their Logprob.

    `finish_reason` is "stop", "length", "abort" or "error". `stop_reason` is the stop string or stop token that ended
    the continuation, or the error; None for an end token."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return True if the continuation has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations, by index. `prompt_logprobs` begins with None: the first token has no
    probability."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """A beam, with vLLM's names. `tokens` and `text` begin with the prompt; `cum_logprob` excludes it. `logprobs` has
    the most likely alternatives of each new token."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def make_logprobs(top: TopLogprobs, decode: Decode, from_token_ids: bool = False) -> dict[int, Logprob]:
    """Return TopLogprobs as a mapping: the sampled token first, then the most likely ones or, with `from_token_ids`,
    the requested ones without ranks."""
    text = decode or (lambda token: None)
    ranked = zip(top.ids, top.logprobs, repeat(None) if from_token_ids else count(1))
    return {
        top.token: Logprob(top.logprob, top.rank, text(top.token)),
        **{token: Logprob(value, rank, text(token)) for token, value, rank in ranked if token != top.token},
    }


class RequestOutputBuilder:
    """Collects the outputs of one request into its RequestOutput."""

    def __init__(self, id: str, prompt: str | None, ids: list[int], params: SamplingParams, decode: Decode) -> None:
        self.result = RequestOutput(id, prompt, ids)
        self._want_logprobs, self._from_token_ids = params.num_logprobs >= 0, bool(params.logprob_token_ids)
        self._decode = decode
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        self.result.outputs = [CompletionOutput(index) for index in range(params.n)]
        if self._want_logprobs:
            for completion in self.result.outputs:
                completion.logprobs = []
        # Branches ranked by it have it even if no log-probabilities were requested.
        if self._want_logprobs or params.returns_best_of or params.beam_width is not None or params.method is not None:
            for completion in self.result.outputs:
                completion.cumulative_logprob = 0.0

    def push(self, output: BranchOutput) -> None:
        """Add an output of a step."""
        completion = self.result.outputs[output.branch]
        completion.token_ids += output.tokens
        self._texts[output.branch].append(output.text)
        if completion.cumulative_logprob is not None:
            completion.cumulative_logprob = output.cumulative_logprob
        if completion.logprobs is not None:
            completion.logprobs += [
                make_logprobs(top, self._decode, self._from_token_ids) for top in output.top_logprobs
            ]
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        if output.prompt_logprobs is not None and output.branch == 0:  # scored once, before the branches
            scored = [make_logprobs(top, self._decode) for top in output.prompt_logprobs]
            self.result.prompt_logprobs = [None, *scored]
        self.result.num_cached_tokens = output.cached_tokens
        self.result.finished = output.done

    def snapshot(self) -> RequestOutput:
        """Return a copy of the result so far."""
        outputs = []
        for completion, texts in zip(self.result.outputs, self._texts):
            texts[:] = ["".join(texts)]
            logprobs = None if completion.logprobs is None else list(completion.logprobs)
            outputs.append(replace(completion, text=texts[0], token_ids=list(completion.token_ids), logprobs=logprobs))
        return replace(self.result, outputs=outputs)

    def finish(self, request: Request | RequestRecord | None = None, now: float | None = None) -> RequestOutput:
        """Return the result. Branches that never started (aborted before the fork) end as aborted."""
        for completion, texts in zip(self.result.outputs, self._texts):
            completion.text = "".join(texts)
            completion.finish_reason = completion.finish_reason or "abort"
        self.result.finished = True
        if request is not None:
            self.result.metrics = RequestMetrics(
                request.arrival_time, request.scheduled_time, request.first_token_time, now
            )
        return self.result


def check_registered(name: str, last: BranchOutput) -> None:
    """Raise the error that kept a prefix from being registered, given the last output of its computation."""
    if last.finish_reason == "error":
        raise PrefixesFull(f"the prefix {name!r} was not registered: {last.stop_reason}", "prefix")
    if last.finish_reason == "abort":
        raise PrefixTaken(f"the prefix {name!r} was released while it was computed", "name")
