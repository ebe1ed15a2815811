"""The worker frontends of a server, as its main frontend manages them. The main frontend, which is the first, starts
the others as programs, starts and ends their accepting, collects their counters, and ends the server if one is lost.

The frontends share the listening socket and the engine. Workers exchange messages with the main frontend only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
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
START_SECONDS = 120.0  # for a frontend to be ready once the engine is
GATHER_SECONDS = 1.0  # for the workers' answers to a scrape
BEAT_SECONDS = 0.5  # between two heartbeats
MAX_MISSED_BEATS = 4  # in a row; then a frontend counts as unhealthy
EXTRA_SECONDS = 10.0  # for frontends to end, in addition to draining
KILL_SECONDS = 3.0
log = logging.getLogger("quire.server")


class WorkerHandle:
    """A worker frontend: its process, and its state as last reported."""

    def __init__(self, number: int, process: ChildProcess) -> None:
        self.name, self.process = f"frontend {number}", process
        self.connection = process.connections[0]
        self.channel: ControlChannel
        self.counters: ServerCounters | None = None
        self.active_requests = 0
        self.missed_beats, self.reported_problem = 0, ""
        self.silence_logged = False  # a missing answer was logged
        self.drained = asyncio.Event()

    def wait_ready(self, deadline: float) -> None:
        """Wait until the worker is ready, at most until `deadline` of the monotonic clock. Raise StartupError with the
        reason if it cannot start."""
        self.connection.settimeout(max(deadline - time.monotonic(), 0.1))
        try:
            kind, value = receive_blocking(self.connection)
        except TimeoutError as error:
            raise StartupError(f"{self.name} was not ready within {START_SECONDS:g} s") from error
        except (EOFError, OSError, WireError) as error:
            remedy = "What it wrote to the log says why; SIGKILL ends those that take too much memory, say"
            raise StartupError(f"{self.name} {self.process.describe_exit(5.0)} at start", remedy) from error
        if kind != "ready":
            text, remedy = (str(value.get(name, "")) for name in ("text", "remedy"))
            raise StartupError(f"{self.name} can't start: {text}", remedy)


class FrontendManager(ServerGroup):
    """The main frontend of `count` frontends on `listener`. `settings` are sent to the workers. `max_connections` is
    the limit of open connections of all frontends together."""

    def __init__(
        self, count: int, listener: socket.socket, settings: dict[str, Any], max_connections: int | None = None
    ) -> None:
        self._slots_fd = slots_fd = create_slots_file(count) if count > 1 else None
        slots = None if slots_fd is None else AcceptSlots(slots_fd, count, 0, max_connections)
        super().__init__(count, accept_slots=slots)
        self._listener, self._settings = listener, {**settings, "count": count, "started": self.start_time}
        self.workers: list[WorkerHandle] = []
        self._is_ending = False
        self._all_drained = asyncio.Event()
        self._current_gather: asyncio.Task[bytes] | None = None  # running
        self._next_gather: asyncio.Task[bytes] | None = None  # answers the scrapes that arrive now
        self._tasks: list[asyncio.Task[None]] = []

    # Before there is an event loop

    def start_workers(self, engine: ChildProcess) -> None:
        """Start the workers, each with a connection of its own to the engine. Raise StartupError if a process cannot be
        started."""
        connections, slots_fd = engine.connections[1:], self._slots_fd
        if slots_fd is None:
            return
        del engine.connections[1:]
        try:
            for number, connection in enumerate(connections, 1):
                inherited = (self._listener.fileno(), connection.fileno(), slots_fd)
                worker = WorkerHandle(number, ChildProcess(1, WORKER_PROGRAM, f"frontend {number}", inherited))
                self.workers.append(worker)
                with suppress(OSError):  # it has ended: wait_ready reports it
                    send_blocking(worker.connection, "settings", {**self._settings, "number": number})
        finally:
            for connection in connections:
                connection.close()

    def wait_ready(self, llm: AsyncLLM) -> None:
        """Wait until all workers are ready to accept. Otherwise close the engine and raise StartupError with the
        reason."""
        end = time.monotonic() + START_SECONDS
        try:
            for worker in self.workers:
                worker.wait_ready(end)
        except BaseException:
            llm.close()
            raise

    def close(self) -> None:
        """End the workers. Those that are still running after a few seconds are killed."""
        for worker in self.workers:
            worker.connection.close()
        if self._slots_fd is not None:
            os.close(self._slots_fd)
            self._slots_fd = None
        end = time.monotonic() + KILL_SECONDS
        for worker in self.workers:
            worker.process.wait_or_kill(max(end - time.monotonic(), 0.0))

    # On the event loop

    async def connect(self) -> None:
        """Open the channels to the workers, and start to send heartbeats."""
        for worker in self.workers:
            worker.channel = ControlChannel(worker.connection, self._handlers_for(worker))
            await worker.channel.connect()
            self._tasks.append(asyncio.ensure_future(self._watch_worker(worker)))
        if self.workers:
            self._tasks.append(asyncio.ensure_future(self._send_beats()))

    async def start_accepting(self) -> None:
        """Have the workers accept connections. Returns once they do, or one of them is lost."""
        requests = (worker.channel.request("accept", None, START_SECONDS) for worker in self.workers)
        for worker, answer in zip(self.workers, await asyncio.gather(*requests, return_exceptions=True)):
            if isinstance(answer, TimeoutError):
                self._on_worker_lost(f"{worker.name} was not accepting within {START_SECONDS:g} s")

    def request_drain(self, drain_seconds: float) -> None:
        """Have the workers drain within `drain_seconds`."""
        self._is_ending = True
        self._broadcast("end", drain_seconds)

    async def wait_ended(self, seconds: float) -> bool:
        """Wait until the workers are drained and have ended, after this frontend is drained. Workers still running
        after `seconds` and a margin are logged and killed. Return True if all of them ended with status 0."""
        end = time.monotonic() + seconds + EXTRA_SECONDS
        drained = end - EXTRA_SECONDS / 2  # so that the others have time to end if one hangs
        await _wait_until(
            lambda: all(worker.drained.is_set() or worker.process.has_exited() for worker in self.workers), drained
        )
        self._all_drained.set()
        await _wait_until(lambda: all(worker.process.has_exited() for worker in self.workers), end)
        for worker in self.workers:
            if not worker.process.has_exited():
                log.error("%s doesn't end and is killed", worker.name)
                worker.process.wait_or_kill(0.0)
            elif worker.process.process.returncode:
                log.error("%s %s", worker.name, worker.process.describe_exit())
        return all(worker.process.process.returncode == 0 for worker in self.workers)

    def problem(self) -> str:
        """Return which worker is unhealthy and why, or ""."""
        for worker in self.workers:
            if worker.missed_beats >= MAX_MISSED_BEATS:
                return f"{worker.name} has not been heard of for {worker.missed_beats * BEAT_SECONDS:g} s"
            if worker.reported_problem:
                return f"{worker.name}: {worker.reported_problem}"
        return ""

    async def load(self) -> int:
        """Return the number of requests in the server."""
        await asyncio.gather(*(self._ask_load(worker) for worker in self.workers))
        return self.llm.active + sum(worker.active_requests for worker in self.workers)

    async def scrape(self) -> bytes:
        """Return the metrics of all frontends. Scrapes that arrive during another one share the next result."""
        if self._next_gather is None:
            self._next_gather = asyncio.ensure_future(self._gather(self._current_gather))
        return await asyncio.shield(self._next_gather)

    async def _gather(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        self._current_gather, self._next_gather = self._next_gather, None
        await asyncio.gather(*(self._ask_counts(worker) for worker in self.workers))
        return self.metrics.render([worker.counters for worker in self.workers if worker.counters is not None])

    async def _ask_counts(self, worker: WorkerHandle) -> None:
        """Get a worker's counters. The last ones are kept if it does not answer."""
        from quire.server.metrics import BOUNDS

        with suppress(TimeoutError, ConnectionError):
            worker.counters = read_counters(await worker.channel.request("counts", None, GATHER_SECONDS), BOUNDS)
            worker.silence_logged = False
            return
        if not worker.silence_logged:
            log.warning("%s does not report its counters: the last ones are shown", worker.name)
        worker.silence_logged = True

    async def _ask_load(self, worker: WorkerHandle) -> None:
        with suppress(TimeoutError, ConnectionError):
            worker.active_requests = int(await worker.channel.request("load", None, GATHER_SECONDS))

    def _handlers_for(self, worker: WorkerHandle) -> dict[str, Any]:
        """Return the handlers of a worker's messages."""

        async def beat(why: str) -> None:
            worker.missed_beats, worker.reported_problem = 0, why

        async def scrape(_: None) -> str:
            return (await self.scrape()).decode()

        async def load(_: None) -> int:
            return await self.load()

        async def drained(_: None) -> None:
            worker.drained.set()
            await self._all_drained.wait()

        async def over(why: str) -> None:  # waits, since this frontend sees the engine's end itself
            await asyncio.sleep(BEAT_SECONDS)
            self._on_worker_lost(f"{worker.name} ends: {why}")

        return {"beat": beat, "scrape": scrape, "load": load, "drained": drained, "over": over}

    async def _watch_worker(self, worker: WorkerHandle) -> None:
        await worker.channel.serve()
        if not self._is_ending:
            self._on_worker_lost(f"{worker.name} {worker.process.describe_exit()}")

    def _on_worker_lost(self, reason: str) -> None:
        """End the server, since it needs all of its frontends."""
        if self.llm.error is None:
            log.error("%s: the server ends", reason)
            self._broadcast("died", reason)
            assert isinstance(self.llm.engine_client, ProcessEngineClient), "frontends share an engine's process"
            self.llm.engine_client.give_up(APIServerDead(reason))

    async def _send_beats(self) -> None:
        while True:
            self._broadcast("beat", self.problem())
            for worker in self.workers:
                worker.missed_beats += 1
            await asyncio.sleep(BEAT_SECONDS)

    def _broadcast(self, kind: str, value: Any) -> None:
        for worker in self.workers:
            with suppress(ConnectionError):
                worker.channel.notify(kind, value)


async def _wait_until(condition: Callable[[], bool], deadline: float) -> None:
    """Wait until `condition` is true, or until `deadline` of the monotonic clock."""
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def worker_settings(
    config: EngineConfig,
    options: ServeOptions,
    keys: tuple[str, ...],
    admin_keys: tuple[str, ...],
    template: str | None,
) -> dict[str, Any]:
    """Return the settings of workers as JSON: everything from the command line, the environment and files."""
    return {
        "config": config.flat(), "options": asdict(options), "keys": keys, "admin_keys": admin_keys,
        "template": template,
    }  # fmt: skip
