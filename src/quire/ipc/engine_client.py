"""The client side of an engine: requests in flight, messages that wait for a reply, and outputs on their way to the
event loops of the callers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.errors import EngineDead, InputError, Overloaded
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
    MAX_CLIENT_NUMBER,
    AbortRequests,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    EngineReady,
    HandoverCounts,
    QueueSizes,
    Reply,
    RequestProgress,
    RequestsFailed,
    StepOutputs,
    StopBranch,
)
from quire.text.input_processor import InputProcessor
from quire.text.output_stream import (
    OutputStream,
    RequestRecord,
    StepObserver,
    as_exception,
    engine_dead_error,
    resolve_future,
)
from quire.text.request_detokenizer import RequestDetokenizer

log = logging.getLogger("quire")


class EngineClient(Protocol):
    """A connection to an engine, and the latest state that it reported."""

    @property
    def engine(self) -> Engine | None: ...  # None: it is in another process
    @property
    def is_in_process(self) -> bool: ...
    @property
    def ready(self) -> EngineReady: ...

    @property
    def replicas(self) -> Sequence[EngineClient]: ...  # of each engine: itself, unless it stands for several
    def start(self, receive: Callable[[EngineMessage | RequestsFailed], None]) -> None: ...
    def attach_event_loop(self) -> None: ...
    def send(self, message: ClientMessage) -> bool: ...
    def forget(self, number: int) -> int | None: ...  # the request has ended for its caller
    @property
    def queue_sizes(self) -> QueueSizes: ...
    @property
    def metrics(self) -> EngineMetrics: ...
    @property
    def handover_counts(self) -> HandoverCounts: ...
    def health(self) -> Health: ...
    def start_replacement(self) -> EngineClient: ...
    def cancel_replacement(self) -> None: ...
    def close(self, timeout: float) -> bool: ...


class PendingReply(NamedTuple):
    """A message that waits for its reply; `streams` are those of the requests in it."""

    future: asyncio.Future[Any]
    streams: Sequence[OutputStream]


class RequestTracker:
    """The requests in flight over `engine_client`. `observer` is notified of every step."""

    def __init__(self, engine_client: EngineClient, prompts: InputProcessor) -> None:
        self.prompts = prompts
        self.observer: StepObserver | None = None
        self.num_aborted = self.num_rejected = 0
        self._rejected_lock = threading.Lock()  # requests are rejected on the engine's thread and on callers' threads
        self.on_death: Callable[[], object] | None = None
        self._closing = False
        self._streams_by_number: dict[int, OutputStream] = {}  # from the time that they are sent
        self._streams_by_id: dict[str, OutputStream] = {}
        self._pending_replies: dict[int, PendingReply] = {}
        self._numbers, self._keys = itertools.count(), itertools.count()  # they wrap after MAX_CLIENT_NUMBER
        self.connect(engine_client)

    def set_observer(self, observer: StepObserver) -> None:
        """Notify `observer` of every step from now on."""
        self.observer = observer

    def set_death_callback(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` when the engine dies, possibly on another thread."""
        self.on_death = on_death

    def connect(self, engine_client: EngineClient) -> None:
        """Use another connection: at first, and after the engine was replaced."""
        self.engine_client = engine_client
        self.error: BaseException | None = None
        self.limits, self.kv_cache_info = engine_client.ready.limits, engine_client.ready.cache
        self.prompts.limits = self.limits
        engine_client.start(self._receive)

    @property
    def engine(self) -> Engine:
        """The engine, if it is in this process."""
        assert self.engine_client.engine is not None, "the engine has a process of its own"
        return self.engine_client.engine

    @property
    def metrics(self) -> EngineMetrics:
        """The latest counters and memory usage of the engine."""
        return self.engine_client.metrics

    # For callers, on their event loops

    def _new_stream(
        self, answer: asyncio.Future[None], record: RequestRecord, prompt: Sequence[int], patient: bool = False
    ) -> OutputStream:
        """Create the stream of a new request."""
        number = next(self._numbers) & MAX_CLIENT_NUMBER
        stop = partial(self._send_stop, number)
        detokenizer = RequestDetokenizer(self.prompts.text_backend, prompt, record.params, stop)
        return OutputStream(number, record, detokenizer, answer, patient)

    async def _send_and_wait(
        self,
        message: Callable[[int], ClientMessage],
        streams: Sequence[OutputStream] = (),
        answer: asyncio.Future[Any] | None = None,
    ) -> Any:
        """Send the message that `message` makes of a key, and return the engine's reply. The requests of `streams`
        share it; `answer` is the future that they were made with."""
        answer = answer or asyncio.get_running_loop().create_future()
        if self.error is not None or self._closing:
            raise engine_dead_error(self.error)
        for at, stream in enumerate(streams):
            if stream.id in self._streams_by_id or any(stream.id == other.id for other in streams[:at]):
                raise InputError(f"request id {stream.id[:80]!r} is in use", "request_id")
        key = next(self._keys) & MAX_CLIENT_NUMBER
        for stream in streams:
            self._streams_by_number[stream.number] = self._streams_by_id[stream.id] = stream
        self._pending_replies[key] = PendingReply(answer, streams)
        self.engine_client.attach_event_loop()
        try:
            if not self.engine_client.send(message(key)):
                raise engine_dead_error(self.error)
        except BaseException as error:  # the engine has ended, or the message can't be encoded
            self._resolve_reply(key, None, error)
        try:
            return await answer
        except asyncio.CancelledError:
            for stream in streams:
                self.abort(stream.id)
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request whose caller left. Can be called from any thread; unknown ids are ignored."""
        stream = self._streams_by_id.get(request_id)
        if stream is not None:
            self.engine_client.send(AbortRequests((stream.number,)))

    def _send_stop(self, number: int, branch: int, reason: str) -> None:
        """Report that a stop string occurred in a branch's text."""
        self.engine_client.send(StopBranch(number, branch, reason))

    def _count_rejected(self) -> None:
        """Count a request that was rejected because the queue was full."""
        with self._rejected_lock:
            self.num_rejected += 1

    # Messages of the engine, on any thread

    def _receive(self, message: EngineMessage | RequestsFailed) -> None:
        if isinstance(message, StepOutputs):
            self._handle_step_outputs(message)
        elif isinstance(message, Reply):
            pending = self._pending_replies.get(message.key)
            if isinstance(message.error, Overloaded) and (pending is None or pending.streams):
                self._count_rejected()
            self._resolve_reply(message.key, message.value, message.error)
        elif isinstance(message, RequestsFailed):
            for number in message.numbers:
                if (stream := self._streams_by_number.get(number)) is not None:
                    self._forget_stream(stream)
                    self._call_on_loop(stream.loop, stream.fail, as_exception(message.error))
        else:
            assert isinstance(message, EngineExited), "an unknown message"
            self._handle_engine_exit(message.error)

    def _resolve_reply(self, key: int, value: Any, error: BaseException | None) -> None:
        pending = self._pending_replies.pop(key, None)
        if pending is None:
            return
        if error is not None:
            for stream in pending.streams:
                self._forget_stream(stream)
        self._call_on_loop(pending.future.get_loop(), resolve_future, pending.future, value, error)

    def _handle_step_outputs(self, message: StepOutputs) -> None:
        """Pass a step's outputs to their streams, with one call for each event loop."""
        for progress in message.progress:
            if (stream := self._streams_by_number.get(progress.number)) is not None:
                _update_record(stream.record, progress)
        batches: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, BranchOutput]]] = {}
        for number, output in message.outputs:
            if (target := self._streams_by_number.get(number)) is not None:
                batches.setdefault(target.loop, []).append((target, output))
        for loop, batch in batches.items():
            self._call_on_loop(loop, self._deliver, batch, message.now)
        if self.observer is not None and message.computed:
            self.observer.on_step_computed(message.computed)

    def _deliver(self, batch: list[tuple[OutputStream, BranchOutput]], now: float) -> None:
        """On the event loop: detokenize a step's outputs and put each into its stream."""
        delivered: list[tuple[BranchOutput, RequestRecord]] = []
        for stream, output in batch:
            if stream.failed:
                continue
            try:
                text_output = stream.detokenizer.process(output)
                if text_output is None:
                    continue
                if text_output.done:
                    self._forget_stream(stream)
                stream.put(text_output)
            except BaseException as error:  # libraries raise more than Exception; only this request fails
                self._fail_stream(stream, error)
                continue
            if not stream.record.is_prefix:  # a registered prefix isn't a client's request
                delivered.append((text_output, stream.record))
                self.num_aborted += text_output.done and text_output.finish_reason == "abort"
        if self.observer is not None:
            self.observer.on_outputs(delivered, now)

    def _fail_stream(self, stream: OutputStream, error: BaseException) -> None:
        """Abort a request whose text can't be made."""
        log.error("the text of request %s failed", stream.id, exc_info=error)
        self.abort(stream.id)
        self._forget_stream(stream)
        stream.fail(EngineDead(f"the text of the request failed: {type(error).__name__}: {error}"[:300]))

    def _forget_stream(self, stream: OutputStream) -> None:
        self._streams_by_number.pop(stream.number, None)
        stream.record.engine = self.engine_client.forget(stream.number)
        if self._streams_by_id.get(stream.id) is stream:
            del self._streams_by_id[stream.id]

    def _call_on_loop(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
        """Call a function on an event loop, at once if it is the running one."""
        try:
            if asyncio._get_running_loop() is loop:
                function(*args)
            else:
                loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the caller's loop is closed
            if not loop.is_closed():
                raise
            for stream in [stream for stream in list(self._streams_by_number.values()) if stream.loop is loop]:
                self.abort(stream.id)
                self._forget_stream(stream)

    def _handle_engine_exit(self, error: BaseException) -> None:
        """Fail all requests and pending replies, since none will be served any more."""
        if self.error is not None:
            return
        closed = self._closing
        self.error = EngineDead("the engine was closed") if closed else error
        for key in list(self._pending_replies):
            self._resolve_reply(key, None, engine_dead_error(self.error))
        streams, self._streams_by_number, self._streams_by_id = list(self._streams_by_number.values()), {}, {}
        for stream in streams:
            self._call_on_loop(stream.loop, stream.fail, engine_dead_error(self.error))
        if not closed and self.on_death is not None:
            self.on_death()


def _update_record(record: RequestRecord, progress: RequestProgress) -> None:
    _, record.max_tokens, record.scheduled_time, record.first_token_time, record.cached_tokens, record.preemptions = (
        progress
    )
