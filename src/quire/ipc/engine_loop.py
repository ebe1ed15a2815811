"""The loop of an engine: one thread that handles the messages of clients, runs steps, and sends each client its
outputs.

It runs on a thread of the client's process or in a process of its own. A sender never blocks; the thread waits on a
condition when there is nothing to do."""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.core.request import Request
from quire.core.snapshot import take_snapshot
from quire.errors import EngineDead, InputError
from quire.ipc.admin_ops import AdminOps
from quire.ipc.heartbeat import Health, Heartbeat
from quire.ipc.kv_events import KVEventPublisher
from quire.ipc.messages import (
    AbortRequests,
    AddRequests,
    AdminRequest,
    CacheUpdate,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    ImportPages,
    ListPrefixes,
    RegisterPrefix,
    ReleaseHandOver,
    ReleasePrefix,
    Reply,
    RequestProgress,
    SnapshotRequest,
    StepOutputs,
    StopBranch,
    collect_metrics,
    queue_sizes,
)
from quire.ipc.page_handover import PageHandover
from quire.ipc.pixel_store import PixelStore
from quire.memory.cache_log import CacheLog
from quire.protocol.columns import MAX_STEP_SLICES

log = logging.getLogger("quire")

METRICS_INTERVAL = 0.25  # seconds between two metrics while busy
HISTORY_IDLE_SECONDS = 10.0  # seconds without a snapshot after which steps are no longer recorded
RUNNER_CHECK_INTERVAL = 0.5  # seconds between two checks of a runner that can end by itself
MAX_UPDATE_KEYS = 1 << 16  # in a message
FIRST_CLIENT = 0

SendToClient = Callable[[int, EngineMessage], None]
"""Sends a message to a client, on the engine's thread. One that has left is ignored."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request of the engine, with the client that sent it and that client's number for it."""

    client_index: int
    number: int
    id: str
    request: Request
    image_keys: Iterable[bytes]
    is_reported: bool = False  # its progress was sent

    def progress(self) -> RequestProgress:
        """Return how far the request has come."""
        request = self.request
        return RequestProgress(
            self.number, request.max_tokens, request.scheduled_time, request.first_token_time, request.cached_tokens,
            request.preemptions,
        )  # fmt: skip


class ClientLeft:
    """A client of the engine, a server process, has left: its requests are aborted. The loop ends after the last one.
    An HTTP client that leaves is an AbortRequests."""


