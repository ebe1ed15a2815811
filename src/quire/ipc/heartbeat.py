"""The pulse of a loop on a thread of its own: whether it is alive and turns, as other threads ask."""

from __future__ import annotations

import time
from typing import NamedTuple

SILENCE_SECONDS = 2.0  # seconds without a word from another process, which are said in the log then


class Health(NamedTuple):
    """Is the engine alive, and making progress? `beat` is the monotonic time of its last turn."""

    alive: bool
    stalled: bool
    beat: float
    why: str


class Heartbeat:
    """The loop says when it begins a turn and when it rests. A turn longer than `stall_after` seconds is a stall."""

    def __init__(self, stall_after: float) -> None:
        self.stall_after = stall_after
        self._last_iteration, self._busy, self._step = time.monotonic(), False, 0

    def begin_iteration(self, step: int) -> None:
        """A turn begins, which takes in what waits and computes the step of that number."""
        self._last_iteration, self._busy, self._step = time.monotonic(), True, step

    def mark_idle(self) -> None:
        """There is nothing to do."""
        self._busy = False

    def health(self, death: str) -> Health:
        """How the loop is; `death` says why it ended, if it did."""
        lasted, beat = time.monotonic() - self._last_iteration, self._last_iteration
        stalled = not death and self._busy and lasted > self.stall_after
        return Health(not death, stalled, beat, f"step {self._step} has lasted {lasted:.0f} s" if stalled else death)
