"""The further fronts of a server, as its first one has them: started as programs, told when to accept and when to end,
asked for what they counted, and missed when they are gone or silent.

Fronts share the listening socket and the engine. The first one started all the others, which talk to nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.errors import APIServerDead, StartupError
from quire.ipc.child_process import ChildProcess, program_arguments
from quire.ipc.process_client import ProcessEngineClient
from quire.protocol.columns import WireError
from quire.server.accept_slots import AcceptSlots, create_slots_file
from quire.server.control_channel import ControlChannel, receive_blocking, send_blocking
from quire.server.counters import ServerCounters, read_counters
from quire.server.server_group import ServerGroup

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.server.options import ServeOptions

WORKER_PROGRAM = program_arguments("quire.server.frontend_worker")
START_SECONDS = 120.0  # for a front to be ready once the engine is
GATHER_SECONDS = 1.0  # for the fronts' answers to a scrape
BEAT_SECONDS = 0.5  # seconds between two signs of life that fronts give each other
MAX_MISSED_BEATS = 4  # of these in a row, and a front isn't well
EXTRA_SECONDS = 10.0  # beside draining, for fronts to end
KILL_SECONDS = 3.0
log = logging.getLogger("quire.server")


class WorkerHandle:
    """A further front: its process, and what is known of it."""

    def __init__(self, number: int, process: ChildProcess) -> None:
        self.name, self.process = f"front {number}", process
        self.connection = process.connections[0]
        self.channel: ControlChannel
        self.counters: ServerCounters | None = None  # as it said last
        self.active_requests = 0
        self.missed_beats, self.reported_problem = 0, ""
        self.silence_logged = False  # it was said that it doesn't answer
        self.drained = asyncio.Event()

    def wait_ready(self, deadline: float) -> None:
        """Wait until it says that it is, which is by `deadline` of the monotonic clock. StartupError if it can't be."""
        self.connection.settimeout(max(deadline - time.monotonic(), 0.1))
        try:
            what, value = receive_blocking(self.connection)
        except TimeoutError as error:
            raise StartupError(f"{self.name} was not ready within {START_SECONDS:g} s") from error
        except (EOFError, OSError, WireError) as error:
            remedy = "What it wrote to the log says why; SIGKILL ends those that take too much memory, say"
            raise StartupError(f"{self.name} {self.process.describe_exit(5.0)} at start", remedy) from error
        if what != "ready":
            text, remedy = (str(value.get(name, "")) for name in ("text", "remedy"))
            raise StartupError(f"{self.name} can't start: {text}", remedy)


