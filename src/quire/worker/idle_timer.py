"""How long a GPU waited for the host between two steps, as events on its stream tell."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class StepEvents(NamedTuple):
    """A step on the device: the end of the step before, if that wasn't collected yet when this one was launched; its
    own begin and end; and the seconds that launching it took where the device had nothing else to do meanwhile."""

    previous_end: torch.cuda.Event | None
    begin: torch.cuda.Event
    end: torch.cuda.Event
    launch_seconds: float

    def idle_seconds(self) -> float:
        """Seconds without work before the step, and until it was launched. Once the step has run."""
        return (
            0.0 if self.previous_end is None else self.previous_end.elapsed_time(self.begin) / 1e3 + self.launch_seconds
        )


class IdleTimer:
    """Marks steps as they are launched. Of steps that follow one another without a rest only: a device that has no
    requests waits for nobody."""

    def __init__(self, device: torch.device) -> None:
        self._enabled = device.type == "cuda"
        self._last_end: torch.cuda.Event | None = None
        self._in_flight = 0

    def start_step(self) -> tuple[torch.cuda.Event, float, bool] | None:
        """Before a step is launched."""
        if not self._enabled:
            return None
        starved = self._last_end is not None and self._in_flight > 0 and self._last_end.query()
        return self._record_event(), time.perf_counter(), starved

    def end_step(self, start: tuple[torch.cuda.Event, float, bool] | None, replayed: bool) -> StepEvents | None:
        """Once it is. An eager step computes while it is launched, one that is `replayed` only then."""
        if start is None:
            return None
        begin, at, starved = start
        before = self._last_end if self._in_flight else None
        self._last_end = end = self._record_event()
        self._in_flight += 1
        return StepEvents(before, begin, end, time.perf_counter() - at if starved and replayed else 0.0)

    def collect(self, step_events: StepEvents | None) -> float:
        """The step has run: how long the device waited for it."""
        if step_events is None:
            return 0.0
        self._in_flight -= 1
        return step_events.idle_seconds() if step_events.begin.query() else 0.0

    @staticmethod
    def _record_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
