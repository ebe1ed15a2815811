"""The end of a server's process, also when something hangs: stacks in the log, and a last resort. Knows no requests."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
from typing import TYPE_CHECKING, Any

from quire.ipc.thread_stacks import format_thread_stacks
from quire.server.connections import LogThrottle

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

LAST_RESPONSES_SECONDS = 5  # seconds for what is answered already to be sent
STALL_CHECK_SECONDS = 0.5  # seconds between two looks at the engine's pulse
log = logging.getLogger("quire.server")


async def log_stalls(llm: AsyncLLM) -> None:
    """Say once, with all stacks, that the engine stalled, and that it moves on if it does."""
    stalled = False
    while True:
        await asyncio.sleep(STALL_CHECK_SECONDS)
        health = llm.heartbeat()
        if health.stalled and not stalled:
            log.error(
                "the engine stalled: %s (%d requests run); all threads:\n%s",
                health.why,
                llm.running,
                format_thread_stacks(),
            )
        elif stalled and not health.stalled:
            log.warning("the engine moves on")
        stalled = health.stalled


def arm_exit_timer(seconds: float) -> None:
    """Whatever happens, the process ends within `seconds`, with all stacks on stderr and status 1. It is no thread of
    Python's, so that it needs nothing that a hanging one may hold."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def cancel_exit_timer() -> None:
    """The process ends by itself."""
    faulthandler.cancel_dump_traceback_later()


class LoopErrorLogger:
    """An exception handler for an event loop: a traceback a second at the most, the others counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._quiet_until = loop, 0.0
        self._suppressed = LogThrottle("more errors in the event loop")
        loop.set_exception_handler(self)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, now = context.get("exception"), loop.time()
        if now < self._quiet_until:
            self._suppressed.count(f"{context['message']}: {error!r}"[:200])
            return
        self._quiet_until = now + 1
        self._suppressed.flush()
        log.error("%s", context["message"], exc_info=error)
