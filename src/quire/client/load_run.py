"""One run of load: requests at their times on a clock that all clients share, or so many at once until none is left.

Requests are bytes of a file that the clients inherit. In a closed loop the next one is a record of a second file: they
share its position, so reading a record takes it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from quire.client.connection_pool import Address, ConnectionPool
from quire.client.event_loop_monitor import EventLoopMonitor
from quire.client.response_parser import ResponseRecord

QUEUE_RECORD = struct.Struct(
    "<QQQ"
)  # a request in the queue: its number, and where its bytes begin and how many they are


class PlannedRequest(NamedTuple):
    """A request: where it is in the file of bodies, and when it is due, in seconds from the start."""

    number: int
    offset: int
    size: int
    due: float | None = None


class LoadPlan(NamedTuple):
    """What one client does in one run. `head` is the request's line and headers, but for its length. With
    `concurrency`, so many requests of the queue are under way at any time; else `requests` are sent, in order of
    time."""

    address: Address
    head: bytes
    requests: list[PlannedRequest]
    concurrency: int
    bodies_fd: int
    queue_fd: int


class LoadRun:
    """One plan, from `start` (time.monotonic) on."""

    def __init__(self, plan: LoadPlan, start: float) -> None:
        self.plan, self.start = plan, start
        self.records: list[ResponseRecord] = []
        self._connections = ConnectionPool(plan.address)

    async def run(self) -> dict[str, Any]:
        """All of it: how busy this client was. Then `records` holds an answer for every request."""
        gc.collect()
        gc.disable()  # its passes would be lag; what a run leaves is bounded by its requests
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
        under_way = []
        for planned in self.plan.requests:
            assert planned.due is not None, "a request without a time, and no slots"
            early = self.start + planned.due - time.monotonic()
            if early > 0:
                await asyncio.sleep(early)
            under_way.append(asyncio.create_task(self._send_request(planned)))
        await asyncio.gather(*under_way)

    async def _run_slot(self) -> None:
        for planned in self._queued_requests():
            await self._send_request(planned)

    def _queued_requests(self) -> Iterator[PlannedRequest]:
        while record := os.read(self.plan.queue_fd, QUEUE_RECORD.size):
            yield PlannedRequest(*QUEUE_RECORD.unpack(record))

    async def _send_request(self, planned: PlannedRequest) -> None:
        answer = ResponseRecord(planned.number, None if planned.due is None else self.start + planned.due)
        self.records.append(answer)
        body = os.pread(self.plan.bodies_fd, planned.size, planned.offset)
        request = b"%sContent-Length: %d\r\n\r\n%s" % (self.plan.head, len(body), body)
        answer.sent = time.monotonic()
        await self._connections.request(request, answer)

    def to_json(self) -> Iterator[dict[str, Any]]:
        """Every answer as a record for JSON: times are microseconds from the start, those of chunks each from the one
        before it."""
        for answer in self.records:
            sent = round((answer.sent - self.start) * 1e6)
            times, before = [], sent
            for moment in answer.chunk_times:
                now = round((moment - self.start) * 1e6)
                times.append(now - before)
                before = now
            yield {
                "number": answer.number, "sent": sent, "times": times, "counts": list(answer.token_counts),
                "prompt": answer.prompt_tokens, "tokens": answer.completion_tokens, "status": answer.status,
                "error": answer.error,
            }  # fmt: skip
