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

from quire.errors import FrontDead, StartupError
from quire.link.child import Child, program_of
from quire.link.process import ProcessLink
from quire.server.control import Control, hear, tell
from quire.server.counted import Counted, read_counted
from quire.server.peers import Peers
from quire.server.places import Places, shared_file
from quire.vocabulary.columns import WireError

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.server.run import ServeOptions

PROGRAM = program_of("quire.server.front")
START_SECONDS = 120.0  # for a front to be ready once the engine is
GATHER_SECONDS = 1.0  # for the fronts' answers to a scrape
BEAT = 0.5  # seconds between two signs of life that fronts give each other
MISSED = 4  # of these in a row, and a front isn't well
EXTRA_SECONDS = 10.0  # beside draining, for fronts to end
KILL_SECONDS = 3.0
log = logging.getLogger("quire.server")


class Other:
    """A further front: its process, and what is known of it."""

    def __init__(self, number: int, child: Child) -> None:
        self.name, self.child = f"front {number}", child
        self.connection = child.connections[0]
        self.control: Control
        self.counted: Counted | None = None  # as it said last
        self.active = 0
        self.unanswered, self.why = 0, ""
        self.mute = False  # it was said that it doesn't answer
        self.drained = asyncio.Event()

    def ready(self, end: float) -> None:
        """Wait until it says that it is, which is by `end` of the monotonic clock. StartupError if it can't be."""
        self.connection.settimeout(max(end - time.monotonic(), 0.1))
        try:
            what, value = hear(self.connection)
        except TimeoutError as error:
            raise StartupError(f"{self.name} was not ready within {START_SECONDS:g} s") from error
        except (EOFError, OSError, WireError) as error:
            remedy = "What it wrote to the log says why; SIGKILL ends those that take too much memory, say"
            raise StartupError(f"{self.name} {self.child.status(5.0)} at start", remedy) from error
        if what != "ready":
            text, remedy = (str(value.get(name, "")) for name in ("text", "remedy"))
            raise StartupError(f"{self.name} can't start: {text}", remedy)


