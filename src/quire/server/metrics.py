"""Prometheus metrics with vLLM's names under quire_. Engine facts are read at scrape time; only latencies are counted
as they happen, a step at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.async_llm import AsyncLLM
from quire.control.outcomes import Output
from quire.control.request import Request

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SHORT),
    "inter_token_latency_seconds": ("Between two tokens of a sequence", SHORT),
    "request_time_per_output_token_seconds": ("A request's mean time per token after its first", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", LONG),
    "request_queue_time_seconds": ("From arrival to the first step", LONG),
    "request_prefill_time_seconds": ("From the first step to the first token", LONG),
    "request_decode_time_seconds": ("From the first token to the end", LONG),
    "request_inference_time_seconds": ("From the first step to the end", LONG),
    "iteration_tokens_total": ("Prompt and output tokens computed in a step", COUNTS),
    "request_prompt_tokens": ("Prompt tokens of a request", COUNTS),
    "request_generation_tokens": ("Output tokens of a request", COUNTS),
    "request_params_n": ("n of a request", (1, 2, 5, 10, 20, 50, 100)),
    "request_params_max_tokens": ("Tokens that a request may generate", COUNTS),
}


class Histogram:
    """Counts by upper bound. Takes many equal values at once, which one step's latencies mostly are."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`value` was seen `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets."""
        rows, seen = [], 0
        for bound, count in zip([*self.bounds, float("inf")], list(self.counts)):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return rows


