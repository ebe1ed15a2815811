"""The counters of one frontend since its start. The frontends of one server add theirs up. HTTP requests are counted by
route, method and class of status, with histograms of their durations."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.protocol.columns import WireError

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH")
PROBES = ("/health", "/ping", "/metrics", "/version", "/load")  # polled by monitoring, so not counted
DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PROMPT_SOURCES = ("local_compute", "local_cache_hit")  # prompt tokens were computed, or found in the cache
PLAIN_COUNTERS = ("invalid", "aborted", "rejected")


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


class ServerCounters:
    """Counters of one frontend, or the sums of several. `bounds` maps the names of histograms to their upper bounds.
    `cpu_seconds` is processor time."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.histograms = {name: Histogram(of) for name, of in bounds.items()}
        self.finished: Counter[str] = Counter()
        self.prompt_sources = dict.fromkeys(PROMPT_SOURCES, 0)
        self.invalid = self.aborted = self.rejected = 0
        self.http = HttpCounters()
        self.cpu_seconds = 0.0

    def add(self, other: ServerCounters) -> None:
        """Add the counts of `other`."""
        for name, histogram in other.histograms.items():
            self.histograms[name].add(histogram)
        self.finished.update(other.finished)
        for source, tokens in other.prompt_sources.items():
            self.prompt_sources[source] += tokens
        for name in PLAIN_COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.http.requests.update(other.http.requests)
        for names, histogram in list(other.http.durations.items()):
            self.http.durations.setdefault(names, Histogram(DURATION_BOUNDS)).add(histogram)
        self.cpu_seconds += other.cpu_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON value."""
        return {
            "histograms": {name: [of.counts, of.total] for name, of in self.histograms.items()},
            "finished": dict(self.finished), "sources": self.prompt_sources, "seconds": self.cpu_seconds,
            "http": [[*names, count] for names, count in self.http.requests.items()],
            "http_seconds": [[*names, of.counts, of.total] for names, of in self.http.durations.items()],
            **{name: getattr(self, name) for name in PLAIN_COUNTERS},
        }  # fmt: skip


def read_counters(data: Any, bounds: Mapping[str, Sequence[float]]) -> ServerCounters:
    """Return the counts that to_json wrote. Raise WireError if `data` is invalid."""
    counted = ServerCounters(bounds)
    try:
        for name, [counts, total] in data["histograms"].items():
            _fill(counted.histograms[name], counts, total)
        counted.finished = Counter({str(why): _count(many) for why, many in data["finished"].items()})
        counted.prompt_sources = {source: _count(data["sources"][source]) for source in PROMPT_SOURCES}
        for name in PLAIN_COUNTERS:
            setattr(counted, name, _count(data[name]))
        counted.cpu_seconds = float(data["seconds"])
        for route, method, status, count in data["http"]:
            counted.http.requests[str(route), str(method), str(status)] = _count(count)
        for route, method, counts, total in data["http_seconds"]:
            _fill(
                counted.http.durations.setdefault((str(route), str(method)), Histogram(DURATION_BOUNDS)), counts, total
            )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WireError("counts", f"{type(error).__name__} {error}"[:200]) from error
    return counted


def _fill(histogram: Histogram, counts: Any, total: Any) -> None:
    if len(counts) != len(histogram.counts):
        raise ValueError(f"{len(counts)} counts for {len(histogram.counts)} buckets")
    histogram.counts, histogram.total = list(map(_count, counts)), float(total)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is no count")
    return value
