"""Engines that share one KV memory (Jenga §8), driven by one thread: which engine steps when memory is short.

An engine preempts its own requests only. If it has none left to preempt and still can't allocate, it lets the others
step instead, and goes on once a request of theirs has ended. So two engines can't preempt each other forever.
"""

from __future__ import annotations

from typing import Protocol

from quire.core.scheduler import Scheduler
from quire.errors import Overloaded


class SharedMemoryEngine(Protocol):
    """The part of an engine that SharedMemoryGroup uses."""

    scheduler: Scheduler
    num_ended: int  # requests ended since the start

    def step_for_others(self) -> bool:
        """Run a step. Return False if there was nothing to do."""
        ...


class SharedMemoryGroup:
    """The engines of a memory. `blocked`: the engines that could not allocate, each with the number of requests that
    had ended in the other engines by then."""

    def __init__(self) -> None:
        self.engines: list[SharedMemoryEngine] = []
        self.blocked: dict[SharedMemoryEngine, int] = {}

    def add(self, engine: SharedMemoryEngine) -> None:
        """Add an engine; it calls this itself."""
        self.engines.append(engine)

    def remove(self, engine: SharedMemoryEngine) -> None:
        """Remove an engine that is closed."""
        self.engines.remove(engine)
        self.blocked.pop(engine, None)

    def should_skip_step(self, engine: SharedMemoryEngine) -> bool:
        """Return True if `engine` is blocked and no request has ended elsewhere since; the others have stepped then."""
        if (
            engine.scheduler.has_unfinished_requests
            and self.blocked.get(engine) == self._ended_elsewhere(engine)
            and self._step_others(engine)
        ):
            return True
        self.blocked.pop(engine, None)
        return False

    def yield_to_others(self, engine: SharedMemoryEngine) -> None:
        """Block `engine`, which can't allocate and has nothing in memory to preempt, and step the others. Raise
        Overloaded if they can't, as they wait for their callers."""
        self.blocked[engine] = self._ended_elsewhere(engine)
        if not self._step_others(engine):
            self.blocked.pop(engine)
            raise Overloaded(
                "models that share the KV memory hold it, and wait for their callers: leave their sessions"
            )

    def _step_others(self, engine: SharedMemoryEngine) -> bool:
        stepped = [other.step_for_others() for other in self.engines if other is not engine]  # all, so not in any()
        return any(stepped)

    def _ended_elsewhere(self, engine: SharedMemoryEngine) -> int:
        return sum(other.num_ended for other in self.engines if other is not engine)
