"""One run of load: requests at given times, on a clock that all clients share, or a fixed number in flight until none
is left.

Requests are bytes of a file that the clients inherit. In a closed loop the next request is a record of a second file:
clients share its position, so reading a record takes it from the queue."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.client.connection_pool import Address, ConnectionPool
from quire.client.response_parser import ResponseRecord

SAMPLE_INTERVAL = 0.01  # seconds between two samples
WINDOW_SECONDS = 0.5  # seconds over which the share of a core is measured
QUEUE_RECORD = struct.Struct("<QQQ")  # number, offset and size of a request in the queue


class EventLoopMonitor:
    """Measures the lag of the event loop every SAMPLE_INTERVAL seconds, and the process's CPU time by windows.
    `on_window` is called after each window with the time."""

    def __init__(self, on_window: Callable[[float], None] = lambda now: None) -> None:
        self._on_window = on_window
        self._lags = array("d")
        self._cpu_shares = array("d")
        self._loop = asyncio.get_running_loop()
        self._began = self._window = time.monotonic()
        self._cpu = self._cpu_window = time.process_time()
        self._due = self._began + SAMPLE_INTERVAL
        self._timer = self._loop.call_later(SAMPLE_INTERVAL, self._sample)

    def _sample(self) -> None:
        now = time.monotonic()
        self._lags.append(max(0.0, now - self._due))
        if now - self._window >= WINDOW_SECONDS:
            self._close_window(now)
            self._on_window(now)
        self._due = now + SAMPLE_INTERVAL
        self._timer = self._loop.call_later(SAMPLE_INTERVAL, self._sample)

    def _close_window(self, now: float) -> None:
        cpu = time.process_time()
        self._cpu_shares.append((cpu - self._cpu_window) / (now - self._window))
        self._window, self._cpu_window = now, cpu

    def stop(self) -> dict[str, Any]:
        """Stop, and return `cpu_s`, `seconds`, `busiest` (the largest share of a core in a window), and the lag."""
        self._timer.cancel()
        now = time.monotonic()
        if now - self._window >= WINDOW_SECONDS / 2 or not self._cpu_shares:
            self._close_window(now)
        lags = sorted(self._lags) or [0.0]
        return {
            "cpu_s": time.process_time() - self._cpu,
            "seconds": now - self._began,
            "busiest": max(self._cpu_shares),
            "lag_p99_s": lags[(len(lags) - 1) * 99 // 100],
            "lag_max_s": lags[-1],
        }


class PlannedRequest(NamedTuple):
    """A request: its place in the file of bodies, and when it is due, in seconds from the start."""

    number: int
    offset: int
    size: int
    due: float | None = None


class LoadPlan(NamedTuple):
    """What one client sends in one run. `head` is the request line and headers, without the length. With `concurrency`,
    that many requests of the queue are in flight at any time; else `requests` are sent, in order of time."""

    address: Address
    head: bytes
    requests: list[PlannedRequest]
    concurrency: int
    bodies_fd: int
    queue_fd: int


class LoadRun:
    """One run of a plan that begins at `start` (time.monotonic)."""

    def __init__(self, plan: LoadPlan, start: float) -> None:
        self.plan, self.start = plan, start
        self.records: list[ResponseRecord] = []
        self._connections = ConnectionPool(plan.address)

    async def run(self) -> dict[str, Any]:
        """Run the plan, and return how busy this client was. Then `records` has a record of every request."""
        gc.collect()
        gc.disable()  # collections would cause lag; garbage is bounded by the number of requests
        try:
            await asyncio.sleep(max(0.0, self.start - time.monotonic()))
            watch = EventLoopMonitor(self._connections.abort_silent)
            if self.plan.concurrency:
                await asyncio.gather(*(self._run_slot() for _ in range(self.plan.concurrency)))
            else:
                await self._send_on_time()
            return watch.stop()
        finally:
            self._connections.close()
            gc.enable()

    async def _send_on_time(self) -> None:
        tasks = []
        for planned in self.plan.requests:
            assert planned.due is not None, "without concurrency every request has a time"
            early = self.start + planned.due - time.monotonic()
            if early > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.create_task(self._send_request(planned)))
        await asyncio.gather(*tasks)

    async def _run_slot(self) -> None:
        for planned in self._queued_requests():
            await self._send_request(planned)

    def _queued_requests(self) -> Iterator[PlannedRequest]:
        while record := os.read(self.plan.queue_fd, QUEUE_RECORD.size):
            yield PlannedRequest(*QUEUE_RECORD.unpack(record))

    async def _send_request(self, planned: PlannedRequest) -> None:
        record = ResponseRecord(planned.number, None if planned.due is None else self.start + planned.due)
        self.records.append(record)
        body = os.pread(self.plan.bodies_fd, planned.size, planned.offset)
        request = b"%sContent-Length: %d\r\n\r\n%s" % (self.plan.head, len(body), body)
        record.sent = time.monotonic()
        await self._connections.request(request, record)

    def to_json(self) -> Iterator[dict[str, Any]]:
        """Yield every record as JSON: times are microseconds, of `sent` from the start, of each chunk from the one
        before."""
        for record in self.records:
            sent = round((record.sent - self.start) * 1e6)
            times, before = [], sent
            for moment in record.chunk_times:
                now = round((moment - self.start) * 1e6)
                times.append(now - before)
                before = now
            yield {
                "number": record.number, "sent": sent, "times": times, "counts": list(record.token_counts),
                "prompt": record.prompt_tokens, "tokens": record.completion_tokens, "status": record.status,
                "error": record.error,
            }  # fmt: skip
