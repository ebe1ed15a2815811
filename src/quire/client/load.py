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

from quire.client.answer import Answer
from quire.client.connections import Address, Connections
from quire.client.watch import Watch

RECORD = struct.Struct("<QQQ")  # a request in the queue: its number, and where its bytes begin and how many they are


class Planned(NamedTuple):
    """A request: where it is in the file of bodies, and when it is due, in seconds from the start."""

    number: int
    offset: int
    size: int
    due: float | None = None


class Plan(NamedTuple):
    """What one client does in one run. `head` is the request's line and headers, but for its length. With `slots`,
    so many requests of the queue are under way at any time; else `requests` are sent, in order of time."""

    address: Address
    head: bytes
    requests: list[Planned]
    slots: int
    bodies: int
    queue: int


class Run:
    """One plan, from `start` (time.monotonic) on."""

    def __init__(self, plan: Plan, start: float) -> None:
        self.plan, self.start = plan, start
        self.answers: list[Answer] = []
        self._connections = Connections(plan.address)

    async def run(self) -> dict[str, Any]:
        """All of it: how busy this client was. Then `answers` holds an answer for every request."""
        gc.collect()
        gc.disable()  # its passes would be lag; what a run leaves is bounded by its requests
        try:
            await asyncio.sleep(max(0.0, self.start - time.monotonic()))
            watch = Watch(self._connections.end_silent)
            if self.plan.slots:
                await asyncio.gather(*(self._slot() for _ in range(self.plan.slots)))
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
            under_way.append(asyncio.create_task(self._ask(planned)))
        await asyncio.gather(*under_way)

    async def _slot(self) -> None:
        for planned in self._queued():
            await self._ask(planned)

    def _queued(self) -> Iterator[Planned]:
        while record := os.read(self.plan.queue, RECORD.size):
            yield Planned(*RECORD.unpack(record))

    async def _ask(self, planned: Planned) -> None:
        answer = Answer(planned.number, None if planned.due is None else self.start + planned.due)
        self.answers.append(answer)
        body = os.pread(self.plan.bodies, planned.size, planned.offset)
        request = b"%sContent-Length: %d\r\n\r\n%s" % (self.plan.head, len(body), body)
        answer.sent = time.monotonic()
        await self._connections.ask(request, answer)

    def told(self) -> Iterator[dict[str, Any]]:
        """Every answer as a record for JSON: times are microseconds from the start, those of chunks each from the one
        before it."""
        for answer in self.answers:
            sent = round((answer.sent - self.start) * 1e6)
            times, before = [], sent
            for moment in answer.times:
                now = round((moment - self.start) * 1e6)
                times.append(now - before)
                before = now
            yield {
                "number": answer.number, "sent": sent, "times": times, "counts": list(answer.counts),
                "prompt": answer.prompt, "tokens": answer.tokens, "status": answer.status, "error": answer.error,
            }  # fmt: skip
