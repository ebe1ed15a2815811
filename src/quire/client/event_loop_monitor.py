"""How busy a client is. Clients report this so that their own delays are not taken for the server's."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

SAMPLE_INTERVAL = 0.01  # seconds between two samples
WINDOW_SECONDS = 0.5  # seconds over which the share of a core is measured


class EventLoopMonitor:
    """Measures the lag of the event loop every SAMPLE_INTERVAL seconds, and the process's CPU time by windows.
    `on_window` is called after each window with the time."""

    def __init__(self, on_window: Callable[[float], None] = lambda now: None) -> None:
        self._on_window = on_window
        self._lags = array("d")
        self._cpu_shares = array("d")
        self._loop = asyncio.get_running_loop()
        self._began = self._window = time.monotonic()
        self._cpu = self._cpu_window = time.process_time()
        self._due = self._began + SAMPLE_INTERVAL
        self._timer = self._loop.call_later(SAMPLE_INTERVAL, self._sample)

    def _sample(self) -> None:
        now = time.monotonic()
        self._lags.append(max(0.0, now - self._due))
        if now - self._window >= WINDOW_SECONDS:
            self._close_window(now)
            self._on_window(now)
        self._due = now + SAMPLE_INTERVAL
        self._timer = self._loop.call_later(SAMPLE_INTERVAL, self._sample)

    def _close_window(self, now: float) -> None:
        cpu = time.process_time()
        self._cpu_shares.append((cpu - self._cpu_window) / (now - self._window))
        self._window, self._cpu_window = now, cpu

    def stop(self) -> dict[str, Any]:
        """Stop, and return `cpu_s`, `seconds`, `busiest` (the largest share of a core in a window), and the lag."""
        self._timer.cancel()
        now = time.monotonic()
        if now - self._window >= WINDOW_SECONDS / 2 or not self._cpu_shares:
            self._close_window(now)
        lags = sorted(self._lags) or [0.0]
        return {
            "cpu_s": time.process_time() - self._cpu,
            "seconds": now - self._began,
            "busiest": max(self._cpu_shares),
            "lag_p99_s": lags[(len(lags) - 1) * 99 // 100],
            "lag_max_s": lags[-1],
        }
