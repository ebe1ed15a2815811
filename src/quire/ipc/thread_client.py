"""The client of an engine on a thread of this process: messages are passed as objects."""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.core.engine import Engine
from quire.errors import StartupError
from quire.ipc.engine_loop import FIRST_CLIENT, EngineLoop
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
    ClientMessage,
    EngineMessage,
    EngineMetrics,
    EngineReady,
    HandoverCounts,
    QueueSizes,
    StepOutputs,
    queue_sizes,
)


class ThreadEngineClient:
    """A connection to `engine`, which is built already. Its messages are received on the engine's thread."""

    is_in_process, handover_counts = True, HandoverCounts()

    def __init__(self, engine: Engine, ready: EngineReady, stall_after: float = 60.0) -> None:
        self.engine, self.ready = engine, ready
        self._metrics = ready.facts
        self._engine_loop = EngineLoop(engine, self._on_message, stall_after)
        # A daemon, so that a hanging thread does not block the end of the program; others are closed by then.
        self._thread = threading.Thread(target=self._engine_loop.run, name="quire-engine", daemon=True)
        self._receive: Callable[[EngineMessage], None]

    def start(self, receive: Callable[[EngineMessage], None]) -> None:
        """Start the engine's thread; its messages go to `receive`."""
        self._receive = receive
        self._thread.start()

    def attach_event_loop(self) -> None:
        """Do nothing: a thread needs no event loop."""

    def send(self, message: ClientMessage) -> bool:
        """Pass a message, from any thread. Return False if the engine takes no more."""
        return self._engine_loop.enqueue(FIRST_CLIENT, message)

    @property
    def queue_sizes(self) -> QueueSizes:
        """The current queue sizes."""
        return queue_sizes(self.engine)

    @property
    def metrics(self) -> EngineMetrics:
        """The current counters, with the latest memory usage."""
        preempted, asleep = self.engine.scheduler.preemption_counts, self.engine.sleep_controller.level
        return self._metrics._replace(stats=self.engine.stats, preempted=preempted, asleep=asleep)

    def forget(self, number: int) -> int:
        """Return 0, the index of the engine, which knows which requests have ended."""
        return 0

    @property
    def replicas(self) -> tuple[ThreadEngineClient]:
        """The client itself: there is one engine."""
        return (self,)

    def health(self) -> Health:
        """Return the health of the engine's loop."""
        return self._engine_loop.health() if self._thread.is_alive() else Health(False, False, 0.0, "closed")

    def start_replacement(self) -> ThreadEngineClient:
        """Raise StartupError: the engine's memory and device are this process's, so it can't be started again."""
        raise StartupError("an engine on a thread can't be started again", "Give it a process: --engine-process on")

    def cancel_replacement(self) -> None:
        """Do nothing: no replacement is ever started."""

    def close(self, timeout: float) -> bool:
        """End the thread and release the engine. Return True if the thread ended within `timeout` seconds; a thread
        that hangs in a step is left running."""
        self._engine_loop.close()
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _on_message(self, client_index: int, message: EngineMessage) -> None:
        if isinstance(message, StepOutputs) and message.facts is not None:
            self._metrics = message.facts
        self._receive(message)
