"""A further front of a server, as a program. Its arguments CONTROL LISTENER ENGINE PLACES are numbers of inherited
descriptors. The first front says what it is to be, when it accepts and when it ends: quire.server.fronts.
"""

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
from quire.errors import FrontDead, Overloaded, StartupError
from quire.link.child import leave, spare_signals
from quire.link.collector import spare_the_loaded
from quire.link.process import ProcessLink, join
from quire.server.control import Control, hear, tell
from quire.server.fronts import BEAT, EXTRA_SECONDS, GATHER_SECONDS, MISSED
from quire.server.logs import MOST_DIGITS, set_log
from quire.server.peers import Peers
from quire.server.places import Places
from quire.server.run import (
    LAST_WORDS,
    MARGIN,
    ServeOptions,
    application,
    close,
    import_libraries,
    run_loop,
    use_template,
)
from quire.vocabulary.columns import WireError

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

log = logging.getLogger("quire.server")


class Member(Peers):
    """The whole server, as one of its further fronts sees it: through the first."""

    def __init__(self, count: int, started: int, connection: socket.socket) -> None:
        super().__init__(count, started)
        self.accept, self.accepting, self.stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.seconds = 0.0  # to drain in
        self._missed, self._why = 0, ""
        self._control = Control(connection, {
            "beat": self._beat, "counts": self._counts, "load": self._load, "accept": self._accept, "end": self._end,
            "died": self._died,
        })  # fmt: skip

    async def open(self) -> list[asyncio.Task[None]]:
        """Listen to the first front, in the tasks that are returned."""
        await self._control.open()
        return [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._look())]

    def why(self) -> str:
        """What the first front says of all, or that it says nothing."""
        return "the first front has not been heard of" if self._missed >= MISSED else self._why

    async def scrape(self) -> bytes:
        """The metrics of all fronts, which the first one adds up; those of the engine alone if it doesn't answer."""
        try:
            return str(await self._ask("scrape")).encode()
        except Overloaded:
            return self.metrics.engines()

    async def load(self) -> int:
        """Requests in the server. Overloaded if the first front doesn't answer."""
        return int(await self._ask("load"))

    async def drained(self) -> None:
        """This front is: wait until the others are too."""
        with suppress(TimeoutError, ConnectionError):
            await self._control.ask("drained", None, self.seconds + EXTRA_SECONDS)

    def over(self, why: str) -> None:
        """Say that this front ends, and why."""
        with suppress(ConnectionError):
            self._control.say("over", why)

    async def _ask(self, what: str) -> Any:
        try:
            return await self._control.ask(what, None, 3 * GATHER_SECONDS)
        except (TimeoutError, ConnectionError) as error:
            log.warning("the first front doesn't say what it knows of all (%s)", what)
            raise Overloaded("the first front of this server doesn't answer", 1) from error

    async def _watch(self) -> None:
        await self._control.serve()
        if self.llm.error is None:
            log.error("the first front is gone: the server ends")
            await self._died("the first front is gone")

    async def _look(self) -> None:
        """Silence is counted in looks, so that whoever was stopped itself blames nobody."""
        while True:
            self._missed += 1
            await asyncio.sleep(BEAT)

    # What the first front asks

    async def _beat(self, why: str) -> None:
        self._missed, self._why = 0, why
        health = self.llm.heartbeat()
        self._control.say("beat", "" if health.alive and not health.stalled else health.why)

    async def _counts(self, _: None) -> dict[str, Any]:
        return self.metrics.own().said()

    async def _load(self, _: None) -> int:
        return self.llm.active

    async def _accept(self, _: None) -> None:
        self.accept.set()
        await self.accepting.wait()

    async def _end(self, seconds: float) -> None:
        self.seconds = float(seconds)
        self.stop.set()

    async def _died(self, why: str) -> None:
        if self.llm.error is None:
            assert isinstance(self.llm.link, ProcessLink), "fronts share an engine's process"
            self.llm.link.give_up(FrontDead(why))


