"""How busy a client is: what it reports of itself, so that nobody takes its own delays for the server's."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

BEAT = 0.01  # seconds between two looks at the clock
WINDOW = 0.5  # seconds over which the share of a core is taken


class Watch:
    """The lag of the event loop, looked at every BEAT seconds, and the process's CPU time by windows. `each` is called
    once a window, with the time."""

    def __init__(self, each: Callable[[float], None] = lambda now: None) -> None:
        self._each = each
        self._lags = array("d")
        self._shares = array("d")
        self._loop = asyncio.get_running_loop()
        self._began = self._window = time.monotonic()
        self._cpu = self._cpu_window = time.process_time()
        self._due = self._began + BEAT
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        self._lags.append(max(0.0, now - self._due))
        if now - self._window >= WINDOW:
            self._close_window(now)
            self._each(now)
        self._due = now + BEAT
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _close_window(self, now: float) -> None:
        cpu = time.process_time()
        self._shares.append((cpu - self._cpu_window) / (now - self._window))
        self._window, self._cpu_window = now, cpu

    def stop(self) -> dict[str, Any]:
        """What was seen: `cpu_s`, `seconds`, `busiest` (the greatest share of a core in a window), and the lag."""
        self._timer.cancel()
        now = time.monotonic()
        if now - self._window >= WINDOW / 2 or not self._shares:
            self._close_window(now)
        lags = sorted(self._lags) or [0.0]
        return {
            "cpu_s": time.process_time() - self._cpu,
            "seconds": now - self._began,
            "busiest": max(self._shares),
            "lag_p99_s": lags[(len(lags) - 1) * 99 // 100],
            "lag_max_s": lags[-1],
        }
