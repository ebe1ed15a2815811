"""A rank without a model that returns constant tokens, which leaves the time to send a step and its result."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from quire.distributed.rank_queries import RANK_QUERIES
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import SliceResult, StepPlan, StepResult
from quire.startup import rank_program

ARRIVED = "arrived"
"""Token that requests the clock (CLOCK_MONOTONIC, the engine's too), in nanoseconds, at which the last command was
received."""
MOST = 1024  # rows
ONE = SliceResult((7,))


class StampedRunner:
    """Records the time at which a plan's slices have become arrays, as a model's inputs do: slots, positions and
    tokens. For an order to remove an image it is the time at which the order has been read."""

    depth, device, notices = 1, "", ()

    def __init__(self) -> None:
        self.arrived, self.inputs = 0, np.zeros((3, MOST), dtype=np.int64)
        self.flight: deque[int] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Accept the slices."""
        rows = SeqSlices.from_slices(plan.slices)
        self.inputs[:, : len(rows)] = rows.decode_columns
        self.arrived = time.monotonic_ns()
        self.flight.append(len(rows))

    def collect(self, ticket: None) -> StepResult:
        """Return a token for each row."""
        return StepResult((ONE,) * self.flight.popleft(), 0.0)

    def remove_image(self, key: bytes) -> None:
        """Process a command with almost no contents."""
        self.arrived = time.monotonic_ns()

    def close(self) -> None:
        """Do nothing: no resources are open."""


def main() -> None:
    """See quire.distributed.rank_worker."""
    RANK_QUERIES[ARRIVED] = lambda runner: runner.arrived
    rank_program.main(lambda hello: StampedRunner())
