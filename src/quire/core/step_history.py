"""Records of the last steps, for snapshots (quire.core.snapshot)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from quire.protocol.step_plan import StepPlan

MAX_STEPS = 32


class StepRecord(NamedTuple):
    """A collected step: its number, the tokens of its slices with several tokens (of prompts or recomputed), the number
    of its slices with one token, the requests that its planning swapped out or dropped for recomputation, and its
    milliseconds, without overlap with other steps."""

    number: int
    prefill_tokens: int
    decode_slices: int
    swapped: int
    recomputed: int
    ms: float


class StepHistory:
    """The last MAX_STEPS steps since its creation. `preempted`: the scheduler's counts of preemptions by mode."""

    def __init__(self, preempted: Mapping[str, int]) -> None:
        self._preempted = preempted
        self._last_preempted = dict(preempted)
        self._in_flight: dict[int, tuple[int, int, int, int]] = {}  # by step number; fields of StepRecord
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def record_plan(self, number: int, plan: StepPlan) -> None:
        """Record that step `number` was planned."""
        sizes = [len(row.tokens) for row in plan.slices]
        decodes, before, self._last_preempted = sizes.count(1), self._last_preempted, dict(self._preempted)
        swapped, recomputed = (self._last_preempted[mode] - before[mode] for mode in ("swap", "recompute"))
        self._in_flight[number] = sum(sizes) - decodes, decodes, swapped, recomputed

    def record_result(self, number: int, seconds: float) -> None:
        """Record that step `number` was collected and took `seconds`. Steps that were planned before this history
        began, or that a lost runner had in flight, are ignored."""
        entry = self._in_flight.get(number)
        self._in_flight = {later: one for later, one in self._in_flight.items() if later > number}
        if entry is not None:
            self.steps.append(StepRecord(number, *entry, round(seconds * 1000, 3)))
