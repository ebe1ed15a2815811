"""Read a server's /metrics before and after a run, and report the differences.

Names are quire's, under its own prefix or vLLM's, so that vLLM's server can be read too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from quire.bench.latency import draft_facts

PREFIXES = ("quire_", "vllm:")
LATENCIES = {
    "ttft_s": "time_to_first_token_seconds",
    "inter_token_s": "inter_token_latency_seconds",
    "queue_s": "request_queue_time_seconds",
}


class Scrape(NamedTuple):
    """Samples by name: their labels and values."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def of(cls, text: str) -> Scrape | None:
        """Return the samples of Prometheus's text format; None for other text."""
        samples = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples[sample.name].append((dict(sample.labels), sample.value))
        except (ValueError, KeyError, IndexError):
            return None
        return cls(dict(samples))

    def find(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples of `name` under the prefix that the server uses."""
        return next((self.samples[prefix + name] for prefix in PREFIXES if prefix + name in self.samples), [])

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return sums by the values of one label; samples without it are under ""."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.find(name):
            sums[labels.get(label, "")] += value
        return dict(sums)


def between(before: Scrape | None, after: Scrape | None, tokens: int, seconds: float) -> dict[str, Any] | None:
    """Return what the server counted between two scrapes in which a client got `tokens` tokens within `seconds`; None
    without metrics. Metrics that the server lacks are left out."""
    if before is None or after is None:
        return None
    facts: dict[str, Any] = {}
    for name, metric in LATENCIES.items():
        if (seen := histogram(before, after, metric)) is not None:
            facts[name] = seen
    generated = difference(before, after, "generation_tokens_total", "")
    if generated:
        facts["output_tokens"] = round(sum(generated.values()))
    cpu = difference(before, after, "process_cpu_seconds_total", "process")
    if cpu:
        facts["cpu_cores"] = {process: spent / seconds for process, spent in cpu.items()}
        facts["cpu_us_per_token"] = {process: 1e6 * spent / max(tokens, 1) for process, spent in cpu.items()}
    steps = sum(difference(before, after, "engine_steps_total", "").values())
    idle = difference(before, after, "engine_idle_seconds_total", "")
    if steps and idle:
        facts["steps"], facts["idle_ms_per_step"] = round(steps), 1000 * sum(idle.values()) / steps
    names = ("drafts", "draft_tokens", "accepted_tokens")
    counts = [difference(before, after, f"spec_decode_num_{name}_total", "") for name in names]
    facts |= draft_facts(*(round(sum(count.values())) for count in counts))
    return facts or None


class Watch:
    """Scrapes a server every given number of seconds, in a thread, while the context is open; without a number,
    never."""

    def __init__(self, scrape: Callable[[], Scrape | None], every: float | None) -> None:
        self._scrape, self._every, self._over = scrape, every, threading.Event()
        self._seen: list[Scrape] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        if self._every is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._every is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            if (seen := self._scrape()) is not None:
                self._seen.append(seen)

    def held(self) -> dict[str, Any] | None:
        """Return means over the scrapes: running and waiting requests, and bytes of KV memory by category, and by layer
        type and category. None without scrapes. Metrics that the server lacks are left out."""
        if not self._seen:
            return None
        facts: dict[str, Any] = {"samples": len(self._seen)}
        for name, metric in (("running", "num_requests_running"), ("waiting", "num_requests_waiting")):
            if means := list(self._means(metric)):
                facts[name] = sum(value for _, value in means)
        facts["bytes"] = {labels["category"]: value for labels, value in self._means("kv_bytes")}
        facts["layers"] = defaultdict(dict)
        for labels, value in self._means("kv_layer_bytes"):
            facts["layers"][labels["layer_type"]][labels["category"]] = value
        return {name: value for name, value in facts.items() if value != {}}

    def _means(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the mean of each sample of a metric, with its labels; a sample that a scrape lacks counts as 0."""
        sums: dict[tuple[tuple[str, str], ...], float] = defaultdict(float)
        for scrape in self._seen:
            for labels, value in scrape.find(name):
                sums[tuple(labels.items())] += value
        return ((dict(labels), total / len(self._seen)) for labels, total in sums.items())


def difference(before: Scrape, after: Scrape, name: str, label: str) -> dict[str, float]:
    """Return the growth of a counter by the values of a label. A restarted process counts from 0."""
    old = before.by(name, label)
    return {
        key: value - old.get(key, 0.0) if value >= old.get(key, 0.0) else value
        for key, value in after.by(name, label).items()
    }


def histogram(before: Scrape, after: Scrape, name: str) -> dict[str, float] | None:
    """Return `count`, `mean` and percentiles (interpolated within buckets) of a histogram between two scrapes; None if
    it is empty."""
    count = sum(difference(before, after, f"{name}_count", "").values())
    if count <= 0:
        return None
    total = sum(difference(before, after, f"{name}_sum", "").values())
    grown = difference(before, after, f"{name}_bucket", "le")
    buckets = sorted((float(bound), at_most) for bound, at_most in grown.items())
    points = {f"p{share}": quantile(buckets, share / 100) for share in (50, 90, 99)}
    return {"count": round(count), "mean": total / count, **dict(_known(points))}


def _known(points: dict[str, float | None]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in points.items() if value is not None)


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile of cumulative `buckets` (upper bound, count up to it), assuming an even spread within each
    bucket, as Prometheus's histogram_quantile does. Beyond the last finite bound it is that bound."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, at_most in buckets:
        if at_most >= rank and at_most > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (at_most - below)
        low, below = (low if bound == float("inf") else bound), at_most
    return low
