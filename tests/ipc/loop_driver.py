"""An engine loop whose iterations a test runs one by one, and the messages that it sent."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import BranchOutput
from quire.ipc.engine_loop import ClientLeft, EngineLoop
from quire.ipc.messages import ClientMessage, EngineMessage, Reply, StepOutputs


class LoopDriver:
    """Runs the loop of an engine with `clients` clients, and keeps each message with its client."""

    def __init__(self, built: Any, clients: int = 1) -> None:
        self.messages: list[tuple[int, EngineMessage]] = []
        self.engine = built.engine
        self.loop = EngineLoop(self.engine, self.receive, num_clients=clients)

    def receive(self, client: int, message: EngineMessage) -> None:
        self.messages.append((client, message))

    def run(self, *messages: tuple[int, ClientMessage | ClientLeft], most: int = 200) -> None:
        """Run up to `most` iterations, as long as there is work. The first one handles all `messages`."""
        for client, message in messages:
            self.loop.enqueue(client, message)
        for _ in range(most):
            if not self.loop._incoming and not self.engine.has_unfinished_requests:
                return
            self.loop._run_once()

    def numbered(self, client: int = 0) -> list[tuple[int, BranchOutput]]:
        """Return all outputs for a client, each with its request's number."""
        steps = [message for at, message in self.messages if at == client and isinstance(message, StepOutputs)]
        return [pair for message in steps for pair in message.outputs]

    def outputs(self, number: int) -> list[BranchOutput]:
        """Return the outputs of a request."""
        return [output for own, output in self.numbered() if own == number]

    def done(self, client: int = 0) -> list[int]:
        """Return the numbers of the requests that have ended."""
        return [number for number, output in self.numbered(client) if output.done]

    def replies(self) -> list[Reply]:
        return [message for _, message in self.messages if isinstance(message, Reply)]

    def is_empty(self) -> bool:
        """Return True if no request is left anywhere."""
        left = self.loop._requests_by_id, self.loop._requests_by_number, self.engine.requests
        self.engine.scheduler.memory.check()
        return not any(left)
