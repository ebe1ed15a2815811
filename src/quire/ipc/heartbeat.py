"""The heartbeat of a loop on a thread of its own: other threads ask whether it is alive and makes progress."""

from __future__ import annotations

import time
from typing import NamedTuple

SILENCE_SECONDS = 2.0  # seconds without a frame from another process after which this is logged


class Health(NamedTuple):
    """Whether the engine is alive, and makes progress. `beat` is the monotonic time of its last iteration, in
    seconds."""

    alive: bool
    stalled: bool
    beat: float
    why: str


class Heartbeat:
    """The loop reports when it begins an iteration and when it is idle. An iteration longer than `stall_after` seconds
    is a stall."""

    def __init__(self, stall_after: float) -> None:
        self.stall_after = stall_after
        self._last_iteration, self._busy, self._step = time.monotonic(), False, 0

    def begin_iteration(self, step: int) -> None:
        """Note that an iteration begins, which runs step number `step`."""
        self._last_iteration, self._busy, self._step = time.monotonic(), True, step

    def mark_idle(self) -> None:
        """Note that the loop has nothing to do."""
        self._busy = False

    def health(self) -> Health:
        """Return the health of the loop, which is alive."""
        beat = self._last_iteration
        lasted = time.monotonic() - beat
        stalled = self._busy and lasted > self.stall_after
        return Health(True, stalled, beat, f"step {self._step} has lasted {lasted:.0f} s" if stalled else "")
