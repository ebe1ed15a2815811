"""How long a GPU waited for the host between two steps, as events on its stream tell."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """A step on the device: the end of the step before, if that wasn't collected yet when this one was launched; its
    own begin and end; and the seconds that launching it took where the device had nothing else to do meanwhile."""

    before: torch.cuda.Event | None
    begin: torch.cuda.Event
    end: torch.cuda.Event
    launch: float

    def idle(self) -> float:
        """Seconds without work before the step, and until it was launched. Once the step has run."""
        return 0.0 if self.before is None else self.before.elapsed_time(self.begin) / 1e3 + self.launch


class Idle:
    """Marks steps as they are launched. Of steps that follow one another without a rest only: a device that has no
    requests waits for nobody."""

    def __init__(self, device: torch.device) -> None:
        self._marks = device.type == "cuda"
        self._last: torch.cuda.Event | None = None
        self._flying = 0

    def begin(self) -> tuple[torch.cuda.Event, float, bool] | None:
        """Before a step is launched."""
        if not self._marks:
            return None
        starved = self._last is not None and self._flying > 0 and self._last.query()
        return self._mark(), time.perf_counter(), starved

    def end(self, began: tuple[torch.cuda.Event, float, bool] | None, replayed: bool) -> Span | None:
        """Once it is. An eager step computes while it is launched, one that is `replayed` only then."""
        if began is None:
            return None
        begin, at, starved = began
        before = self._last if self._flying else None
        self._last = end = self._mark()
        self._flying += 1
        return Span(before, begin, end, time.perf_counter() - at if starved and replayed else 0.0)

    def collected(self, span: Span | None) -> float:
        """The step has run: how long the device waited for it."""
        if span is None:
            return 0.0
        self._flying -= 1
        return span.idle() if span.begin.query() else 0.0

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
