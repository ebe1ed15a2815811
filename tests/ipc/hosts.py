"""A host whose turns are taken by hand, and what it told."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import BranchOutput
from quire.ipc.engine_loop import ClientLeft, EngineLoop
from quire.ipc.messages import ClientMessage, EngineMessage, Reply, StepOutputs


class Told:
    def __init__(self, built: Any, fronts: int = 1) -> None:
        self.messages: list[tuple[int, EngineMessage]] = []
        self.engine = built.engine
        self.host = EngineLoop(self.engine, self.tell, num_clients=fronts)

    def tell(self, front: int, message: EngineMessage) -> None:
        self.messages.append((front, message))

    def turns(self, *messages: tuple[int, ClientMessage | ClientLeft], most: int = 200) -> None:
        """One turn takes in all messages; then as many as there is work for."""
        for front, message in messages:
            self.host.enqueue(front, message)
        for _ in range(most):
            if not self.host._incoming and not self.engine.has_unfinished_requests:
                return  # it would rest
            self.host._run_once()

    def numbered(self, front: int = 0) -> list[tuple[int, BranchOutput]]:
        """All outputs, each with its request's number."""
        stepped = [message for at, message in self.messages if at == front and isinstance(message, StepOutputs)]
        return [pair for message in stepped for pair in message.outputs]

    def outputs(self, number: int) -> list[BranchOutput]:
        """Those of a request."""
        return [output for own, output in self.numbered() if own == number]

    def done(self, front: int = 0) -> list[int]:
        """The numbers of requests whose end was told."""
        return [number for number, output in self.numbered(front) if output.done]

    def answers(self) -> list[Reply]:
        return [message for _, message in self.messages if isinstance(message, Reply)]

    def empty(self) -> bool:
        """Whether nothing is left of any request."""
        left = self.host._requests_by_id, self.host._requests_by_number, self.engine.requests
        self.engine.scheduler.memory.check()
        return not any(left)
