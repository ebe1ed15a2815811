"""HTTP requests by route, method and kind of status, and how long they took: counted around the routes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH")
PROBES = ("/health", "/ping", "/metrics", "/version", "/load")  # asked again and again by machines: not counted
DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts by upper bound. Takes many equal values at once, which one step's latencies mostly are."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`value` was seen `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """All that `other`, of the same bounds, has seen was seen."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets."""
        rows, seen = [], 0
        for bound, count in zip([*self.bounds, float("inf")], list(self.counts)):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return rows


class HttpCounters:
    """As many series as there are routes, methods and kinds of status, whatever clients send."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by route, method, status as 2xx
        self.durations: dict[tuple[str, str], Histogram] = {}  # by route and method

    def add(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered."""
        if route not in PROBES:
            method = method if method in METHODS else "other"
            self.requests[route, method, f"{status // 100}xx"] += 1
            self.durations.setdefault((route, method), Histogram(DURATION_BOUNDS)).observe(seconds)


class CountHttpMiddleware:
    """ASGI that counts what passes through it, before the last of an answer leaves: whoever has read it whole finds it
    counted. `none` stands for a path without a route, or that no key opened."""

    def __init__(self, app: ASGIApp, counters: HttpCounters) -> None:
        self.app, self.counters = app, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, counted = time.perf_counter(), 500, False

        def count() -> None:
            nonlocal counted
            if not counted:
                route = getattr(scope.get("route"), "path", "none")
                self.counters.add(route, scope["method"], status, time.perf_counter() - began)
            counted = True

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                count()
            await send(message)

        try:
            await self.app(scope, receive, seen)
        finally:
            count()  # one that failed, or whose client left, has no last part