class EngineLoop:
    """Runs `engine` on the thread that calls `run`. `cpu_seconds` returns the processor time used so far, in seconds;
    an iteration of more than `stall_after` seconds is a stall. The changes in `cache_log` are sent to the first client
    if `report_cache`, and are published as `kv_events`."""

    def __init__(
        self,
        engine: Engine,
        send_to_client: SendToClient,
        stall_after: float = 60.0,
        cpu_seconds: Callable[[], float] = time.thread_time,
        num_clients: int = 1,
        cache_log: CacheLog | None = None,
        report_cache: bool = True,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        self.engine, self._send_to_client, self._cpu_seconds = engine, send_to_client, cpu_seconds
        self.heartbeat = Heartbeat(stall_after)
        self.client_indices = list(range(num_clients))
        self._wake = threading.Condition()
        self._incoming: deque[tuple[int, ClientMessage | ClientLeft]] = deque()
        self._processing: deque[tuple[int, ClientMessage | ClientLeft]] = deque()
        self._closing = False
        self._requests_by_id: dict[str, TrackedRequest] = {}
        self._requests_by_number: dict[tuple[int, int], TrackedRequest] = {}  # by client and number
        self._metrics_sent_at, self._dirty = time.monotonic(), True
        self._last_snapshot = (0.0, 0.0)  # its time, and the processor time used until then
        self._snapshot_send_seconds = 0.0  # processor time to send the last snapshot
        self._reported_tokens = 0
        self.pixels, self.admin_ops, self.page_handover = PixelStore(), AdminOps(engine), PageHandover(engine)
        self._cache_log, self._reports_cache, self._kv_events = cache_log, report_cache, kv_events
        self._deferred_stops: list[tuple[int, StopBranch]] = []  # to be repeated after the step in flight
        # A runner in other processes is checked while there is nothing to do, because a process may end.
        self._idle_wait_seconds = RUNNER_CHECK_INTERVAL if hasattr(engine.runner, "check") else None
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            AddRequests: self._add, AbortRequests: self._abort, StopBranch: self._stop,
            RegisterPrefix: self._register_prefix, ReleasePrefix: self._release_prefix,
            ListPrefixes: self._list_prefixes, SnapshotRequest: self._snapshot, AdminRequest: self._admin,
            ImportPages: self._import_pages, ReleaseHandOver: self._release_hand_over,
            ClientLeft: self._client_left,
        }  # fmt: skip

    # Called from any thread

    def enqueue(self, client_index: int, message: ClientMessage | ClientLeft) -> bool:
        """Pass a client's message to the engine's thread. Return False if the loop takes no more."""
        with self._wake:
            if self._closing:
                return False
            self._incoming.append((client_index, message))
            self._wake.notify()
            return True

    def close(self) -> None:
        """End `run` after the current step."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def health(self) -> Health:
        """Return the health of the loop, for as long as it runs."""
        health, restarter = self.heartbeat.health(), self.engine.restarter
        if restarter is not None and restarter.status:
            return health._replace(stalled=True, why=restarter.status)
        return health

    # Called on the engine's thread

    def run(self) -> BaseException | None:
        """Serve until `close`, then close the engine. Return the error that ended the loop earlier, which all clients
        were sent, or None."""
        error: BaseException | None = None
        try:
            while self._run_once():
                pass
        except BaseException as failure:  # clients are sent whatever ended the thread, SystemExit too
            error = failure
        with self._wake:
            died, self._closing = not self._closing, True
        try:
            exited = EngineExited(error if died and error is not None else EngineDead("the engine was closed"))
            for client_index in self.client_indices:
                self._send_to_client(client_index, exited)
        finally:
            self._close_engine(error)
        return error if died else None

    def _close_engine(self, error: BaseException | None) -> None:
        """Close the engine. After a failure, first clear the frames of the traceback, which would keep memory alive; a
        second failure is only logged, since the first is the cause."""
        chain = error
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__cause__ or chain.__context__
        if self._kv_events is not None:
            self._kv_events.close()
        try:
            self.engine.close()
        except Exception:
            if error is None:
                raise
            log.exception("the engine could not be closed")

    def _run_once(self) -> bool:
        """Run one iteration: handle messages, then run a step. Return False if the loop is to end."""
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
        deferred, self._deferred_stops = self._deferred_stops, []
        for client_index, stop in deferred:
            self._stop(client_index, stop)
        while self._processing:
            client_index, message = self._processing.popleft()
            self._handlers[type(message)](client_index, message)
        self._dirty = True
        if self.engine.has_unfinished_requests:
            self._publish(self.engine.step())
        self.heartbeat.mark_idle()  # to fall asleep may take any time, as in `_admin`
        for client_index, reply in self.admin_ops.finish_pending_sleep():
            self._send_to_client(client_index, reply)
        if self._cache_log is not None:
            self._report_cache(self._cache_log)
        for client_index, handover in self.page_handover.take_sendable():
            self._send_to_client(client_index, handover)
        return True

    def _publish(self, outputs: list[BranchOutput]) -> None:
        """Send each client the outputs of its requests, and the first client a message for every step."""
        now = self.engine.clock()
        by_client: dict[int, tuple[list[RequestProgress], list[tuple[int, BranchOutput]]]] = {FIRST_CLIENT: ([], [])}
        for output in outputs:
            tracked = self._requests_by_id.get(output.request_id)
            if tracked is None:  # a prefix that is computed again
                continue
            if tracked.request.hands_over:
                if output.done:
                    is_computed = output.finish_reason in ("stop", "length")
                    self.page_handover.export(tracked.client_index, tracked.number, tracked.request, is_computed)
                    self._forget(tracked)
                continue
            progress, client_outputs = by_client.setdefault(tracked.client_index, ([], []))
            if not tracked.is_reported or output.done:
                tracked.is_reported = True
                progress.append(tracked.progress())
            client_outputs.append((tracked.number, output))
            if output.done:
                self._forget(tracked)
        reported, self._reported_tokens = self._reported_tokens, self.engine.stats.computed_tokens
        computed = self._reported_tokens - reported
        facts, queues = self._metrics_if_due(), queue_sizes(self.engine)
        for client_index in self.client_indices:
            if facts is None and client_index not in by_client:
                continue
            progress, client_outputs = by_client.get(client_index, ([], []))
            first = client_outputs[:MAX_STEP_SLICES]
            message = StepOutputs(now, queues, computed if client_index == FIRST_CLIENT else 0, progress, first, facts)
            self._send_to_client(client_index, message)
            for at in range(MAX_STEP_SLICES, len(client_outputs), MAX_STEP_SLICES):  # aborts end any number of branches
                part = client_outputs[at : at + MAX_STEP_SLICES]
                self._send_to_client(client_index, StepOutputs(now, queues, 0, (), part))

    def _report_cache(self, cache_log: CacheLog) -> None:
        """Publish and send which pages were stored and dropped, dropped ones first."""
        changes = cache_log.take()
        if self._kv_events is not None:
            self._kv_events.publish(changes)
        if not self._reports_cache:
            return
        for at in range(0, len(changes.dropped), MAX_UPDATE_KEYS):
            self._send_to_client(FIRST_CLIENT, CacheUpdate((), changes.dropped[at : at + MAX_UPDATE_KEYS]))
        for at in range(0, len(changes.stored), MAX_UPDATE_KEYS):
            self._send_to_client(FIRST_CLIENT, CacheUpdate(changes.stored[at : at + MAX_UPDATE_KEYS], ()))

    def _metrics_if_due(self) -> EngineMetrics | None:
        now = time.monotonic()
        if now - self._metrics_sent_at <= METRICS_INTERVAL:
            return None
        self._metrics_sent_at = now
        if now - self._last_snapshot[0] > HISTORY_IDLE_SECONDS:
            self.engine.watch_steps(False)
        return collect_metrics(self.engine, self._cpu_seconds())

    def _send_metrics(self) -> None:
        """Send the current metrics to all clients, before the loop waits."""
        self._dirty, self._metrics_sent_at = False, time.monotonic()
        facts, queues = collect_metrics(self.engine, self._cpu_seconds()), queue_sizes(self.engine)
        for client_index in self.client_indices:
            self._send_to_client(client_index, StepOutputs(self.engine.clock(), queues, 0, (), (), facts))

    # Messages of clients

    def _add(self, client_index: int, message: AddRequests) -> None:
        def add() -> None:
            if len({request.number for request in message.requests}) < len(message.requests):
                raise InputError("request numbers must be distinct")
            prompts = [(request.id, request.prompt) for request in message.requests]
            if message.pixels or image_keys:
                self._add_with_images(prompts, message, image_keys)
            else:
                self.engine.add_all(
                    prompts, message.params, salt=message.salt, client=message.client, hands_over=message.hands_over
                )

        with_images = [request for request in message.requests if request.media]
        image_keys = {request.number: {image.key for image in request.media} for request in with_images}
        self._add_and_reply(
            client_index, message.key, add, {request.number: request.id for request in message.requests}, image_keys
        )

    def _add_with_images(
        self, prompts: list[tuple[str, Sequence[int]]], message: AddRequests, image_keys: dict[int, set[bytes]]
    ) -> None:
        """Add requests with images; each request holds a reference to the pixels of its `image_keys`."""
        pixels_by_key = {one.key: one for one in message.pixels}
        used = [key for keys in image_keys.values() for key in keys]
        if not pixels_by_key.keys() >= set(used):
            raise InputError("the pixels of an image are missing")
        pixels = self.pixels.incref([pixels_by_key[key] for key in used])
        try:
            images = [request.media for request in message.requests]
            self.engine.add_all(
                prompts, message.params, salt=message.salt, images=images, pixels=pixels, client=message.client
            )
        except BaseException:
            self.pixels.decref(used)
            raise

    def _register_prefix(self, client_index: int, message: RegisterPrefix) -> None:
        register = partial(self.engine.register_prefix, message.name, message.tokens)
        self._add_and_reply(client_index, message.key, register, {message.number: f"prefix:{message.name}"})

    def _add_and_reply(
        self,
        client_index: int,
        key: int,
        add: Callable[[], None],
        ids: dict[int, str],
        image_keys: Mapping[int, set[bytes]] = {},
    ) -> None:
        """Call `add`, which adds the requests of these numbers and ids, and reply whether it succeeded. `image_keys`
        are the keys of each request's images, by number."""
        try:
            for number in ids:
                if (client_index, number) in self._requests_by_number:
                    raise InputError(f"request number {number} is in use")
            add()
        except Exception as error:
            self._send_to_client(client_index, Reply(key, error))
            return
        for number, id in ids.items():
            tracked = TrackedRequest(client_index, number, id, self.engine.requests[id], image_keys.get(number, ()))
            self._requests_by_id[id] = self._requests_by_number[client_index, number] = tracked
        self._send_to_client(client_index, Reply(key))

    def _abort(self, client_index: int, message: AbortRequests) -> None:
        numbers = message.numbers
        if numbers is None:
            numbers = tuple(number for owner, number in self._requests_by_number if owner == client_index)
        for number in numbers:
            tracked = self._requests_by_number.get((client_index, number))
            if tracked is not None:
                self.engine.abort(tracked.id)

    def _stop(self, client_index: int, message: StopBranch) -> None:
        tracked = self._requests_by_number.get((client_index, message.number))
        if tracked is None:
            return
        ended = self.engine.stop(tracked.id, message.branch, message.reason)
        if ended is None:
            self._deferred_stops.append((client_index, message))
        elif ended:
            self._forget(tracked)

    def _import_pages(self, client_index: int, message: ImportPages) -> None:
        try:
            self.page_handover.import_pages(client_index, message)
        except InputError as error:
            self._send_to_client(client_index, Reply(message.key, error))

    def _release_hand_over(self, client_index: int, message: ReleaseHandOver) -> None:
        self.page_handover.release(client_index, message.number)

    def _release_prefix(self, client_index: int, message: ReleasePrefix) -> None:
        self._send_to_client(client_index, Reply(message.key, value=self.engine.release_prefix(message.name)))

    def _list_prefixes(self, client_index: int, message: ListPrefixes) -> None:
        held, live = self.engine.prefix_lengths, self.engine.requests
        asleep = self.engine.sleep_controller.level > 0
        ready = tuple(name for name in held if f"prefix:{name}" not in live and not asleep)
        self._send_to_client(client_index, Reply(message.key, value=(dict(held), ready)))

    def _snapshot(self, client_index: int, message: SnapshotRequest) -> None:
        began, now, used = time.thread_time(), time.monotonic(), self._cpu_seconds()
        (last_time, last_used), self._last_snapshot = self._last_snapshot, (now, used)
        busy = min(max(used - last_used, 0.0) / max(now - last_time, 1e-6), 1.0)
        self.engine.watch_steps(True)
        text = json.dumps(take_snapshot(self.engine), separators=(",", ":"))
        made = time.thread_time()
        took = made - began + self._snapshot_send_seconds
        self._send_to_client(
            client_index, Reply(message.key, value=f'{{"took":{took:.6f},"busy":{busy:.4f},{text[1:]}')
        )
        self._snapshot_send_seconds = time.thread_time() - made

    def _admin(self, client_index: int, message: AdminRequest) -> None:
        self.heartbeat.mark_idle()  # to fall asleep or wake up may take any time
        reply = self.admin_ops.handle(client_index, message)
        self._dirty = True
        if reply is not None:
            self._send_to_client(client_index, reply)

    def _client_left(self, client_index: int, message: ClientLeft) -> None:
        self._abort(client_index, AbortRequests(None))
        self.client_indices.remove(client_index)
        if not self.client_indices:
            self.close()

    def _forget(self, tracked: TrackedRequest) -> None:
        self.pixels.decref(tracked.image_keys)
        del self._requests_by_id[tracked.id]
        del self._requests_by_number[tracked.client_index, tracked.number]
