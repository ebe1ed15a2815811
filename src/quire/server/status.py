"""The status line: the server's load, in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

STATUS_SECONDS = 10.0
log = logging.getLogger("quire.server")


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
    if sharing.prefixes:
        line += f", {sharing.prefixes} prefixes of {sharing.prefix_tokens} tokens"
    return line
