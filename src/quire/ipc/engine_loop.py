"""The host of an engine: one thread that works off what fronts send, steps, and tells each front what came for it.

The same for a thread of the front's own process and for a process of the engine's own. Whoever sends waits for nobody;
the thread sleeps on a condition when there is nothing to do.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.core.request import Request
from quire.core.snapshot import take_snapshot
from quire.core.step_history import StepHistory
from quire.errors import EngineDead, InputError
from quire.ipc.admin_ops import AdminOps
from quire.ipc.heartbeat import Health, Heartbeat
from quire.ipc.messages import (
    AbortRequests,
    AddRequests,
    AdminRequest,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    ListPrefixes,
    RegisterPrefix,
    ReleasePrefix,
    Reply,
    RequestProgress,
    SnapshotRequest,
    StepOutputs,
    StopBranch,
    collect_metrics,
    queue_sizes,
)
from quire.ipc.pixel_store import PixelStore
from quire.protocol.columns import MAX_STEP_SLICES

log = logging.getLogger("quire")

METRICS_INTERVAL = 0.25  # seconds between two looks at the memory's usage while busy
HISTORY_IDLE_SECONDS = 10.0  # seconds without a look, and steps aren't noted any more
RUNNER_CHECK_INTERVAL = 0.5  # seconds between two looks at a runner that can end by itself
FIRST_CLIENT = 0  # the number of the first front

SendToClient = Callable[[int, EngineMessage], None]
"""Hands a message to a front, on the engine's thread. One that left is passed over."""


class TrackedRequest:
    """A request of the engine, and whose it is."""

    __slots__ = ("client_index", "id", "image_keys", "is_reported", "number", "request")

    def __init__(self, client_index: int, number: int, id: str, request: Request) -> None:
        self.client_index, self.number, self.id, self.request = client_index, number, id, request
        self.is_reported = False  # anything of it
        self.image_keys: Iterable[bytes] = ()  # the keys of its pictures

    def progress(self) -> RequestProgress:
        """How far it has come."""
        request = self.request
        return RequestProgress(
            self.number, request.max_tokens, request.scheduled_time, request.first_token_time, request.cached_tokens,
            request.preemptions,
        )  # fmt: skip


class ClientLeft:
    """A front is gone. After the last one the engine ends."""