class Metrics:
    """An Observer of an AsyncLLM (attach one with `watch`), and the collector of its own registry."""

    def __init__(self) -> None:
        self.llm: AsyncLLM | None = None
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter()
        self.invalid = 0
        self._last: dict[tuple[str, int], float] = {}
        self._generated: Counter[str] = Counter()
        self._tokens = 0
        self.registry = CollectorRegistry()

    def watch(self, llm: AsyncLLM) -> None:
        """Observe `llm` from now on."""
        self.llm, llm.observer = llm, self
        self.registry.register(self)

    # As it happens, on the engine's thread

    def stepped(self, outputs: Sequence[tuple[Output, Request]], now: float) -> None:
        """Take in a step's outputs."""
        gaps: Counter[float] = Counter()
        for output, request in outputs:
            key = (request.id, output.branch)
            if output.tokens:
                if key in self._last:
                    gaps[now - self._last[key]] += 1
                elif output.branch == 0 and request.first_token is not None:
                    self._observe("time_to_first_token_seconds", request.first_token - request.arrival)
                self._last[key] = now
                self._generated[request.id] += len(output.tokens)
            if output.finish_reason is not None:
                self._last.pop(key, None)
            if output.done:
                self._ended(output, request, now)
        for gap, times in gaps.items():
            self._observe("inter_token_latency_seconds", gap, times)
        assert self.llm is not None, "observed before watching"
        tokens = self.llm.engine.stats.computed_tokens
        if tokens > self._tokens:
            self._observe("iteration_tokens_total", tokens - self._tokens)
            self._tokens = tokens

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def _ended(self, output: Output, request: Request, now: float) -> None:
        self.finished[output.finish_reason or ""] += 1
        tokens = self._generated.pop(request.id, 0)
        self._observe("e2e_request_latency_seconds", now - request.arrival)
        self._observe("request_prompt_tokens", request.prompt_len)
        self._observe("request_generation_tokens", tokens)
        self._observe("request_params_n", request.params.n)
        self._observe("request_params_max_tokens", request.max_tokens)
        if request.scheduled is None:
            return
        self._observe("request_queue_time_seconds", request.scheduled - request.arrival)
        self._observe("request_inference_time_seconds", now - request.scheduled)
        if request.first_token is not None:
            decode = now - request.first_token
            self._observe("request_prefill_time_seconds", request.first_token - request.scheduled)
            self._observe("request_decode_time_seconds", decode)
            if tokens > 1:
                self._observe("request_time_per_output_token_seconds", decode / (tokens - 1))

    # At scrape time, on any thread

    def collect(self) -> Iterator[Metric]:
        """All families."""
        assert self.llm is not None, "scraped before watching"
        yield from self._gauges(self.llm)
        yield from self._counters(self.llm)
        for name, (text, _) in HISTOGRAMS.items():
            histogram = self.histograms[name]
            yield HistogramMetricFamily(f"quire_{name}", text, histogram.cumulative(), histogram.total)

    def _gauges(self, llm: AsyncLLM) -> Iterator[Metric]:
        usage, sharing = llm.account
        held = usage.total - usage.free - usage.cached
        yield GaugeMetricFamily("quire_num_requests_running", "Requests in memory", llm.running)
        yield GaugeMetricFamily("quire_num_requests_waiting", "Requests in the queue", llm.queued)
        yield GaugeMetricFamily("quire_num_requests_swapped", "Requests in host memory", llm.swapped)
        yield GaugeMetricFamily(
            "quire_kv_cache_usage_perc",
            "KV memory in use by requests and registered prefixes; 1 is all of it",
            held / max(usage.total, 1),
        )
        sizes = GaugeMetricFamily("quire_kv_bytes", "KV memory by category", labels=["category"])
        for category, size in usage._asdict().items():
            sizes.add_metric([category], size)
        yield sizes
        for name, text, value in (
            ("kv_unshared_bytes", "KV memory that requests would hold if none shared a page", sharing.tables),
            ("kv_sharing_saved_bytes", "KV memory that they hold less than that", sharing.saved),
            ("host_pages", "Host pages for swapped requests", sharing.host_pages),
            ("host_pages_used", "Host pages in use", sharing.host_pages_used),
            ("registered_prefixes", "Prefixes that the operator registered", sharing.prefixes),
            ("registered_prefix_tokens", "Tokens in them", sharing.prefix_tokens),
            ("registered_prefix_capacity_tokens", "Tokens that may be in them", sharing.prefix_capacity),
        ):
            yield GaugeMetricFamily(f"quire_{name}", text, value)
        geometry = llm.engine.scheduler.memory.geometry
        pools = {group.ids: group for group in geometry.groups}  # unlike pages have one each
        shape = {
            "block_size": [group.run_tokens for group in pools.values()],
            "num_blocks": [len(ids) for ids in pools],
            "page_bytes": [group.page_bytes for group in pools.values()],
        }
        info = {
            **{name: ",".join(map(str, dict.fromkeys(sizes))) for name, sizes in shape.items()},
            "layout": geometry.layout.value,
        }
        facts = GaugeMetricFamily("quire_cache_config_info", "The KV memory's shape", labels=list(info))
        facts.add_metric([str(value) for value in info.values()], 1)
        yield facts

    def _counters(self, llm: AsyncLLM) -> Iterator[Metric]:
        engine, sharing = llm.engine, llm.account.sharing
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", sharing.queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache", sharing.hits),
            ("num_preemptions", "Requests preempted", engine.scheduler.preemptions),
            ("kv_pages_copied", "Pages copied on write", sharing.copies),
            ("swapped_out_bytes", "Bytes of KV memory copied to the host", sharing.swapped_out),
            ("swapped_in_bytes", "Bytes of KV memory copied back", sharing.swapped_in),
            ("prompt_tokens", "Prompt tokens of scheduled requests", engine.stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", engine.stats.generated_tokens),
            ("engine_steps", "Steps of the engine", engine.stats.steps),
            (
                "engine_step_seconds",
                "Seconds of steps, overlap counted once",
                engine.stats.step_seconds,
            ),
            ("aborted_requests", "Requests that ended before their end: clients that left, drains", llm.aborted),
            ("invalid_requests", "Requests refused with a 4xx status", self.invalid),
            ("admission_rejections", "Requests refused for a full queue", llm.rejected),
        ):
            yield CounterMetricFamily(f"quire_{name}", text, value)
        ways = CounterMetricFamily("quire_preemptions", "Requests preempted, by the way it was done", labels=["way"])
        for way, count in engine.scheduler.preempted.items():
            ways.add_metric([way], count)
        yield ways
        ended = CounterMetricFamily("quire_request_success", "Requests that ended", labels=["finished_reason"])
        for reason in sorted({"stop", "length", "abort", "error", *self.finished}):
            ended.add_metric([reason], self.finished[reason])
        yield ended
