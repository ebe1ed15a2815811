"""What a front's routes ask of the whole server. Here a front is alone, and is the whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.metrics import Metrics
    from quire.server.places import Places


class Peers:
    """`count` fronts are one server, which has been there since `started`. They share `places` for connections."""

    def __init__(self, count: int = 1, started: int | None = None) -> None:
        self.count, self.started = count, int(time.time()) if started is None else started
        self.places: Places | None = None
        self.llm: AsyncLLM
        self.metrics: Metrics

    def join(self, llm: AsyncLLM, metrics: Metrics) -> None:
        """What this front itself has to say."""
        self.llm, self.metrics = llm, metrics

    def why(self) -> str:
        """Why the server isn't well, as far as this front's engine doesn't say; "" if it is."""
        return ""

    async def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.text()

    async def load(self) -> int:
        """Requests in the server."""
        return self.llm.active
