"""The engine: requests in, outputs out, one step at a time. `schedule -> submit -> update` is all there is to a step.

It joins a scheduler with a runner through two messages (vocabulary.plan) and knows neither tensors nor pages. Time and
text come in through protocols, so that a simulator is this engine with another runner and clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

from quire.control.checked import Checked, checked_method
from quire.control.decoding import context_of
from quire.control.limits import Limits, check_salt
from quire.control.request import Request, Sequence, Status
from quire.control.scheduler import Event, Scheduler
from quire.errors import EngineDead, InputError, PrefixesFull, PrefixTaken
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import StepPlan, StepResult, Top
from quire.vocabulary.seeds import branch_seed
from quire.vocabulary.specs import Geometry


class Runner(Protocol):
    """The data plane. `submit` only enqueues; up to `depth` plans may be in flight, collected in order."""

    depth: int

    def bind(self, geometry: Geometry) -> None:
        """Allocate the tensors of a memory."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Enqueue a step; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for the step of a ticket."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class TextStream(Protocol):
    """Turns a sequence's tokens into text as they come, and finds stop strings in it."""

    def push(self, tokens: Seq[int], last: bool) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string that ends the sequence, if one was found."""
        ...


class Text(Protocol):
    """What the engine needs of a tokenizer."""

    def stream(self, prompt: Seq[int], params: SamplingParams) -> TextStream: ...
    def resolve(self, params: SamplingParams) -> SamplingParams: ...


class Output(NamedTuple):
    """What a step brought for one branch of a request. `finish_reason` is None while the branch goes on; `done` says
    that the whole request ended. `prompt_tops` and `cached_tokens` come with the first output of a branch."""

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


class Stats:
    """Counters since the start; plain numbers that a server exports."""

    __slots__ = (
        "computed_tokens", "finished", "generated_tokens", "prompt_tokens", "rows", "step_seconds", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps = self.rows = self.prompt_tokens = self.generated_tokens = 0
        self.computed_tokens = 0  # of prompts and outputs, in steps that were collected
        self.step_seconds = 0.0
        self.finished: dict[str, int] = {}


class Accepted(NamedTuple):
    """A request that passed every check and isn't queued yet."""

    tokens: list[int]
    max_tokens: int
    width: int
    method: Checked | None


