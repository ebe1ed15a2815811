"""What each of the last steps did, noted while somebody watches (control.scene). Knows neither runner nor memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from quire.protocol.step_plan import StepPlan

MAX_STEPS = 32  # steps that are kept


class StepRecord(NamedTuple):
    """A step that was collected: its number, the tokens of its rows that have several (of prompts, or computed again),
    its rows of one token, the requests that were swapped out or dropped to be recomputed as it was planned, and its
    milliseconds, overlap counted once."""

    number: int
    prefill_tokens: int
    decode_slices: int
    swapped: int
    recomputed: int
    ms: float


class StepHistory:
    """The last steps, from now on. `preempted` are the scheduler's counts of requests by the way it was done."""

    def __init__(self, preempted: Mapping[str, int]) -> None:
        self._preempted = preempted
        self._last_preempted = dict(preempted)
        self._in_flight: dict[int, tuple[int, int, int, int]] = {}  # by number: those in flight, as in Step
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def record_plan(self, number: int, plan: StepPlan) -> None:
        """Step `number` was planned."""
        sizes = [len(row.tokens) for row in plan.slices]
        rows, before, self._last_preempted = sizes.count(1), self._last_preempted, dict(self._preempted)
        swapped, recomputed = (self._last_preempted[way] - before[way] for way in ("swap", "recompute"))
        self._in_flight[number] = sum(sizes) - rows, rows, swapped, recomputed

    def record_result(self, number: int, seconds: float) -> None:
        """Step `number` was collected, and took so long. One that was planned before is passed over; so are those of a
        runner that was lost."""
        entry = self._in_flight.get(number)
        self._in_flight = {later: one for later, one in self._in_flight.items() if later > number}
        if entry is not None:
            self.steps.append(StepRecord(number, *entry, round(seconds * 1000, 3)))
