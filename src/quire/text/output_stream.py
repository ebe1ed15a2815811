"""Streams: one request's outputs on their way from the engine's thread to the coroutine that reads them.

A reader that is slow, or away, holds nothing up: what came meanwhile is merged, so a stream never holds more than one
output a branch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.outputs import BranchOutput
from quire.errors import EngineDead
from quire.protocol.sampling_params import SamplingParams
from quire.text.request_detokenizer import RequestDetokenizer


class RequestRecord:
    """A request as its front knows it; times are in seconds of the monotonic clock, None where it hasn't happened.
    `is_prefix`: it isn't a client's, but computes a prefix that is registered."""

    __slots__ = (
        "arrival_time",
        "branch_progress",
        "cached_tokens",
        "first_token_time",
        "id",
        "is_prefix",
        "max_tokens",
        "params",
        "preemptions",
        "prompt_len",
        "scheduled_time",
    )  # fmt: skip

    def __init__(
        self, id: str, prompt_len: int, params: SamplingParams, arrival: float, is_prefix: bool = False
    ) -> None:
        self.id, self.prompt_len, self.params, self.arrival_time, self.is_prefix = (
            id,
            prompt_len,
            params,
            arrival,
            is_prefix,
        )
        self.max_tokens = self.cached_tokens = self.preemptions = 0
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.branch_progress: dict[int, list[float]] = {}  # of each branch: when its last token came, and how many have


class StepObserver(Protocol):
    """Sees what happens."""

    def on_step_computed(self, tokens: int) -> None:
        """A step computed so many tokens."""
        ...

    def on_outputs(self, outputs: Sequence[tuple[BranchOutput, RequestRecord]], now: float) -> None:
        """Outputs of a step that ended at `now` reached their streams; on the event loop of these."""
        ...


class MergedOutput:
    """What came for one branch since its reader last looked: any number of Outputs merged into one."""

    __slots__ = ("last", "prompt_tops", "texts", "tokens", "tops")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.tops: list[Any] = []
        self.prompt_tops: tuple[Any, ...] | None = None
        self.last: BranchOutput | None = None

    def add(self, output: BranchOutput) -> None:
        """Merge one more."""
        self.tokens += output.tokens
        self.texts.append(output.text)
        self.tops += output.top_logprobs
        if output.prompt_logprobs is not None:
            self.prompt_tops = output.prompt_logprobs
        self.last = output

    def to_output(self) -> BranchOutput:
        """All of them as one Output."""
        assert self.last is not None, "an empty delta is read"
        return self.last._replace(
            tokens=tuple(self.tokens),
            text="".join(self.texts),
            top_logprobs=tuple(self.tops),
            prompt_logprobs=self.prompt_tops,
        )


class OutputStream:
    """The outputs of one accepted request, as an async iterator on the loop that asked, or for a listener there. A slow
    reader finds one merged Output a branch; a `final_only` one is woken at the end only. EngineDead is raised after the
    outputs before it."""

    def __init__(self, id: str, accepted: asyncio.Future[None], final_only: bool = False) -> None:
        self.id, self.accepted, self.final_only = id, accepted, final_only
        self.loop = accepted.get_loop()
        self.number: int
        self.record: RequestRecord
        self.detokenizer: RequestDetokenizer
        self.done = False
        self._finished = False
        self._ready = asyncio.Event()
        self._deltas: dict[int, MergedOutput] = {}
        self._error: Exception | None = None
        self._listener: tuple[Callable[[BranchOutput], None], Callable[[Exception], None]] | None = None

    def listen(self, put: Callable[[BranchOutput], None], fail: Callable[[Exception], None]) -> None:
        """On the loop, before anything is read: outputs and the error go to these as they come, none to the iterator.
        What came already goes at once."""
        self._listener = put, fail
        held, self._deltas = [delta.to_output() for delta in self._deltas.values()], {}
        for at, output in enumerate(held, 1):  # `done` belongs to the last one, whichever branch ended last
            self.put(output._replace(done=self._finished and at == len(held)))
        if self._error is not None:
            fail(self._error)

    @property
    def failed(self) -> bool:
        """Nothing more will come, but an error."""
        return self._error is not None

    def put(self, output: BranchOutput) -> None:
        """On the loop: one more output."""
        if self._listener is not None:
            self.done = self.done or output.done
            self._listener[0](output)
            return
        self._deltas.setdefault(output.branch, MergedOutput()).add(output)
        self._finished = self._finished or output.done
        if self._finished or not self.final_only:
            self._ready.set()

    def fail(self, error: Exception) -> None:
        """On the loop: nothing more will come."""
        self._error = error
        self._ready.set()
        if self._listener is not None:
            self._listener[1](error)
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> BranchOutput:
        while not self._deltas or (self.final_only and not self._finished):
            if self.done:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        branch = next(iter(self._deltas))
        output = self._deltas.pop(branch).to_output()
        # `done` belongs to the last one read, whichever branch ended last.
        self.done = self._finished and not self._deltas
        return output._replace(done=self.done)


def describe_error(error: BaseException | None) -> str:
    """Why the engine stopped; never empty. None: it was closed."""
    if error is None or isinstance(error, EngineDead):
        return str(error or "") or "closed"
    return f"{type(error).__name__}: {error}"


def engine_dead_error(error: BaseException | None) -> EngineDead:
    """What those who wait are told of it."""
    return EngineDead(f"the engine stopped: {describe_error(error)}"[:300])


def as_exception(error: BaseException) -> Exception:
    """As an asyncio future may carry it: SystemExit and its like end whoever awaits them."""
    return error if isinstance(error, Exception) else engine_dead_error(error)


def resolve_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """On the loop: what was asked is known, or failed."""
    if future.done():
        return  # nobody waits any more
    if error is not None:
        future.set_exception(as_exception(error))
    else:
        future.set_result(result)
