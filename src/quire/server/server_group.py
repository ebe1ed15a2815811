"""The whole server as the routes of one frontend see it. In this base class the frontend is the only one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.accept_slots import AcceptSlots
    from quire.server.metrics import Metrics


class ServerGroup:
    """The `num_frontends` frontends of one server, started at `start_time` (seconds since the epoch). They share
    `accept_slots` for connections."""

    def __init__(
        self, num_frontends: int = 1, start_time: int | None = None, accept_slots: AcceptSlots | None = None
    ) -> None:
        self.num_frontends, self.start_time = num_frontends, int(time.time()) if start_time is None else start_time
        self.accept_slots = accept_slots
        self.llm: AsyncLLM
        self.metrics: Metrics

    def set_engine(self, llm: AsyncLLM, metrics: Metrics) -> None:
        """Set this frontend's engine and metrics, which exist only after the model is loaded."""
        self.llm, self.metrics = llm, metrics

    def problem(self) -> str:
        """Return why the server is unhealthy, apart from this frontend's engine, or ""."""
        return ""

    async def scrape(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self.metrics.render()

    async def load(self) -> int:
        """Return the number of requests in the server."""
        return self.llm.active
