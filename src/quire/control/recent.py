"""What each of the last steps did, noted while somebody watches (control.scene). Knows neither runner nor memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from quire.vocabulary.plan import StepPlan

LAST = 32  # steps that are kept


class Step(NamedTuple):
    """A step that was collected: its number, the tokens of its rows that have several (of prompts, or computed again),
    its rows of one token, the requests that were swapped out or dropped to be recomputed as it was planned, and its
    milliseconds, overlap counted once."""

    number: int
    tokens: int
    rows: int
    swapped: int
    recomputed: int
    ms: float


class Recent:
    """The last steps, from now on. `preempted` are the scheduler's counts of requests by the way it was done."""

    def __init__(self, preempted: Mapping[str, int]) -> None:
        self._preempted = preempted
        self._before = dict(preempted)
        self._planned: dict[int, tuple[int, int, int, int]] = {}  # by number: those in flight, as in Step
        self.steps: deque[Step] = deque(maxlen=LAST)

    def planned(self, number: int, plan: StepPlan) -> None:
        """Step `number` was planned."""
        sizes = [len(row.tokens) for row in plan.rows]
        rows, before, self._before = sizes.count(1), self._before, dict(self._preempted)
        swapped, recomputed = (self._before[way] - before[way] for way in ("swap", "recompute"))
        self._planned[number] = sum(sizes) - rows, rows, swapped, recomputed

    def collected(self, number: int, seconds: float) -> None:
        """Step `number` was collected, and took so long. One that was planned before is passed over; so are those of a
        runner that was lost."""
        entry = self._planned.get(number)
        self._planned = {later: one for later, one in self._planned.items() if later > number}
        if entry is not None:
            self.steps.append(Step(number, *entry, round(seconds * 1000, 3)))
