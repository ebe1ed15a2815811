"""Counters of HTTP requests by route, method and class of status, and histograms of their durations."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH")
PROBES = ("/health", "/ping", "/metrics", "/version", "/load")  # polled by monitoring, so not counted
DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts of values by upper bound. `observe` takes many equal values at once: most latencies of a step are
    equal."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """Add the counts of `other`, which has the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the buckets in Prometheus' format: (bound, count of values up to it)."""
        buckets, total = [], 0
        for bound, count in zip([*self.bounds, float("inf")], list(self.counts)):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


class HttpCounters:
    """The number of series is limited by the routes, methods and classes of status, whatever clients send."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by route, method and class of status, such as 2xx
        self.durations: dict[tuple[str, str], Histogram] = {}  # by route and method

    def add(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        if route not in PROBES:
            method = method if method in METHODS else "other"
            self.requests[route, method, f"{status // 100}xx"] += 1
            self.durations.setdefault((route, method), Histogram(DURATION_BOUNDS)).observe(seconds)


class CountHttpMiddleware:
    """ASGI middleware that counts requests. A request is counted before the last part of its response is sent, so a
    client that has read all of it finds it counted. The route is "none" for an unknown path or a request without a
    valid key."""

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
