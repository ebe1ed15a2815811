"""Output streams: the outputs of one request on their way from the engine's thread to the coroutine that reads them.

A slow reader never blocks the engine: outputs are merged, so a stream holds at most one output per branch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.outputs import BranchOutput, MergedOutput
from quire.errors import EngineDead
from quire.protocol.sampling_params import SamplingParams
from quire.text.request_detokenizer import RequestDetokenizer


class RequestRecord:
    """The client's record of a request. Times are seconds of the monotonic clock, or None before the event.
    `is_prefix`: the request computes a registered prefix. `engine`: the index of the engine that served it, known at
    its end. `trace` receives its end."""

    __slots__ = (
        "arrival_time", "branch_progress", "cached_tokens", "engine", "first_token_time", "id", "is_prefix",
        "max_tokens", "params", "preemptions", "prompt_len", "scheduled_time", "trace",
    )  # fmt: skip

    def __init__(
        self, id: str, prompt_len: int, params: SamplingParams, arrival: float, is_prefix: bool = False,
        trace: RequestTrace | None = None,
    ) -> None:  # fmt: skip
        self.id, self.prompt_len, self.params = id, prompt_len, params
        self.arrival_time, self.is_prefix, self.trace = arrival, is_prefix, trace
        self.max_tokens = self.cached_tokens = self.preemptions = 0
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.engine: int | None = None
        self.branch_progress: dict[int, list[float]] = {}  # by branch: time of the last token, tokens


class RequestTrace(Protocol):
    """Receives the ends of the requests of one trace."""

    def on_end(self, record: RequestRecord, now: float, finish_reason: str) -> None:
        """The request ended at the time `now`."""
        ...

    def on_failure(self, record: RequestRecord, now: float, error: Exception) -> None:
        """The request failed at the time `now`."""
        ...


class StepObserver(Protocol):
    """Receives the events of steps."""

    def on_step_computed(self, tokens: int) -> None:
        """Called after a step that computed `tokens` tokens."""
        ...

    def on_outputs(self, outputs: Sequence[tuple[BranchOutput, RequestRecord]], now: float) -> None:
        """The outputs of a step that ended at `now` reached their streams. Called on the streams' event loop."""
        ...


class OutputStream:
    """The outputs of one accepted request, as an async iterator on the submitter's event loop, or passed to a listener
    there. A slow reader gets one merged BranchOutput per branch; with `final_only` the reader is woken only at the end.
    EngineDead is raised after the outputs that precede it. `number` identifies the request to the engine."""

    def __init__(
        self,
        number: int,
        record: RequestRecord,
        detokenizer: RequestDetokenizer,
        accepted: asyncio.Future[None],
        final_only: bool = False,
    ) -> None:
        self.id, self.number, self.record, self.detokenizer = record.id, number, record, detokenizer
        self.accepted, self.final_only = accepted, final_only
        self.loop = accepted.get_loop()
        self.done = False
        self._finished = False
        self._ready = asyncio.Event()
        self._deltas: dict[int, MergedOutput] = {}
        self._error: Exception | None = None
        self._listener: tuple[Callable[[BranchOutput], None], Callable[[Exception], None]] | None = None

    def listen(self, put: Callable[[BranchOutput], None], fail: Callable[[Exception], None]) -> None:
        """Pass outputs and the error to these callbacks instead of the iterator, including those that are waiting. Must
        be called on the loop, before the first read."""
        self._listener = put, fail
        held, self._deltas = [delta.to_output() for delta in self._deltas.values()], {}
        for at, output in enumerate(held, 1):  # `done` is set on the last one, whichever branch ended last
            self.put(output._replace(done=self._finished and at == len(held)))
        if self._error is not None:
            fail(self._error)

    @property
    def failed(self) -> bool:
        """True if only an error will follow."""
        return self._error is not None

    def put(self, output: BranchOutput) -> None:
        """Add an output; on the loop."""
        if self._listener is not None:
            self.done = self.done or output.done
            self._listener[0](output)
            return
        self._deltas.setdefault(output.branch, MergedOutput()).add(output)
        self._finished = self._finished or output.done
        if self._finished or not self.final_only:
            self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; on the loop."""
        self._error = error
        if self.record.trace is not None:
            self.record.trace.on_failure(self.record, time.monotonic(), error)
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
        # `done` is set on the last output read, whichever branch ended last.
        self.done = self._finished and not self._deltas
        return output._replace(done=self.done)


def describe_error(error: BaseException | None) -> str:
    """Return why the engine stopped, never empty. None: it was closed."""
    if error is None or isinstance(error, EngineDead):
        return str(error or "") or "closed"
    return f"{type(error).__name__}: {error}"


def engine_dead_error(error: BaseException | None) -> EngineDead:
    """Return the EngineDead that waiting callers get."""
    return EngineDead(f"the engine stopped: {describe_error(error)}"[:300])


def as_exception(error: BaseException) -> Exception:
    """Return the error as an asyncio future can carry it: SystemExit and other BaseExceptions would end the awaiting
    task."""
    return error if isinstance(error, Exception) else engine_dead_error(error)


def resolve_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the future's result or error; on the loop."""
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(as_exception(error))
    else:
        future.set_result(result)
