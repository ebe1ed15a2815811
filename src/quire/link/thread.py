"""The engine on a thread of the front's own process: messages are handed over as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.control.engine import Engine
from quire.control.memory import Account
from quire.errors import StartupError
from quire.link.host import FIRST, Host
from quire.link.messages import Facts, FromEngine, FromFront, Queues, Ready, Stepped, queues_of
from quire.link.pulse import Health


class ThreadLink:
    """A link to `engine`, which is there already. What it tells comes on the engine's thread."""

    inside = True

    def __init__(self, engine: Engine, ready: Ready, stall_after: float = 60.0) -> None:
        self.engine, self.ready = engine, ready
        self._account: Account = ready.facts.account
        self._mapped, self._ranks = ready.facts.mapped, ready.facts.ranks
        self._seconds = 0.0
        self._host = Host(engine, self._told, stall_after)
        # A daemon, so that one that hangs doesn't hold up the program's end; one that works is closed by then.
        self._thread = threading.Thread(target=self._host.run, name="quire-engine", daemon=True)
        self._receive: Callable[[FromEngine], None]

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """What the engine tells goes to `receive` from now on."""
        self._receive = receive
        self._thread.start()

    def attach(self) -> None:
        """Called on event loops before they wait for anything: there is a thread, which needs none."""

    def send(self, message: FromFront) -> bool:
        """Hand over a message, from any thread; False when the engine takes no more."""
        return self._host.send(FIRST, message)

    @property
    def queues(self) -> Queues:
        """As they are now."""
        return queues_of(self.engine)

    @property
    def facts(self) -> Facts:
        """As they are now, and the memory as it was lately."""
        scheduler = self.engine.scheduler
        mapped, ranks = self._mapped, self._ranks
        return Facts(self._account, self.engine.stats, scheduler.preempted, self._seconds, mapped, ranks,
                     self.engine.rest.level)  # fmt: skip

    def health(self) -> Health:
        """Whether the engine's loop turns."""
        return self._host.health() if self._thread.is_alive() else Health(False, False, 0.0, "closed")

    def again(self) -> ThreadLink:
        """Such an engine, started anew: its memory and its device are this process's, so there is none."""
        raise StartupError("an engine on a thread can't be started again", "Give it a process: --engine-process on")

    def abandon(self) -> None:
        """Nothing is under way."""

    def close(self, timeout: float) -> bool:
        """End the thread and release the engine. Returns whether the thread ended: one whose step still hangs after
        `timeout` seconds is left to itself."""
        self._host.close()
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _told(self, front: int, message: FromEngine) -> None:
        if isinstance(message, Stepped) and message.facts is not None:
            facts = message.facts
            self._account, self._seconds, self._mapped = facts.account, facts.seconds, facts.mapped
            self._ranks = facts.ranks
        self._receive(message)
