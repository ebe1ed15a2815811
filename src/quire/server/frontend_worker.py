"""A worker frontend of a server, as a program. Its arguments CONTROL LISTENER ENGINE SLOTS are numbers of inherited
descriptors. The main frontend sends its settings and decides when it accepts and ends:
quire.server.frontend_manager."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import APIServerDead, Overloaded, StartupError
from quire.ipc.child_process import exit_now, ignore_signals
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.ipc.process_client import ProcessEngineClient
from quire.protocol.columns import WireError
from quire.server.accept_slots import AcceptSlots
from quire.server.api_server import (
    DEATH_NOTICE_SECONDS,
    SHUTDOWN_MARGIN_SECONDS,
    close_engine,
    import_libraries,
    make_tracer,
    run_loop,
)
from quire.server.control_channel import ControlChannel, receive_blocking, send_blocking
from quire.server.frontend_manager import BEAT_SECONDS, EXTRA_SECONDS, GATHER_SECONDS, MAX_MISSED_BEATS
from quire.server.options import MAX_INT_DIGITS, ServeOptions, configure_logging, set_chat_template
from quire.server.server_group import ServerGroup
from quire.startup.engine_process import join_engine_process

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.traces import RequestTracer

log = logging.getLogger("quire.server")


class FrontendWorker(ServerGroup):
    """The server as a worker frontend sees it: through messages to the main frontend, over `connection`."""

    def __init__(self, count: int, started: int, connection: socket.socket, accept_slots: AcceptSlots) -> None:
        super().__init__(count, started, accept_slots)
        self.accept_requested, self.accept_started = asyncio.Event(), asyncio.Event()
        self.drain_requested, self.drain_seconds = asyncio.Event(), 0.0
        self._missed_beats, self._reported_problem = 0, ""
        self._channel = ControlChannel(connection, {
            "beat": self._on_beat, "counts": self._on_counts, "load": self._on_load, "accept": self._on_accept,
            "end": self._on_end, "died": self._on_died,
        })  # fmt: skip

    async def connect(self) -> list[asyncio.Task[None]]:
        """Connect to the main frontend. Return the tasks that handle its messages and watch its heartbeats."""
        await self._channel.connect()
        return [asyncio.ensure_future(self._watch_manager()), asyncio.ensure_future(self._count_missed_beats())]

    def problem(self) -> str:
        """Return why the server is unhealthy, as the main frontend reports it, or that its heartbeats are missing."""
        return (
            "the first frontend has not been heard of"
            if self._missed_beats >= MAX_MISSED_BEATS
            else self._reported_problem
        )

    async def scrape(self) -> bytes:
        """Return the metrics of all frontends, which the main one adds up, or those of the engine alone if it does not
        answer."""
        try:
            return str(await self._ask("scrape")).encode()
        except Overloaded:
            return self.metrics.render_engine()

    async def load(self) -> int:
        """Return the number of requests in the server. Raise Overloaded if the main frontend does not answer."""
        return int(await self._ask("load"))

    async def wait_all_drained(self) -> None:
        """Report that this frontend is drained, and wait until all are."""
        with suppress(TimeoutError, ConnectionError):
            await self._channel.request("drained", None, self.drain_seconds + EXTRA_SECONDS)

    def report_end(self, reason: str) -> None:
        """Report that this frontend ends, and why."""
        with suppress(ConnectionError):
            self._channel.notify("over", reason)

    async def _ask(self, kind: str) -> Any:
        try:
            return await self._channel.request(kind, None, 3 * GATHER_SECONDS)
        except (TimeoutError, ConnectionError) as error:
            log.warning("the first frontend doesn't answer (%s)", kind)
            raise Overloaded("the first frontend of this server doesn't answer", 1) from error

    async def _watch_manager(self) -> None:
        await self._channel.serve()
        if self.llm.error is None:
            log.error("the first frontend is gone: the server ends")
            await self._on_died("the first frontend is gone")

    async def _count_missed_beats(self) -> None:
        """Count missed heartbeats. The count is of turns of this loop, not of time: time would also pass while this
        process is stopped."""
        while True:
            self._missed_beats += 1
            await asyncio.sleep(BEAT_SECONDS)

    # Messages of the main frontend

    async def _on_beat(self, why: str) -> None:
        self._missed_beats, self._reported_problem = 0, why
        health = self.llm.heartbeat()
        self._channel.notify("beat", "" if health.alive and not health.stalled else health.why)

    async def _on_counts(self, _: None) -> dict[str, Any]:
        return self.metrics.own_counters().to_json()

    async def _on_load(self, _: None) -> int:
        return self.llm.active

    async def _on_accept(self, _: None) -> None:
        self.accept_requested.set()
        await self.accept_started.wait()

    async def _on_end(self, seconds: float) -> None:
        self.drain_seconds = float(seconds)
        self.drain_requested.set()

    async def _on_died(self, why: str) -> None:
        if self.llm.error is None:
            assert isinstance(self.llm.engine_client, ProcessEngineClient), "frontends share an engine's process"
            self.llm.engine_client.give_up(APIServerDead(why))


def options_from_json(options_json: Mapping[str, Any]) -> ServeOptions:
    """Return the options that JSON holds."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options_json.items()
    }
    return ServeOptions(**fields)


