"""A virtual clock, which only advances on request. A call returns the time, as with the engine's clocks."""

from __future__ import annotations


class VirtualClock:
    """A time in seconds, which never decreases."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`."""
        assert seconds >= 0, f"{seconds} seconds can't pass"
        self.now += seconds

    def advance_to(self, time: float) -> None:
        """Advance to `time`, if it is later than now."""
        self.now = max(self.now, time)
