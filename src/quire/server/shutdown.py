"""What a server's process logs of its state, and its end, even if something hangs: log stacks, and exit after a time
limit."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.ipc.thread_stacks import format_thread_stacks
from quire.server.connections import LogThrottle

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

LAST_RESPONSES_SECONDS = 5  # to send responses that are complete
STALL_CHECK_SECONDS = 0.5  # between two checks of the engine's heartbeat
log = logging.getLogger("quire.server")
STATUS_SECONDS = 10.0


async def log_stalls(llm: AsyncLLM) -> None:
    """Log, with all stacks, when the engine stalls, and when it moves on."""
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
    """End the process after `seconds`, with all stacks on stderr and status 1. The timer is not a Python thread, so a
    thread that hangs cannot block it."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def cancel_exit_timer() -> None:
    """Cancel the timer."""
    faulthandler.cancel_dump_traceback_later()


class LoopErrorLogger:
    """An exception handler of an event loop. It logs at most one traceback a second, and the number of other errors."""

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


async def log_status(llm: AsyncLLM) -> None:
    """Log a status line every 10 s, unless the server is idle."""
    before, at = _token_counts(llm), time.monotonic()
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            now, tokens = time.monotonic(), _token_counts(llm)
            if tokens != before or llm.active or llm.running or llm.queued:
                rates = [(new - old) / (now - at) for new, old in zip(tokens, before)]
                log.info("%s", status_line(llm, *rates))
            before, at = tokens, now


def _token_counts(llm: AsyncLLM) -> tuple[int, int]:
    """Return the number of prompt tokens and of output tokens since the start."""
    stats = llm.metrics.stats
    return stats.prompt_tokens, stats.generated_tokens


def status_line(llm: AsyncLLM, prompt_rate: float, output_rate: float) -> str:
    """Return the status line. The rates are in tokens per second."""
    usage, sharing, _ = llm.account
    preemptions = sum(llm.metrics.preempted.values())
    held = 100 * (usage.total - usage.free - usage.cached) / max(usage.total, 1)
    cached = 100 * usage.cached / max(usage.total, 1)
    line = (
        f"running {llm.running}, waiting {llm.queued}, prompt {prompt_rate:.0f} tok/s, output {output_rate:.0f} tok/s, "
        f"KV {held:.1f}% used and {cached:.1f}% cached"
    )
    if sharing.saved:
        line += f", {100 * sharing.saved / sharing.tables:.1f}% saved by sharing"
    if llm.swapped or sharing.host_pages_used:
        line += f", swapped {llm.swapped} in {sharing.host_pages_used} of {sharing.host_pages} host pages"
    if preemptions:
        line += f", preempted {preemptions} so far"
    stats = llm.metrics.stats
    if stats.num_drafts:
        line += f", accepted {stats.acceptance_rate:.0%} of drafts, {stats.mean_accepted_length:.2f} tokens each"
    if sharing.prefixes:
        line += f", {sharing.prefixes} prefixes of {sharing.prefix_tokens} tokens"
    return line
