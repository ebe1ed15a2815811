"""What a front's routes ask of the whole server. Here a front is alone, and is the whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.accept_slots import AcceptSlots
    from quire.server.metrics import Metrics


class ServerGroup:
    """`num_frontends` fronts are one server, which has been there since `start_time`. They share `accept_slots` for "
    "connections."""

    def __init__(self, num_frontends: int = 1, start_time: int | None = None) -> None:
        self.num_frontends, self.start_time = num_frontends, int(time.time()) if start_time is None else start_time
        self.accept_slots: AcceptSlots | None = None
        self.llm: AsyncLLM
        self.metrics: Metrics

    def set_engine(self, llm: AsyncLLM, metrics: Metrics) -> None:
        """What this front itself has to say."""
        self.llm, self.metrics = llm, metrics

    def problem(self) -> str:
        """Why the server isn't well, as far as this front's engine doesn't say; "" if it is."""
        return ""

    async def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.render()

    async def load(self) -> int:
        """Requests in the server."""
        return self.llm.active
