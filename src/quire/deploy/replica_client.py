"""The client of an engine in a replica of Ray Serve.

All that the engine sends arrives on one streaming call, an item for each step. Each AddRequests is a call of its own,
which lasts as long as its requests: Serve counts it, waits for its end before it ends the replica, and cancels it, even
in a replica that is draining, which gets no new calls. Frames of quire.ipc cross as bytes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from quire.deploy.page_transfer import write_sources
from quire.errors import EngineDead, Overloaded, StartupError, first_line
from quire.ipc import frames
from quire.ipc.handshake import read_first_frames, read_heartbeat
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    EngineReady,
    HandOver,
    HandoverCounts,
    ImportPages,
    PageImport,
    PageSource,
    QueueSizes,
    Reply,
    StepOutputs,
)
from quire.protocol.columns import WireError

SILENCE_SECONDS = 5.0  # seconds without a frame after which a replica gets no requests; it sends one every second
LOST_SECONDS = 20.0  # seconds without a frame after which its requests move or fail; Ray may need a minute
CONNECT_SECONDS = 30.0  # seconds for the first frame
RETRY_AFTER = 1  # seconds
log = logging.getLogger("quire.deploy")


class ReplicaLost(Exception):
    """A replica does not answer."""


class PendingCall:
    """A call with the `numbers` of its requests that have not ended. `key` is that of its AddRequests, `imports` are
    the keys of its imports."""

    def __init__(self, response: Any, message: AddRequests, imports: Sequence[PageImport]) -> None:
        self.response, self.key, self.imports = response, message.key, [one.key for one in imports]
        self.numbers = {request.number for request in message.requests}
        self.is_aborted = False


class ServeReplicaClient:
    """A connection to the engine of the replica `name`, over `handle`, a DeploymentHandle of
    quire.deploy.ray_serve.EngineReplica. `page_source` is where others fetch pages, of a prefill replica. Made by
    `connect`."""

    is_in_process, engine, handover_counts = False, None, HandoverCounts()
    ready: EngineReady
    metrics: EngineMetrics

    def __init__(self, handle: Any, name: str, page_source: PageSource | None = None) -> None:
        self.name, self.handle, self.page_source = name, handle, page_source
        self._stream: Any = handle.options(method_name="connect", stream=True).remote(name)
        self._frames, self._heard = frames.FrameCodec(), time.monotonic()
        self._health = Health(True, False, self._heard, "")
        self.queue_sizes = QueueSizes()
        self._early_frames: list[frames.Frame] = []  # received together with the first
        self._clock_offset = math.inf  # seconds from the engine's monotonic clock to this one, and the shortest delay
        self._calls = dict[int, PendingCall]()  # by number of a request
        self._unanswered = set[int]()  # keys of AddRequests
        self._draining = self._ended = False
        self._tasks = set[asyncio.Task[None]]()
        self._loop = asyncio.get_running_loop()
        self._receive: Callable[[EngineMessage], None]

    @classmethod
    async def connect(cls, handle: Any, name: str, page_source: PageSource | None = None) -> ServeReplicaClient:
        """Return a connection that is ready. Raise ReplicaLost if the replica does not answer."""
        self = cls(handle, name, page_source)
        received: list[frames.Frame] = []
        try:
            while not received:
                received += self._frames.decode(await asyncio.wait_for(anext(self._stream), CONNECT_SECONDS))
            self.ready, self._early_frames = read_first_frames(received)
        except Exception as error:
            self._stream.cancel()
            raise ReplicaLost(f"replica {name} can't be reached: {first_line(error)}") from error
        self.metrics = self.ready.facts
        return self

    def start(self, receive: Callable[[EngineMessage], None]) -> None:
        """Pass the engine's messages to `receive`."""
        self._receive = receive
        for frame in self._early_frames:
            self._handle_frame(frame)
        self._early_frames.clear()

    def attach_event_loop(self) -> None:
        """Read the stream, unless that is done already."""
        if not self._tasks and not self._ended:
            self._begin(self._read(self._stream))

    def send(self, message: ClientMessage) -> bool:
        """Send a message, from any thread. Return False if the engine takes no more."""
        if isinstance(message, AddRequests):
            return self.add_requests(message, ())
        if not self._ended:
            self._run_on_loop(self._send, message)
        return not self._ended

    def add_requests(self, message: AddRequests, imports: Sequence[PageImport]) -> bool:
        """Send requests with the pages that they need, from any thread. Return False if the engine takes no more."""
        if self._ended or self._draining:
            return False
        self._run_on_loop(self._call, message, imports)
        return True

    def _run_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        if asyncio._get_running_loop() is self._loop:
            function(*args)
        else:
            self._loop.call_soon_threadsafe(function, *args)

    def forget(self, number: int) -> int:
        """Cancel the call of a request that has ended for its caller but not for the engine."""
        call = self._pop_call(number)
        if call is not None and not call.numbers:
            call.response.cancel()
        return 0

    def _pop_call(self, number: int) -> PendingCall | None:
        """Return the call of a request that has ended, if it is in flight."""
        call = self._calls.pop(number, None)
        if call is not None:
            call.numbers.discard(number)
        return call

    @property
    def replicas(self) -> tuple[ServeReplicaClient]:
        """The client itself: there is one engine."""
        return (self,)

    @property
    def has_ended(self) -> bool:
        """True if the connection is closed."""
        return self._ended

    def health(self) -> Health:
        """Return the health that the replica reported last, or a stall if it is silent."""
        if self._ended:
            return Health(False, False, self._health.beat, "it has ended")
        silence = time.monotonic() - self._heard
        if silence >= SILENCE_SECONDS:
            return Health(True, True, self._health.beat, f"its replica has not been heard of for {silence:.0f} s")
        return self._health

    def start_replacement(self) -> ServeReplicaClient:
        """Raise StartupError: Serve starts another replica."""
        raise StartupError("Serve starts replicas")

    def cancel_replacement(self) -> None:
        """Do nothing: see `start_replacement`."""

    def close(self, timeout: float) -> bool:
        """Close the connection, from any thread. The replica goes on. Return True."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.leave)
        return True

    # On the event loop

    def leave(self) -> None:
        """Close the connection. The replica goes on."""
        self._ended = True
        self._stream.cancel()

    def drain(self) -> None:
        """Send no more requests, and close the connection once those in flight have ended."""
        self._draining = True
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._draining and not self._calls:
            self._end(EngineDead("it was drained"))

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _call(self, message: AddRequests, imports: Sequence[PageImport]) -> None:
        """Begin a call for requests. It carries the imports, since another call could come after this one."""
        codec, sources = frames.FrameCodec(), write_sources(imports) if imports else b""
        messages: list[ClientMessage] = [*(ImportPages(one.key, one.handover.pages) for one in imports), message]
        data = b"".join(codec.encode(*frames.write_client_message(one)) for one in messages)
        response = self.handle.options(method_name="add").remote(self.name, data, sources)
        call = PendingCall(response, message, imports)
        self._calls.update(dict.fromkeys(call.numbers, call))
        self._unanswered.add(call.key)
        self._begin(self._wait(call))

    def _send(self, message: ClientMessage) -> None:
        frame = frames.FrameCodec().encode(*frames.write_client_message(message))
        if isinstance(message, AbortRequests):
            self._abort(set(self._calls if message.numbers is None else message.numbers), frame)
        else:
            self._begin(self._post(frame))

    def _abort(self, numbers: set[int], frame: bytes) -> None:
        """Cancel the calls that have no other requests. A frame for those of other calls could overtake its call, or
        come too late for a draining replica: then they go on, and their outputs are ignored."""
        for number in numbers & self._calls.keys():
            call = self._calls[number]
            if not call.numbers <= numbers:
                self._begin(self._post(frame))
                return
            if not call.is_aborted:
                call.is_aborted = True
                call.response.cancel()

    async def _post(self, frame: bytes) -> None:
        """Send a frame. If the replica is gone, the end of the stream reports it."""
        with suppress(Exception):
            await self.handle.options(method_name="send").remote(self.name, frame)

    async def _wait(self, call: PendingCall) -> None:
        """Wait for the end of a call. If the replica did not take its requests, they are refused."""
        taken = False
        with suppress(Exception, asyncio.CancelledError):  # the replica has ended, or the call was cancelled
            taken = await call.response
        if taken or self._ended or call.key not in self._unanswered:
            return
        for key in call.imports:  # one may have a reply already, or get one later, which is ignored
            self._deliver(Reply(key, value=0))
        if call.is_aborted:
            self._deliver(Reply(call.key, EngineDead("the request was aborted")))
        else:
            self._deliver(Reply(call.key, Overloaded(f"replica {self.name} takes no requests", RETRY_AFTER)))

    async def _read(self, stream: AsyncIterator[bytes]) -> None:
        """Handle what the replica sends, until it ends."""
        error: EngineDead
        try:
            while True:
                async with asyncio.timeout(LOST_SECONDS):
                    chunk = await anext(stream)
                self._heard = time.monotonic()
                for frame in self._frames.decode(chunk):
                    self._handle_frame(frame)
        except StopAsyncIteration:
            error = EngineDead("its replica has left")
        except TimeoutError:
            error = EngineDead(f"its replica has not been heard of for {LOST_SECONDS:g} s")
        except WireError as wrong:
            error = EngineDead(f"its replica sent what is no frame: {wrong}")
        except Exception as failure:
            error = EngineDead(f"its replica was lost: {first_line(failure)}")
        self._end(error)

    def _handle_frame(self, frame: frames.Frame) -> None:
        if frame.kind == frames.PONG:
            self._health = read_heartbeat(frame.body, time.monotonic())
            return
        message = frames.read_engine_message(frame)
        if isinstance(message, EngineExited):
            self._end(message.error)
        else:
            self._deliver(message)

    def _deliver(self, message: EngineMessage) -> None:
        if isinstance(message, StepOutputs):
            message = self._with_own_times(message)
            self.queue_sizes = message.queues
            self.metrics = message.facts or self.metrics
            for number, output in message.outputs:
                if output.done:
                    self._pop_call(number)
        elif isinstance(message, HandOver):
            self._pop_call(message.number)
        elif isinstance(message, Reply):
            self._unanswered.discard(message.key)
            if message.error is not None:
                for number in [number for number, call in self._calls.items() if call.key == message.key]:
                    del self._calls[number]
        self._receive(message)
        self._end_if_drained()

    def _with_own_times(self, message: StepOutputs) -> StepOutputs:
        """Return a step's outputs with its times as this host's monotonic clock would show them."""
        self._clock_offset = min(self._clock_offset, time.monotonic() - message.now)
        progress = [
            one._replace(
                scheduled=None if one.scheduled is None else one.scheduled + self._clock_offset,
                first_token=None if one.first_token is None else one.first_token + self._clock_offset,
            )
            for one in message.progress
        ]
        return message._replace(now=message.now + self._clock_offset, progress=progress)

    def _end(self, error: BaseException) -> None:
        """Close the connection, and report `error` as the engine's end."""
        if not self._ended:
            self.leave()
            self._calls.clear()
            self._receive(EngineExited(error))