class FrontendManager(ServerGroup):
    """`count` fronts on `listener`, of which this process is the first; `settings` are what the others are told.
    `max_connections` connections may be open in all of them."""

    def __init__(
        self, count: int, listener: socket.socket, settings: dict[str, Any], max_connections: int | None = None
    ) -> None:
        super().__init__(count)
        self._listener, self._settings = listener, {**settings, "count": count, "started": self.start_time}
        self._slots_fd = create_slots_file(count) if count > 1 else None
        self.accept_slots = (
            AcceptSlots(self._slots_fd, count, 0, max_connections) if self._slots_fd is not None else None
        )
        self.workers: list[WorkerHandle] = []
        self._is_ending = False
        self._all_drained = asyncio.Event()
        self._current_gather: asyncio.Task[bytes] | None = None  # under way
        self._next_gather: asyncio.Task[bytes] | None = None  # who asks now is answered by this one
        self._tasks: list[asyncio.Task[None]] = []

    # Before there is an event loop

    def start_workers(self, engine: ChildProcess) -> None:
        """Start the others, each over a connection of its own to the engine. StartupError if there is no process."""
        connections, file = engine.connections[1:], self._slots_fd
        if file is None:
            return
        del engine.connections[1:]
        try:
            for number, connection in enumerate(connections, 1):
                inherited = (self._listener.fileno(), connection.fileno(), file)
                other = WorkerHandle(number, ChildProcess(1, WORKER_PROGRAM, f"front {number}", inherited))
                self.workers.append(other)
                with suppress(OSError):  # it is gone: `wait` says so
                    send_blocking(other.connection, "settings", {**self._settings, "number": number})
        finally:
            for connection in connections:
                connection.close()

    def wait_ready(self, llm: AsyncLLM) -> None:
        """Wait until all are ready to accept. StartupError with the reason of one that can't be; the engine is closed
        then."""
        end = time.monotonic() + START_SECONDS
        try:
            for other in self.workers:
                other.wait_ready(end)
        except BaseException:
            llm.close()
            raise

    def close(self) -> None:
        """End them: those that are left in a few seconds are killed."""
        for other in self.workers:
            other.connection.close()
        if self._slots_fd is not None:
            os.close(self._slots_fd)
            self._slots_fd = None
        end = time.monotonic() + KILL_SECONDS
        for other in self.workers:
            other.process.wait_or_kill(max(end - time.monotonic(), 0.0))

    # On the event loop

    async def connect(self) -> None:
        """Listen to the others, and tell them that this one is there."""
        for other in self.workers:
            other.channel = ControlChannel(other.connection, self._handlers_for(other))
            await other.channel.connect()
            self._tasks.append(asyncio.ensure_future(self._watch_worker(other)))
        if self.workers:
            self._tasks.append(asyncio.ensure_future(self._send_beats()))

    async def start_accepting(self) -> None:
        """Have the others accept connections. Returns once they do, or one of them is lost."""
        asked = (other.channel.request("accept", None, START_SECONDS) for other in self.workers)
        for other, answer in zip(self.workers, await asyncio.gather(*asked, return_exceptions=True)):
            if isinstance(answer, TimeoutError):
                self._on_worker_lost(f"{other.name} was not accepting within {START_SECONDS:g} s")

    def request_drain(self, drain_seconds: float) -> None:
        """Have the others drain within so many seconds."""
        self._is_ending = True
        self._broadcast("end", drain_seconds)

    async def wait_ended(self, seconds: float) -> bool:
        """This front is drained: wait until the others are too, and have ended. Whether all of them ended well, within
        so many seconds; those that didn't are named and killed."""
        end = time.monotonic() + seconds + EXTRA_SECONDS
        drained = end - EXTRA_SECONDS / 2  # one that hangs must not keep the others from ending by themselves
        await _wait_until(
            lambda: all(other.drained.is_set() or other.process.has_exited() for other in self.workers), drained
        )
        self._all_drained.set()
        await _wait_until(lambda: all(other.process.has_exited() for other in self.workers), end)
        for other in self.workers:
            if not other.process.has_exited():
                log.error("%s doesn't end and is killed", other.name)
                other.process.wait_or_kill(0.0)
            elif other.process.process.returncode:
                log.error("%s %s", other.name, other.process.describe_exit())
        return all(other.process.process.returncode == 0 for other in self.workers)

    def problem(self) -> str:
        """Which front isn't well."""
        for other in self.workers:
            if other.missed_beats >= MAX_MISSED_BEATS:
                return f"{other.name} has not been heard of for {other.missed_beats * BEAT_SECONDS:g} s"
            if other.reported_problem:
                return f"{other.name}: {other.reported_problem}"
        return ""

    async def load(self) -> int:
        """Requests in the server."""
        await asyncio.gather(*(self._ask_load(other) for other in self.workers))
        return self.llm.active + sum(other.active_requests for other in self.workers)

    async def scrape(self) -> bytes:
        """The metrics of all fronts. Who asks while others are being answered shares the next answer."""
        if self._next_gather is None:
            self._next_gather = asyncio.ensure_future(self._gather(self._current_gather))
        return await asyncio.shield(self._next_gather)

    async def _gather(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        self._current_gather, self._next_gather = self._next_gather, None
        await asyncio.gather(*(self._ask_counts(other) for other in self.workers))
        self.metrics.other_counters = self._worker_counters
        return self.metrics.render()

    def _worker_counters(self) -> Iterable[ServerCounters]:
        return [other.counters for other in self.workers if other.counters is not None]

    async def _ask_counts(self, worker: WorkerHandle) -> None:
        """Learn what a front counted; what it said last stands if it doesn't answer."""
        from quire.server.metrics import BOUNDS

        with suppress(TimeoutError, ConnectionError):
            worker.counters = read_counters(await worker.channel.request("counts", None, GATHER_SECONDS), BOUNDS)
            worker.silence_logged = False
            return
        if not worker.silence_logged:
            log.warning("%s doesn't say what it counted: what it said last is shown", worker.name)
        worker.silence_logged = True

    async def _ask_load(self, worker: WorkerHandle) -> None:
        with suppress(TimeoutError, ConnectionError):
            worker.active_requests = int(await worker.channel.request("load", None, GATHER_SECONDS))

    def _handlers_for(self, worker: WorkerHandle) -> dict[str, Any]:
        """What the others ask."""

        async def beat(why: str) -> None:
            worker.missed_beats, worker.reported_problem = 0, why

        async def scrape(_: None) -> str:
            return (await self.scrape()).decode()

        async def load(_: None) -> int:
            return await self.load()

        async def drained(_: None) -> None:
            worker.drained.set()
            await self._all_drained.wait()

        async def over(why: str) -> None:  # if it was the engine's end, this front is about to see it too
            await asyncio.sleep(BEAT_SECONDS)
            self._on_worker_lost(f"{worker.name} ends: {why}")

        return {"beat": beat, "scrape": scrape, "load": load, "drained": drained, "over": over}

    async def _watch_worker(self, worker: WorkerHandle) -> None:
        await worker.channel.serve()
        if not self._is_ending:
            self._on_worker_lost(f"{worker.name} {worker.process.describe_exit()}")

    def _on_worker_lost(self, reason: str) -> None:
        """Without one of its fronts the server ends."""
        if self.llm.error is None:
            log.error("%s: the server ends", reason)
            self._broadcast("died", reason)
            assert isinstance(self.llm.engine_client, ProcessEngineClient), "fronts share an engine's process"
            self.llm.engine_client.give_up(APIServerDead(reason))

    async def _send_beats(self) -> None:
        while True:
            self._broadcast("beat", self.problem())
            for other in self.workers:
                other.missed_beats += 1
            await asyncio.sleep(BEAT_SECONDS)

    def _broadcast(self, kind: str, value: Any) -> None:
        for other in self.workers:
            with suppress(ConnectionError):
                other.channel.notify(kind, value)


async def _wait_until(condition: Callable[[], bool], deadline: float) -> None:
    """Wait until it is so, or until `deadline` of the monotonic clock."""
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def worker_settings(
    config: EngineConfig,
    options: ServeOptions,
    keys: tuple[str, ...],
    admin_keys: tuple[str, ...],
    template: str | None,
) -> dict[str, Any]:
    """What the others are told, as JSON has it: all that the command line, the environment and files said."""
    return {
        "config": asdict(config), "options": options._asdict(), "keys": keys, "admin_keys": admin_keys,
        "template": template,
    }  # fmt: skip
