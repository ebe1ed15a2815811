"""A host whose turns are taken by hand, and what it told."""

from __future__ import annotations

from typing import Any

from quire.control.outcomes import Output
from quire.link.host import Host, Left
from quire.link.messages import Answer, FromEngine, FromFront, Stepped


class Told:
    def __init__(self, built: Any, fronts: int = 1) -> None:
        self.messages: list[tuple[int, FromEngine]] = []
        self.engine = built.engine
        self.host = Host(self.engine, self.tell)
        self.host.fronts = list(range(fronts))

    def tell(self, front: int, message: FromEngine) -> None:
        self.messages.append((front, message))

    def turns(self, *messages: tuple[int, FromFront | Left], most: int = 200) -> None:
        """One turn takes in all messages; then as many as there is work for."""
        for front, message in messages:
            self.host.send(front, message)
        for _ in range(most):
            if not self.host._sent and not self.engine.unfinished:
                return  # it would rest
            self.host._turn()

    def numbered(self, front: int = 0) -> list[tuple[int, Output]]:
        """All outputs, each with its request's number."""
        stepped = [message for at, message in self.messages if at == front and isinstance(message, Stepped)]
        return [pair for message in stepped for pair in message.outputs]

    def outputs(self, number: int) -> list[Output]:
        """Those of a request."""
        return [output for own, output in self.numbered() if own == number]

    def done(self, front: int = 0) -> list[int]:
        """The numbers of requests whose end was told."""
        return [number for number, output in self.numbered(front) if output.done]

    def answers(self) -> list[Answer]:
        return [message for _, message in self.messages if isinstance(message, Answer)]

    def empty(self) -> bool:
        """Whether nothing is left of any request."""
        left = self.host._owned, self.host._numbered, self.engine.requests
        self.engine.scheduler.memory.check()
        return not any(left)
