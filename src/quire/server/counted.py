"""What a front counts since its start: what its own requests came to. Fronts of one server add theirs up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.http_counts import SECONDS, Histogram, HttpCounts
from quire.vocabulary.columns import WireError

SOURCES = ("local_compute", "local_cache_hit")  # where prompt tokens came from
NUMBERS = ("invalid", "aborted", "rejected")


class Counted:
    """Counts of one front, or of several; `bounds` are those of its histograms by name. `seconds` are of processor
    time."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.histograms = {name: Histogram(of) for name, of in bounds.items()}
        self.finished: Counter[str] = Counter()
        self.sources = dict.fromkeys(SOURCES, 0)
        self.invalid = self.aborted = self.rejected = 0
        self.http = HttpCounts()
        self.seconds = 0.0

    def add(self, other: Counted) -> None:
        """Count what `other` counted too."""
        for name, histogram in other.histograms.items():
            self.histograms[name].add(histogram)
        self.finished.update(other.finished)
        for source, tokens in other.sources.items():
            self.sources[source] += tokens
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.http.requests.update(other.http.requests)
        for names, histogram in list(other.http.seconds.items()):
            self.http.seconds.setdefault(names, Histogram(SECONDS)).add(histogram)
        self.seconds += other.seconds

    def said(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "histograms": {name: [of.counts, of.total] for name, of in self.histograms.items()},
            "finished": dict(self.finished), "sources": self.sources, "seconds": self.seconds,
            "http": [[*names, count] for names, count in self.http.requests.items()],
            "http_seconds": [[*names, of.counts, of.total] for names, of in self.http.seconds.items()],
            **{name: getattr(self, name) for name in NUMBERS},
        }  # fmt: skip


def read_counted(said: Any, bounds: Mapping[str, Sequence[float]]) -> Counted:
    """The counts that JSON says. WireError for what are none."""
    counted = Counted(bounds)
    try:
        for name, [counts, total] in said["histograms"].items():
            _fill(counted.histograms[name], counts, total)
        counted.finished = Counter({str(why): _count(many) for why, many in said["finished"].items()})
        counted.sources = {source: _count(said["sources"][source]) for source in SOURCES}
        for name in NUMBERS:
            setattr(counted, name, _count(said[name]))
        counted.seconds = float(said["seconds"])
        for route, method, status, count in said["http"]:
            counted.http.requests[str(route), str(method), str(status)] = _count(count)
        for route, method, counts, total in said["http_seconds"]:
            _fill(counted.http.seconds.setdefault((str(route), str(method)), Histogram(SECONDS)), counts, total)
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
