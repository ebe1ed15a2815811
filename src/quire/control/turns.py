"""Engines that have one KV memory in common (Jenga §8), driven by one thread: who goes on when it is short.

An engine preempts its own requests only. One that has none left to preempt, and still finds no room, lets the others go
on instead, and comes back when something of theirs has ended: so two engines can't take each other's room for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import Overloaded
from quire.vocabulary.plan import Table

if TYPE_CHECKING:
    from quire.control.engine import Engine


class Turns:
    """The engines of a memory. `short` are those that found no room, and what had ended elsewhere then."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.short: dict[Engine, int] = {}

    def add(self, engine: Engine) -> None:
        """It has a part of the memory."""
        self.engines.append(engine)
        engine.turns = self
        memory = engine.scheduler.memory
        engine.scheduler.pressing = lambda: any(type(entry) is not Table for entry in getattr(memory, "entries", ()))

    def leave(self, engine: Engine) -> None:
        """It has none any more."""
        self.engines.remove(engine)
        self.short.pop(engine, None)

    def passes(self, engine: Engine) -> bool:
        """Whether the engine lets this step go by: it was short, and nothing has ended elsewhere. The others went on
        instead."""
        if engine.scheduler.unfinished and self.short.get(engine) == self._ended(engine) and self._others(engine):
            return True
        self.short.pop(engine, None)
        return False

    def give_way(self, engine: Engine) -> None:
        """The engine found no room, with nothing in memory that it could preempt. The others go on; Overloaded if they
        can't, as they wait for their callers."""
        self.short[engine] = self._ended(engine)
        if not self._others(engine):
            self.short.pop(engine)
            raise Overloaded(
                "models that share the KV memory hold it, and wait for their callers: leave their sessions"
            )

    def _others(self, engine: Engine) -> bool:
        went = [other.ahead() for other in self.engines if other is not engine]  # all of them, not up to the first
        return any(went)

    def _ended(self, engine: Engine) -> int:
        return sum(other.ended for other in self.engines if other is not engine)