def run(channel: socket.socket, listener: socket.socket, connection: socket.socket, slots_fd: int) -> int:
    """Run the worker with the settings that the main frontend sends. Return the exit status."""
    try:
        _, settings = receive_blocking(channel)
    except (EOFError, OSError, WireError):
        return 1
    options = options_from_json(settings["options"])
    configure_logging(options, f"frontend {settings['number']}")
    sys.set_int_max_str_digits(MAX_INT_DIGITS)
    slots = AcceptSlots(slots_fd, settings["count"], settings["number"], options.max_connections)
    worker = FrontendWorker(settings["count"], settings["started"], channel, slots)
    try:
        llm, app, tracer = _load_app(settings, options, worker, channel, connection)
        send_blocking(channel, "ready", None)
    except OSError:  # the main frontend is gone
        return 1
    except Exception as error:
        if not isinstance(error, StartupError):
            log.error("the start failed", exc_info=error)
            error = StartupError(f"{type(error).__name__}: {error}"[:300])
        with suppress(OSError):
            send_blocking(channel, "failed", {"text": error.cause, "remedy": error.remedy})
        return 1
    try:
        status = run_loop(_serve(app, listener, llm, options, worker))
    finally:
        if tracer is not None:
            tracer.close()
        ended = close_engine(llm)
    return status if ended else 1


def _load_app(
    settings: Mapping[str, Any],
    options: ServeOptions,
    server_group: ServerGroup,
    control: socket.socket,
    connection: socket.socket,
) -> tuple[AsyncLLM, Any, RequestTracer | None]:
    """Connect to the engine that the main frontend started. Return it, the application for it, and the exporter of
    traces."""
    from quire.async_llm import AsyncLLM

    import_libraries()
    config = EngineConfig.of(**settings["config"])
    engine_client, prompts, checkpoint = join_engine_process(
        config, connection, lambda _: _wait_for_engine(connection, control)
    )
    llm = AsyncLLM.over(engine_client, prompts)
    if settings["template"] is not None:
        from quire.text.chat_template import ChatTemplate

        set_chat_template(prompts, ChatTemplate(settings["template"], {}))
    from quire.server.app import create_app

    model_names = options.served_model_name or (checkpoint.name,)
    tracer = make_tracer(options, model_names[0])
    app = create_app(
        llm,
        model_names,
        options,
        keys=settings["keys"],
        admin_keys=settings["admin_keys"],
        config=config,
        server_group=server_group,
        tracer=tracer,
    )
    freeze_loaded_objects()
    return llm, app, tracer


def _wait_for_engine(engine: socket.socket, control: socket.socket) -> None:
    """Wait until the engine sends data. Raise StartupError if the main frontend is gone first."""
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    poll.register(control, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    if all(number == control.fileno() for number, _ in poll.poll()):
        raise StartupError("the first frontend is gone")


async def _serve(
    app: Any, listener: socket.socket, llm: AsyncLLM, options: ServeOptions, worker: FrontendWorker
) -> int:
    """Serve from when the main frontend allows it until it ends the worker, or a part of the server is lost. Return the
    exit status."""
    from quire.server.shutdown import LoopErrorLogger, arm_exit_timer
    from quire.server.web_server import WebServer

    loop = asyncio.get_running_loop()
    LoopErrorLogger(loop)
    died = asyncio.Event()
    llm.set_death_callback(lambda: loop.call_soon_threadsafe(died.set))
    llm.engine_client.attach_event_loop()
    background = await worker.connect()
    ends = [asyncio.ensure_future(event.wait()) for event in (worker.drain_requested, died)]
    allowed = asyncio.ensure_future(worker.accept_requested.wait())
    try:
        await asyncio.wait([allowed, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not worker.accept_requested.is_set():
            return await _shut_down(llm, worker)
        server = WebServer(app, options, worker.accept_started.set, died.set, accept_slots=worker.accept_slots)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await asyncio.wait([serving, *ends], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises the reason why it could not start
        status = await _shut_down(llm, worker)
        server.should_exit = True
        await serving
        return status
    finally:
        for task in [allowed, *ends, *background]:
            task.cancel()
        arm_exit_timer(SHUTDOWN_MARGIN_SECONDS)


async def _shut_down(llm: AsyncLLM, worker: FrontendWorker) -> int:
    """Drain the requests, or answer for a moment with the reason why the engine or the server stopped. Return the exit
    status."""
    from quire.server.shutdown import arm_exit_timer

    if worker.drain_requested.is_set() and llm.error is None:
        arm_exit_timer(worker.drain_seconds + SHUTDOWN_MARGIN_SECONDS)
        if not await llm.drain(worker.drain_seconds):
            log.warning("requests that had not ended were aborted")
        await worker.wait_all_drained()
        if llm.error is None:
            return 0
    arm_exit_timer(DEATH_NOTICE_SECONDS + SHUTDOWN_MARGIN_SECONDS)
    worker.report_end(llm.heartbeat().why)
    await asyncio.sleep(DEATH_NOTICE_SECONDS)
    return 1


def main() -> None:
    """Run the worker. The arguments are the numbers of inherited descriptors."""
    ignore_signals()
    control, listener, connection = (socket.socket(fileno=int(number)) for number in sys.argv[1:4])
    exit_now(run(control, listener, connection, int(sys.argv[4])))
