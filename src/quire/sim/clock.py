"""A virtual clock: time passes when it is told to. Called, it says the time, as the engine's clocks do."""

from __future__ import annotations


class VirtualClock:
    """Seconds from `now`; never backwards."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        assert seconds >= 0, f"{seconds} seconds can't pass"
        self.now += seconds

    def advance_to(self, time: float) -> None:
        """Let time pass until `time`, if that is still to come."""
        self.now = max(self.now, time)