class EngineLoop:
    """`engine`, driven by whoever calls `run`. `cpu_seconds` is the processor time that it took; a turn of more than
    `stall_after` seconds is a stall."""

    def __init__(
        self,
        engine: Engine,
        send_to_client: SendToClient,
        stall_after: float = 60.0,
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self.engine, self._send_to_client, self._cpu_seconds = engine, send_to_client, cpu_seconds
        self.heartbeat = Heartbeat(stall_after)
        self.client_indices = [FIRST_CLIENT]
        self._wake = threading.Condition()
        self._incoming: deque[tuple[int, ClientMessage | ClientLeft]] = deque()
        self._processing: deque[tuple[int, ClientMessage | ClientLeft]] = deque()
        self._closing = False
        self._requests_by_id: dict[str, TrackedRequest] = {}  # by the request's id
        self._requests_by_number: dict[tuple[int, int], TrackedRequest] = {}  # by front and number
        self._metrics_sent_at, self._dirty = time.monotonic(), True
        self._last_snapshot = (0.0, 0.0)  # when somebody looked last, and the processor time until then
        self._snapshot_send_seconds = 0.0  # processor time to tell the last look
        self._reported_tokens = 0
        self.pixels, self.admin_ops = PixelStore(), AdminOps(engine)
        self._deferred_stops: list[tuple[int, StopBranch]] = []  # stops that must wait for a step
        # A runner in other processes is looked at while there is nothing to do: one may end.
        self._idle_wait_seconds = RUNNER_CHECK_INTERVAL if hasattr(engine.runner, "check") else None
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            AddRequests: self._add, AbortRequests: self._abort, StopBranch: self._stop,
            RegisterPrefix: self._register_prefix, ReleasePrefix: self._release_prefix,
            ListPrefixes: self._list_prefixes, SnapshotRequest: self._snapshot, AdminRequest: self._admin,
            ClientLeft: self._client_left,
        }  # fmt: skip

    # From any thread

    def enqueue(self, client_index: int, message: ClientMessage | ClientLeft) -> bool:
        """Hand a front's message to the engine's thread; False when that takes no more."""
        with self._wake:
            if self._closing:
                return False
            self._incoming.append((client_index, message))
            self._wake.notify()
            return True

    def close(self) -> None:
        """End `run`, after the step under way."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def health(self) -> Health:
        """How the loop is, as long as it is."""
        health = self.heartbeat.health("")
        restarts = self.engine.restarter
        return (
            health._replace(stalled=True, why=restarts.status) if restarts is not None and restarts.status else health
        )

    # On the engine's thread

    def run(self) -> BaseException | None:
        """Serve until `close`, then release the engine. Returns what ended it before, which all fronts were told."""
        error: BaseException | None = None
        try:
            while self._run_once():
                pass
        except BaseException as failure:  # whoever ends the thread, SystemExit too, is named to those who wait
            error = failure
        with self._wake:
            died, self._closing = not self._closing, True
        try:
            for front in self.client_indices:
                self._send_to_client(
                    front, EngineExited(error if died and error is not None else EngineDead("the engine was closed"))
                )
        finally:
            self._close_engine(error)
        return error if died else None

    def _close_engine(self, error: BaseException | None) -> None:
        """Close the engine. After a failure its frames would hold on to what is released, and a second one is only
        logged: the first is what there is to say."""
        chain = error
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__
        try:
            self.engine.close()
        except Exception:
            if error is None:
                raise
            log.exception("the engine could not be closed")

    def _run_once(self) -> bool:
        """One turn: messages, then a step. False when it is time to end."""
        with self._wake:
            while not (self._incoming or self._closing or self.engine.has_unfinished_requests):
                self.heartbeat.mark_idle()
                if self._dirty:
                    self._send_metrics()
                if not self._wake.wait(self._idle_wait_seconds):
                    break
            if self._closing:
                return False
            idle = not (self._incoming or self.engine.has_unfinished_requests)
        if idle:
            restarts = self.engine.stats.restarts
            self.engine.check_runner()
            self._dirty |= self.engine.stats.restarts > restarts
            return True
        with self._wake:
            self._processing, self._incoming = self._incoming, self._processing
            self.heartbeat.begin_iteration(self.engine.stats.steps - len(self.engine.in_flight) + 1)
        late, self._deferred_stops = self._deferred_stops, []
        for front, stop in late:
            self._stop(front, stop)
        while self._processing:
            front, message = self._processing.popleft()
            self._handlers[type(message)](front, message)
        self._dirty = True
        if self.engine.has_unfinished_requests:
            self._publish(self.engine.step())
        self.heartbeat.mark_idle()  # as in `_care`
        for front, answer in self.admin_ops.finish_pending_sleep():
            self._send_to_client(front, answer)
        return True

    def _publish(self, outputs: list[BranchOutput]) -> None:
        """Tell each front what came for its requests; the first one, that there was a step."""
        now = self.engine.clock()
        brought: dict[int, tuple[list[RequestProgress], list[tuple[int, BranchOutput]]]] = {FIRST_CLIENT: ([], [])}
        for output in outputs:
            owned = self._requests_by_id.get(output.request_id)
            if owned is None:  # a prefix that is computed again
                continue
            progress, told = brought.get(owned.client_index) or brought.setdefault(owned.client_index, ([], []))
            if not owned.is_reported or output.done:
                owned.is_reported = True
                progress.append(owned.progress())
            told.append((owned.number, output))
            if output.done:
                self._forget(owned)
        computed, self._reported_tokens = (
            self.engine.stats.computed_tokens - self._reported_tokens,
            self.engine.stats.computed_tokens,
        )
        facts, queues = self._metrics_if_due(), queue_sizes(self.engine)
        for front in (
            self.client_indices if facts is not None else [front for front in self.client_indices if front in brought]
        ):
            progress, told = brought.get(front, ([], []))
            self._send_to_client(
                front,
                StepOutputs(
                    now, queues, computed if front == FIRST_CLIENT else 0, progress, told[:MAX_STEP_SLICES], facts
                ),
            )
            for at in range(
                MAX_STEP_SLICES, len(told), MAX_STEP_SLICES
            ):  # of aborts, say, which end any number of branches
                self._send_to_client(front, StepOutputs(now, queues, 0, (), told[at : at + MAX_STEP_SLICES]))

    def _metrics_if_due(self) -> EngineMetrics | None:
        now = time.monotonic()
        if now - self._metrics_sent_at <= METRICS_INTERVAL:
            return None
        self._metrics_sent_at = now
        if now - self._last_snapshot[0] > HISTORY_IDLE_SECONDS:
            self.engine.step_history = None
        return collect_metrics(self.engine, self._cpu_seconds())

    def _send_metrics(self) -> None:
        """Before a rest: what is so now."""
        self._dirty, self._metrics_sent_at = False, time.monotonic()
        facts, queues = collect_metrics(self.engine, self._cpu_seconds()), queue_sizes(self.engine)
        for front in self.client_indices:
            self._send_to_client(front, StepOutputs(self.engine.clock(), queues, 0, (), (), facts))

    # What fronts send

    def _add(self, client_index: int, message: AddRequests) -> None:
        def add() -> None:
            if len({asked.number for asked in message.requests}) < len(message.requests):
                raise InputError("request numbers must be distinct")
            prompts = [(asked.id, asked.prompt) for asked in message.requests]
            if message.pixels or seen:
                self._add_with_images(prompts, message, seen)
            else:
                self.engine.add_all(prompts, message.params, salt=message.salt, client=message.client)

        seen = {asked.number: {medium.key for medium in asked.media} for asked in message.requests if asked.media}
        self._add_and_reply(
            client_index, message.key, add, {asked.number: asked.id for asked in message.requests}, seen
        )

    def _add_with_images(
        self, prompts: list[tuple[str, Sequence[int]]], message: AddRequests, image_keys: dict[int, set[bytes]]
    ) -> None:
        """Requests with pictures, by the keys that each has `image_keys`; each is a user of these."""
        shown = {one.key: one for one in message.pixels}
        used = [key for keys in image_keys.values() for key in keys]
        if not shown.keys() >= set(used):
            raise InputError("the pixels of a picture are missing")
        pixels = self.pixels.incref([shown[key] for key in used])
        try:
            media = [asked.media for asked in message.requests]
            self.engine.add_all(
                prompts, message.params, salt=message.salt, images=media, pixels=pixels, client=message.client
            )
        except BaseException:
            self.pixels.decref(used)
            raise

    def _register_prefix(self, client_index: int, message: RegisterPrefix) -> None:
        def register() -> None:
            self.engine.register_prefix(message.name, message.tokens)

        self._add_and_reply(client_index, message.key, register, {message.number: f"prefix:{message.name}"})

    def _add_and_reply(
        self,
        client_index: int,
        key: int,
        add: Callable[[], None],
        ids: dict[int, str],
        image_keys: Mapping[int, set[bytes]] = {},
    ) -> None:
        """`add` requests of these numbers and ids, and say whether that went well. `image_keys` are keys of "
        "pictures."""
        try:
            for number in ids:
                if (client_index, number) in self._requests_by_number:
                    raise InputError(f"request number {number} is in use")
            add()
        except Exception as error:
            self._send_to_client(client_index, Reply(key, error))
            return
        for number, id in ids.items():
            owned = TrackedRequest(client_index, number, id, self.engine.requests[id])
            self._requests_by_id[id] = self._requests_by_number[client_index, number] = owned
            owned.image_keys = image_keys.get(number, ())
        self._send_to_client(client_index, Reply(key))

    def _abort(self, client_index: int, message: AbortRequests) -> None:
        numbers = message.numbers
        if numbers is None:
            numbers = tuple(number for owner, number in self._requests_by_number if owner == client_index)
        for number in numbers:
            owned = self._requests_by_number.get((client_index, number))
            if owned is not None:
                self.engine.abort(owned.id)

    def _stop(self, client_index: int, message: StopBranch) -> None:
        owned = self._requests_by_number.get((client_index, message.number))
        if owned is None:
            return
        ended = self.engine.stop(owned.id, message.branch, message.reason)
        if ended is None:
            self._deferred_stops.append((client_index, message))
        elif ended:
            self._forget(owned)

    def _release_prefix(self, client_index: int, message: ReleasePrefix) -> None:
        self._send_to_client(client_index, Reply(message.key, value=self.engine.release_prefix(message.name)))

    def _list_prefixes(self, client_index: int, message: ListPrefixes) -> None:
        held, live = self.engine.prefix_lengths, self.engine.requests
        asleep = self.engine.sleep_controller.level > 0
        ready = tuple(name for name in held if f"prefix:{name}" not in live and not asleep)
        self._send_to_client(client_index, Reply(message.key, value=(dict(held), ready)))

    def _snapshot(self, client_index: int, message: SnapshotRequest) -> None:
        began, now, used = time.thread_time(), time.monotonic(), self._cpu_seconds()
        (seen, before), self._last_snapshot = self._last_snapshot, (now, used)
        busy = min(max(used - before, 0.0) / max(now - seen, 1e-6), 1.0)
        if self.engine.step_history is None:
            self.engine.step_history = StepHistory(self.engine.scheduler.preemption_counts)
        text = json.dumps(take_snapshot(self.engine), separators=(",", ":"))
        made = time.thread_time()
        took = made - began + self._snapshot_send_seconds
        self._send_to_client(
            client_index, Reply(message.key, value=f'{{"took":{took:.6f},"busy":{busy:.4f},{text[1:]}')
        )
        self._snapshot_send_seconds = time.thread_time() - made

    def _admin(self, client_index: int, message: AdminRequest) -> None:
        self.heartbeat.mark_idle()  # to sleep and to wake up takes as long as it takes
        answer = self.admin_ops.handle(client_index, message)
        self._dirty = True
        if answer is not None:
            self._send_to_client(client_index, answer)

    def _client_left(self, client_index: int, message: ClientLeft) -> None:
        self._abort(client_index, AbortRequests(None))
        self.client_indices.remove(client_index)
        if not self.client_indices:
            self.close()

    def _forget(self, tracked: TrackedRequest) -> None:
        self.pixels.decref(tracked.image_keys)
        del self._requests_by_id[tracked.id]
        del self._requests_by_number[tracked.client_index, tracked.number]