class Engine:
    """`add` requests, `step` until nothing is left. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: Limits,
        *,
        clock: Callable[[], float],
        text: Text | None = None,
        seed: int = 0,
        depth: int | None = None,
    ) -> None:
        self.scheduler, self.runner, self.limits, self.clock, self.text = scheduler, runner, limits, clock, text
        self.depth = depth or runner.depth
        self.seed = seed
        self.requests: dict[str, Request] = {}
        self.streams: dict[tuple[str, int], TextStream] = {}  # by request and branch
        self.flight: deque[tuple[StepPlan, Any]] = deque()
        self.outbox: list[Output] = []  # outputs that no step brought: aborts
        self.stats = Stats()
        self.added = 0
        self.prefixes: dict[str, int] = {}  # registered ones, and those being computed: their lengths

    # In

    def add(
        self,
        id: str,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        salt: str = "",
        prefix: str | None = None,
        waits: bool = False,
    ) -> None:
        """Queue a request. Raises InputError (PromptTooLong) or Overloaded, and then nothing changed. `waits`: its
        method may leave its branches to whoever added it (text.session)."""
        self.add_all([(id, prompt)], params, salt=salt, prefix=prefix, waits=waits)

    def add_all(
        self,
        prompts: Seq[tuple[str, Seq[int]]],
        params: SamplingParams,
        *,
        salt: str = "",
        prefix: str | None = None,
        waits: bool = False,
    ) -> None:
        """Queue a request for each (id, prompt), all or none. Raises as `add`. `params` should be resolved already (see
        Text.resolve): that takes time, and this is the thread that steps."""
        self.limits.check_queue(len(prompts), len(self.scheduler.waiting))
        check_salt(salt)
        params.check_vocabulary(self.limits.vocab_size)
        if self.text is not None:
            params = self.text.resolve(params)
        accepted: dict[str, Accepted] = {}
        for id, prompt in prompts:
            if id in self.requests or id in accepted:
                raise InputError(f"request id {id[:80]!r} is in use", "request_id")
            accepted[id] = self._accept(prompt, params, waits)
        for id, one in accepted.items():
            self._queue(id, one, params, salt, prefix)

    def _accept(self, prompt: Seq[int], params: SamplingParams, waits: bool) -> Accepted:
        tokens = self.limits.tokens(prompt)
        method = checked_method(params, self.limits.vocab_size, waits)
        width = params.width if method is None else method.width
        fits, max_seqs = self.scheduler.memory.fits, self.scheduler.max_seqs
        max_tokens = self.limits.max_tokens(len(tokens), params, width, max_seqs, fits)
        if method is not None:
            method.settle(context_of(params, max_tokens, self.scheduler.eos_ids))
        return Accepted(tokens, max_tokens, width, method)

    def _queue(self, id: str, accepted: Accepted, params: SamplingParams, salt: str, prefix: str | None) -> None:
        seed = params.seed % 2**63 if params.seed is not None else branch_seed(self.seed, self.added << 20)
        self.added += 1
        seq = Sequence(self.scheduler.new_id(), accepted.tokens, seed=seed, salt=salt)
        seq.branches = accepted.width - 1
        if params.prompt_logprobs is not None:
            seq.reusable = 0
        request = Request(id, seq, params, arrival=self.clock(), max_tokens=accepted.max_tokens)
        request.method, request.prefix = accepted.method, prefix
        self.requests[id] = request
        self.scheduler.add(request)

    def abort(self, id: str) -> None:
        """End a request; its last outputs, with finish_reason "abort", come with the next step. Unknown ids pass."""
        request = self.requests.get(id)
        if request is None:
            return
        request.aborted = True
        told = [seq for seq in request.live if seq.finish is None]
        for seq in told:
            self.scheduler.finish(request, seq, "abort")
        if request.method is not None or request.params.ranked:
            self._end(request, "abort")
            return
        self.outbox += [self._output(request, seq, (), "", ()) for seq in told]

    def _end(self, request: Request, why: str, reason: int | str | None = None, first: int = 0) -> None:
        """End a request whose branches are returned together; those from `first` on have no results."""
        del self.requests[request.id]
        for branch in range(first, request.params.n):
            self.streams.pop((request.id, branch), None)
            self._finished(why)
            done = branch == request.params.n - 1
            self.outbox.append(Output(request.id, branch, (), "", (), why, reason, done, 0.0))

    def register_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Compute `tokens` and pin them as the prefix `name` (PagedAttention §4.4); an output of request "prefix:NAME"
        tells when it is ready, or by finish_reason "error" that it is not. PrefixTaken, PrefixesFull, or as `add`."""
        memory = self.scheduler.memory
        if name in self.prefixes:
            raise PrefixTaken(f"a prefix called {name[:60]!r} is registered already", "name")
        if not memory.room_for_prefix(len(tokens)):
            raise PrefixesFull(
                f"a prefix of {len(tokens)} tokens exceeds what is left of what is kept for prefixes (--prefix-tokens)",
                "prefix",
            )
        self.add(f"prefix:{name}", tokens, SamplingParams(temperature=0, max_tokens=1, detokenize=False), prefix=name)
        self.prefixes[name] = len(tokens)

    def release_prefix(self, name: str) -> bool:
        """Let go of a prefix. False if there is none of that name."""
        if self.prefixes.pop(name, None) is None:
            return False
        request = self.requests.get(f"prefix:{name}")
        if request is not None and request.prefix == name:
            self.abort(request.id)
        self.scheduler.memory.unpin(name)
        return True

    # Step

    @property
    def unfinished(self) -> bool:
        """There is work or output left."""
        return bool(self.outbox) or self.scheduler.unfinished

    def step(self) -> list[Output]:
        """Plan and submit until `depth` steps are in flight, then take in the oldest. Returns what it brought: nothing
        if all that is left waits for its caller. EngineDead if nothing can be done and nobody is waited for."""
        outputs, self.outbox = self.outbox, []
        while len(self.flight) < self.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._planned(plan)
            self.flight.append((plan, self.runner.submit(plan)))
        if self.flight:
            plan, ticket = self.flight.popleft()
            result = self.runner.collect(ticket)
            self.stats.step_seconds += result.seconds
            self.stats.computed_tokens += sum(len(row.tokens) for row in plan.rows)
            outputs += self._publish(self.scheduler.update(plan, result))
        elif self.scheduler.unfinished and not outputs and not any(map(_waits, self.scheduler.running)):
            raise EngineDead(f"no progress: {len(self.scheduler.waiting)} requests wait and nothing can be planned")
        return outputs

    def _planned(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.rows += len(plan.rows)
        for birth in plan.births:
            # Whoever was swapped in without a row, a step being in flight, may have left again, its slot be another's.
            resident = self.scheduler.by_slot.get(birth.slot)
            if birth.parent >= 0 or resident is None or resident[1].id != birth.seq:
                continue
            request = resident[0]
            if request.scheduled is None:
                request.scheduled = self.clock()
                self.stats.prompt_tokens += birth.prompt_len

    def _publish(self, events: list[Event]) -> list[Output]:
        """Events with text; a stop string found in the text ends its sequence."""
        outputs: list[Output] = []
        for request, seq, tokens, tops in events:
            if request.aborted:
                continue
            if request.first_token is None:
                request.first_token = self.clock()
            self.stats.generated_tokens += len(tokens)
            if request.params.ranked:
                if request.status is Status.DONE and request.id in self.requests:
                    outputs += self._ranked(request)
            elif seq is None:
                outputs += self._together(request)
            else:
                text, stop = self._text(request, seq.index, seq, tokens)
                if stop is not None:
                    # Found before the end token or length that may have ended the sequence in the same step.
                    seq.finish = None
                    self.scheduler.finish(request, seq, "stop", stop)
                outputs.append(self._output(request, seq, tokens, text, tops))
        return outputs

    def _together(self, request: Request) -> list[Output]:
        """What a method's step settled: the tokens that all its branches agree on, or at its end the best results."""
        params, done = request.params, request.status is Status.DONE
        if done and not request.results:  # what failed ended all branches; else its caller freed the last
            last = next((seq for seq in request.done if seq.finish == "error"), request.done[-1])
            self._end(request, last.finish or "", last.stop_reason)
            return []
        every = [seq for _, seq in request.results] + ([] if done else request.live)
        first = every[0]
        start = first.prompt_len + request.settled
        if not done:
            end = min(len(seq.tokens) for seq in every)
            end = next((i for i in range(start, end) if any(s.tokens[i] != first.tokens[i] for s in every)), end)
            request.settled += end - start
            if end == start:
                return []
        chosen = every[: params.n] if done else [first] * params.n
        if len(chosen) < params.n:
            self._end(request, "error", f"there are only {len(chosen)} results", first=len(chosen))
        return [
            self._branch(request, branch, seq, start, len(seq.tokens) if done else end, branch == params.n - 1)
            for branch, seq in enumerate(chosen)
        ]

    def _branch(self, request: Request, branch: int, seq: Sequence, start: int, end: int, last: bool) -> Output:
        """Tokens [start, end) of what branch `branch` of the request turns out to be."""
        tokens = tuple(seq.tokens[start:end])
        tops = tuple(seq.tops[start - seq.prompt_len : end - seq.prompt_len])
        whole = end == len(seq.tokens) and seq.finish is not None and request.status is Status.DONE
        shown = (
            tokens[:-1] if whole and seq.finish == "stop" and not request.params.include_stop_str_in_output else tokens
        )
        text, _ = self._stream(request, branch, seq, shown, whole)
        first = start == seq.prompt_len and request.params.prompt_logprobs is not None
        done = False
        if request.method is not None:
            self.stats.generated_tokens += len(tokens)
        if whole:
            self._finished(seq.finish or "")
            self.streams.pop((request.id, branch), None)
            done = last
            if done:
                del self.requests[request.id]
        return Output(
            request.id, branch, tokens, text, tops, seq.finish if whole else None, seq.stop_reason if whole else None,
            done, seq.cumulative_logprob, tuple(seq.prompt_tops) if first else None, request.cached_tokens,
        )  # fmt: skip

    def _ranked(self, request: Request) -> list[Output]:
        """best_of: the n branches of the highest cumulative log-probability, best first."""
        best = sorted(request.done, key=_rank)[: request.params.n]
        return [
            self._branch(request, branch, seq, seq.prompt_len, len(seq.tokens), branch == len(best) - 1)
            for branch, seq in enumerate(best)
        ]

    def _text(self, request: Request, branch: int, seq: Sequence, tokens: tuple[int, ...]) -> tuple[str, str | None]:
        if seq.finish == "stop" and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the end token itself is not text
        return self._stream(request, branch, seq, tokens, seq.finish is not None)

    def _stream(
        self, request: Request, branch: int, seq: Sequence, tokens: tuple[int, ...], last: bool
    ) -> tuple[str, str | None]:
        if self.text is None or not request.params.detokenize:
            return "", None
        stream = self.streams.get((request.id, branch))
        if stream is None:
            stream = self.text.stream(seq.tokens[: seq.prompt_len], request.params)
            self.streams[request.id, branch] = stream
        return stream.push(tokens, last)

    def _finished(self, why: str) -> None:
        self.stats.finished[why] = self.stats.finished.get(why, 0) + 1

    def _output(
        self, request: Request, seq: Sequence, tokens: tuple[int, ...], text: str, tops: tuple[Top, ...]
    ) -> Output:
        done = False
        if seq.finish is not None:
            self.streams.pop((request.id, seq.index), None)
            self._finished(seq.finish)
            request.reported += 1
            done = request.reported == len(request.live) + len(request.done)
            if done:
                del self.requests[request.id]
                if request.prefix is not None and seq.finish in ("abort", "error"):
                    self.prefixes.pop(request.prefix, None)
        first = len(seq.tokens) - seq.prompt_len <= len(tokens)
        return Output(
            request.id, seq.index, tokens, text, tops, seq.finish, seq.stop_reason, done, seq.cumulative_logprob,
            tuple(seq.prompt_tops) if first and request.params.prompt_logprobs is not None else None,
            request.cached_tokens,
        )  # fmt: skip

    def close(self) -> None:
        """Release the runner. The engine can't be used afterwards."""
        self.flight.clear()
        self.runner.close()


def _waits(request: Request) -> bool:
    """Its branches have all that they asked for: whoever added it says how they go on."""
    return request.method is not None and len(request.candidates) == len(request.live)


def _rank(seq: Sequence) -> tuple[bool, float, int]:
    """The order of best_of's branches: one that failed comes last, whatever its log-probability."""
    return seq.finish == "error", -seq.cumulative_logprob, seq.index
