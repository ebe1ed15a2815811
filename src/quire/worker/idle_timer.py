"""Measures how long a GPU waits for the host between two steps, with events on its stream."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class StepStart(NamedTuple):
    """The begin of a step whose launch started at `launched_at`; `starved` if the device had no work left then."""

    begin: torch.cuda.Event
    launched_at: float
    starved: bool


class StepEvents(NamedTuple):
    """The events of a step on the device."""

    previous_end: torch.cuda.Event | None  # of the step before, if that wasn't collected when this one was launched
    begin: torch.cuda.Event
    end: torch.cuda.Event
    launch_seconds: float  # for which the device had no other work

    def idle_seconds(self) -> float:
        """Return the seconds without work before the step and while it was launched. Call it once the step has run."""
        if self.previous_end is None:
            return 0.0
        gap: float = self.previous_end.elapsed_time(self.begin) / 1e3
        return gap + self.launch_seconds


class IdleTimer:
    """Records events around steps. Only the gap between steps that overlap in time counts: a device
    without requests is not waiting for the host."""

    def __init__(self, device: torch.device) -> None:
        self._enabled = device.type == "cuda"
        self._last_end: torch.cuda.Event | None = None
        self._in_flight = 0

    def start_step(self) -> StepStart | None:
        """Record the begin of a step, before it is launched."""
        if not self._enabled:
            return None
        starved = self._last_end is not None and self._in_flight > 0 and self._last_end.query()
        return StepStart(self._record_event(), time.perf_counter(), starved)

    def end_step(self, start: StepStart | None, replayed: bool) -> StepEvents | None:
        """Record the end of a launched step. An eager step computes during its launch, a `replayed` one after it."""
        if start is None:
            return None
        previous_end = self._last_end if self._in_flight else None
        self._last_end = end = self._record_event()
        self._in_flight += 1
        launch_seconds = time.perf_counter() - start.launched_at if start.starved and replayed else 0.0
        return StepEvents(previous_end, start.begin, end, launch_seconds)

    def collect(self, step_events: StepEvents | None) -> float:
        """Return how long the device waited for a step, in seconds, once it has run."""
        if step_events is None:
            return 0.0
        self._in_flight -= 1
        return step_events.idle_seconds() if step_events.begin.query() else 0.0

    @staticmethod
    def _record_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