class Fronts(Peers):
    """`count` fronts on `listener`, of which this process is the first; `settings` are what the others are told. `most`
    connections may be open in all of them."""

    def __init__(self, count: int, listener: socket.socket, settings: dict[str, Any], most: int | None = None) -> None:
        super().__init__(count)
        self._listener, self._settings = listener, {**settings, "count": count, "started": self.started}
        self._file = shared_file(count) if count > 1 else None
        self.places = Places(self._file, count, 0, most) if self._file is not None else None
        self.others: list[Other] = []
        self._ending = False
        self._all_drained = asyncio.Event()
        self._gathering: asyncio.Task[bytes] | None = None  # under way
        self._next: asyncio.Task[bytes] | None = None  # who asks now is answered by this one
        self._tasks: list[asyncio.Task[None]] = []

    # Before there is an event loop

    def start(self, engine: Child) -> None:
        """Start the others, each over a connection of its own to the engine. StartupError if there is no process."""
        connections, file = engine.connections[1:], self._file
        if file is None:
            return
        del engine.connections[1:]
        try:
            for number, connection in enumerate(connections, 1):
                inherited = (self._listener.fileno(), connection.fileno(), file)
                other = Other(number, Child(1, PROGRAM, f"front {number}", inherited))
                self.others.append(other)
                with suppress(OSError):  # it is gone: `wait` says so
                    tell(other.connection, "settings", {**self._settings, "number": number})
        finally:
            for connection in connections:
                connection.close()

    def wait(self, llm: AsyncLLM) -> None:
        """Wait until all are ready to accept. StartupError with the reason of one that can't be; the engine is closed
        then."""
        end = time.monotonic() + START_SECONDS
        try:
            for other in self.others:
                other.ready(end)
        except BaseException:
            llm.close()
            raise

    def close(self) -> None:
        """End them: those that are left in a few seconds are killed."""
        for other in self.others:
            other.connection.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        end = time.monotonic() + KILL_SECONDS
        for other in self.others:
            other.child.end(max(end - time.monotonic(), 0.0))

    # On the event loop

    async def open(self) -> None:
        """Listen to the others, and tell them that this one is there."""
        for other in self.others:
            other.control = Control(other.connection, self._handlers(other))
            await other.control.open()
            self._tasks.append(asyncio.ensure_future(self._watch(other)))
        if self.others:
            self._tasks.append(asyncio.ensure_future(self._beat()))

    async def accept(self) -> None:
        """Have the others accept connections. Returns once they do, or one of them is lost."""
        asked = (other.control.ask("accept", None, START_SECONDS) for other in self.others)
        for other, answer in zip(self.others, await asyncio.gather(*asked, return_exceptions=True)):
            if isinstance(answer, TimeoutError):
                self._lost(f"{other.name} was not accepting within {START_SECONDS:g} s")

    def end(self, seconds: float) -> None:
        """Have the others drain within so many seconds."""
        self._ending = True
        self._tell("end", seconds)

    async def ended(self, seconds: float) -> bool:
        """This front is drained: wait until the others are too, and have ended. Whether all of them ended well, within
        so many seconds; those that didn't are named and killed."""
        end = time.monotonic() + seconds + EXTRA_SECONDS
        drained = end - EXTRA_SECONDS / 2  # one that hangs must not keep the others from ending by themselves
        await _until(lambda: all(other.drained.is_set() or other.child.ended() for other in self.others), drained)
        self._all_drained.set()
        await _until(lambda: all(other.child.ended() for other in self.others), end)
        for other in self.others:
            if not other.child.ended():
                log.error("%s doesn't end and is killed", other.name)
                other.child.end(0.0)
            elif other.child.process.returncode:
                log.error("%s %s", other.name, other.child.status())
        return all(other.child.process.returncode == 0 for other in self.others)

    def why(self) -> str:
        """Which front isn't well."""
        for other in self.others:
            if other.unanswered >= MISSED:
                return f"{other.name} has not been heard of for {other.unanswered * BEAT:g} s"
            if other.why:
                return f"{other.name}: {other.why}"
        return ""

    async def load(self) -> int:
        """Requests in the server."""
        await asyncio.gather(*(self._ask_load(other) for other in self.others))
        return self.llm.active + sum(other.active for other in self.others)

    async def scrape(self) -> bytes:
        """The metrics of all fronts. Who asks while others are being answered shares the next answer."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._gather(self._gathering))
        return await asyncio.shield(self._next)

    async def _gather(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        self._gathering, self._next = self._next, None
        await asyncio.gather(*(self._ask_counts(other) for other in self.others))
        self.metrics.others = self._counted
        return self.metrics.text()

    def _counted(self) -> Iterable[Counted]:
        return [other.counted for other in self.others if other.counted is not None]

    async def _ask_counts(self, other: Other) -> None:
        """Learn what a front counted; what it said last stands if it doesn't answer."""
        from quire.server.metrics import BOUNDS

        with suppress(TimeoutError, ConnectionError):
            other.counted = read_counted(await other.control.ask("counts", None, GATHER_SECONDS), BOUNDS)
            other.mute = False
            return
        if not other.mute:
            log.warning("%s doesn't say what it counted: what it said last is shown", other.name)
        other.mute = True

    async def _ask_load(self, other: Other) -> None:
        with suppress(TimeoutError, ConnectionError):
            other.active = int(await other.control.ask("load", None, GATHER_SECONDS))

    def _handlers(self, other: Other) -> dict[str, Any]:
        """What the others ask."""

        async def beat(why: str) -> None:
            other.unanswered, other.why = 0, why

        async def scrape(_: None) -> str:
            return (await self.scrape()).decode()

        async def load(_: None) -> int:
            return await self.load()

        async def drained(_: None) -> None:
            other.drained.set()
            await self._all_drained.wait()

        async def over(why: str) -> None:  # if it was the engine's end, this front is about to see it too
            await asyncio.sleep(BEAT)
            self._lost(f"{other.name} ends: {why}")

        return {"beat": beat, "scrape": scrape, "load": load, "drained": drained, "over": over}

    async def _watch(self, other: Other) -> None:
        await other.control.serve()
        if not self._ending:
            self._lost(f"{other.name} {other.child.status()}")

    def _lost(self, why: str) -> None:
        """Without one of its fronts the server ends."""
        if self.llm.error is None:
            log.error("%s: the server ends", why)
            self._tell("died", why)
            assert isinstance(self.llm.link, ProcessLink), "fronts share an engine's process"
            self.llm.link.give_up(FrontDead(why))

    async def _beat(self) -> None:
        while True:
            self._tell("beat", self.why())
            for other in self.others:
                other.unanswered += 1
            await asyncio.sleep(BEAT)

    def _tell(self, what: str, value: Any) -> None:
        for other in self.others:
            with suppress(ConnectionError):
                other.control.say(what, value)


async def _until(so: Callable[[], bool], end: float) -> None:
    """Wait until it is so, or until `end` of the monotonic clock."""
    while not so() and time.monotonic() < end:
        await asyncio.sleep(0.02)


def settings_of(
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