def options_of(said: Mapping[str, Any]) -> ServeOptions:
    """The options that JSON says."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    return ServeOptions(**fields)


def run(control: socket.socket, listener: socket.socket, connection: socket.socket, places: int) -> int:
    """Be the front that the first one describes. The exit status."""
    try:
        _, settings = hear(control)
    except (EOFError, OSError, WireError):
        return 1
    options = options_of(settings["options"])
    set_log(options, f"front {settings['number']}")
    sys.set_int_max_str_digits(MOST_DIGITS)
    peers = Member(settings["count"], settings["started"], control)
    peers.places = Places(places, peers.count, settings["number"], options.max_connections)
    try:
        llm, app = _load(settings, options, peers, control, connection)
        tell(control, "ready", None)
    except OSError:  # the first front is gone
        return 1
    except Exception as error:
        if not isinstance(error, StartupError):
            log.error("the start failed", exc_info=error)
            error = StartupError(f"{type(error).__name__}: {error}"[:300])
        with suppress(OSError):
            tell(control, "failed", {"text": error.cause, "remedy": error.remedy})
        return 1
    try:
        status = run_loop(_serve(app, listener, llm, options, peers))
    finally:
        ended = close(llm)
    return status if ended else 1


def _load(
    settings: Mapping[str, Any], options: ServeOptions, peers: Peers, control: socket.socket, connection: socket.socket
) -> tuple[AsyncLLM, Any]:
    """The engine that the first front started, and the application over it."""
    from quire.async_llm import AsyncLLM

    import_libraries()
    config = EngineConfig(**settings["config"])
    link, prompts, source = join(config, connection, lambda named: _until_built(connection, control))
    llm = AsyncLLM.over(link, prompts)
    if settings["template"] is not None:
        from quire.text.chat import ChatTemplate

        use_template(prompts, ChatTemplate(settings["template"], {}))
    keys, admin_keys = settings["keys"], settings["admin_keys"]
    app = application(llm, source.name, config, options, keys, admin_keys, peers)
    spare_the_loaded()
    return llm, app


def _until_built(engine: socket.socket, control: socket.socket) -> None:
    """Wait until the engine says something. StartupError when the first front leaves before."""
    poll = select.poll()
    poll.register(engine, select.POLLIN)
    poll.register(control, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    if all(number == control.fileno() for number, _ in poll.poll()):
        raise StartupError("the first front is gone")


async def _serve(app: Any, listener: socket.socket, llm: AsyncLLM, options: ServeOptions, peers: Member) -> int:
    """Accept once told to, until told to end, or a part of the server is lost. The exit status."""
    from quire.server.ending import LoopErrors, arm
    from quire.server.web import WebServer

    loop = asyncio.get_running_loop()
    LoopErrors(loop)
    died = asyncio.Event()
    llm.on_death = lambda: loop.call_soon_threadsafe(died.set)
    llm.link.attach()
    aside = await peers.open()
    ends = [asyncio.ensure_future(event.wait()) for event in (peers.stop, died)]
    told = asyncio.ensure_future(peers.accept.wait())
    try:
        await asyncio.wait([told, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not peers.accept.is_set():
            return await _end(llm, peers)
        server = WebServer(app, options, peers.accepting.set, died.set, places=peers.places)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await asyncio.wait([serving, *ends], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # why it could not start
        status = await _end(llm, peers)
        server.should_exit = True
        await serving
        return status
    finally:
        for task in [told, *ends, *aside]:
            task.cancel()
        arm(MARGIN)


async def _end(llm: AsyncLLM, peers: Member) -> int:
    """Let what runs end, or leave clients a moment to learn why it won't. The exit status."""
    from quire.server.ending import arm

    if peers.stop.is_set() and llm.error is None:
        arm(peers.seconds + MARGIN)
        if not await llm.drain(peers.seconds):
            log.warning("requests that had not ended were aborted")
        await peers.drained()
        if llm.error is None:
            return 0
    arm(LAST_WORDS + MARGIN)
    peers.over(llm.heartbeat().why)
    await asyncio.sleep(LAST_WORDS)
    return 1


def main() -> None:
    """The arguments are the numbers of inherited descriptors."""
    spare_signals()
    control, listener, connection = (socket.socket(fileno=int(number)) for number in sys.argv[1:4])
    leave(run(control, listener, connection, int(sys.argv[4])))
