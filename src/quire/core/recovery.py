"""Restarting a lost runner: a new runner over an empty memory of the same shape. Every sequence is then computed again,
as after a preemption by recomputation (PagedAttention §4.5). Samples depend on seeds and positions alone, so tokens
that were lost in flight are sampled again with the same result.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from quire.core.runner import Runner
from quire.errors import EngineDead, StartupError
from quire.memory.interface import KVMemory

MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # restarts within this many seconds
log = logging.getLogger("quire")

RunnerFactory = Callable[[], tuple[Runner, KVMemory]]


class RunnerRestarter:
    """Starts runners with `make_runner`, each with a memory that it is bound to: at most `max_restarts` times within
    `window` seconds, failed starts included. `status` says why no steps run while a runner starts; any thread may read
    it."""

    def __init__(
        self,
        make_runner: RunnerFactory,
        max_restarts: int = MAX_RESTARTS,
        window: float = RESTART_WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.make_runner, self.max_restarts, self.window, self.clock = make_runner, max_restarts, window, clock
        self.num_restarts, self.status = 0, ""
        self._recent_failures = deque[tuple[float, str]]()  # times and causes

    def restart(self, lost: EngineDead) -> tuple[Runner, KVMemory]:
        """Return a new runner and its memory. Raise EngineDead, with this cause and the first one in the window, if
        there were too many restarts."""
        cause = str(lost)
        try:
            while True:
                self._record(cause, lost)
                self.status = f"{cause}; ranks are started anew"
                log.error(
                    "%s (%d of %d within %g s)", self.status, len(self._recent_failures), self.max_restarts, self.window
                )
                try:
                    return self.make_runner()
                except (EngineDead, StartupError) as error:
                    cause = str(error)
        finally:
            self.status = ""

    def _record(self, cause: str, lost: EngineDead) -> None:
        now = self.clock()
        while self._recent_failures and self._recent_failures[0][0] <= now - self.window:
            self._recent_failures.popleft()
        if len(self._recent_failures) >= self.max_restarts:
            first = self._recent_failures[0][1]
            times = f"ranks were started anew {len(self._recent_failures)} times within {self.window:g} s"
            raise EngineDead(f"{cause}; {times}, first as {first}") from lost
        self._recent_failures.append((now, cause))
        self.num_restarts += 1
