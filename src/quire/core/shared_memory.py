"""Engines that have one KV memory in common (Jenga §8), driven by one thread: who goes on when it is short.

An engine preempts its own requests only. One that has none left to preempt, and still finds no room, lets the others go
on instead, and comes back when something of theirs has ended: so two engines can't take each other's room for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import Overloaded
from quire.protocol.step_plan import TableWrite

if TYPE_CHECKING:
    from quire.core.engine import Engine


class SharedMemoryGroup:
    """The engines of a memory. `blocked` are those that found no room, and what had ended elsewhere then."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.blocked: dict[Engine, int] = {}

    def add(self, engine: Engine) -> None:
        """It has a part of the memory."""
        self.engines.append(engine)
        engine.shared_memory_group = self
        memory = engine.scheduler.memory
        engine.scheduler.memory_contended = lambda: any(
            type(entry) is not TableWrite for entry in getattr(memory, "page_ops", ())
        )

    def remove(self, engine: Engine) -> None:
        """It has none any more."""
        self.engines.remove(engine)
        self.blocked.pop(engine, None)

    def should_skip_step(self, engine: Engine) -> bool:
        """Whether the engine lets this step go by: it was short, and nothing has ended elsewhere. The others went on
        instead."""
        if (
            engine.scheduler.has_unfinished_requests
            and self.blocked.get(engine) == self._ended_elsewhere(engine)
            and self._step_others(engine)
        ):
            return True
        self.blocked.pop(engine, None)
        return False

    def yield_to_others(self, engine: Engine) -> None:
        """The engine found no room, with nothing in memory that it could preempt. The others go on; Overloaded if they
        can't, as they wait for their callers."""
        self.blocked[engine] = self._ended_elsewhere(engine)
        if not self._step_others(engine):
            self.blocked.pop(engine)
            raise Overloaded(
                "models that share the KV memory hold it, and wait for their callers: leave their sessions"
            )

    def _step_others(self, engine: Engine) -> bool:
        went = [
            other.step_for_others() for other in self.engines if other is not engine
        ]  # all of them, not up to the first
        return any(went)

    def _ended_elsewhere(self, engine: Engine) -> int:
        return sum(other.num_ended for other in self.engines if other is not engine)
