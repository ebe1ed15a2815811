"""The counters of one frontend since its start. The frontends of one server add theirs up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.protocol.columns import WireError
from quire.server.http_counters import DURATION_BOUNDS, Histogram, HttpCounters

PROMPT_SOURCES = ("local_compute", "local_cache_hit")  # prompt tokens were computed, or found in the cache
PLAIN_COUNTERS = ("invalid", "aborted", "rejected")


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
