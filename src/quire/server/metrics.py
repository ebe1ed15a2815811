"""Prometheus metrics with vLLM's names, with the prefix quire_ or vllm:. The engine's state is read when the metrics
are scraped; only latencies and results of requests are counted as they happen, once a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.core.outputs import BranchOutput
from quire.ipc.engine_client import EngineClient
from quire.ipc.messages import EngineMetrics, HandoverCounts
from quire.memory.answers import TypeUsage
from quire.server.counters import ServerCounters
from quire.text.output_stream import RequestRecord

PREFIXES = {"quire": "quire_", "vllm": "vllm:"}  # by --metrics-prefix
LABELS = ("model_name", "engine")
FRONTEND_LABEL = "0"  # of counters of frontends, as the label `engine`
PARTIAL_COMMENT = (
    b"# The first frontend doesn't answer: counters of frontends "
    b"(requests, latencies, HTTP, processor time) are left out\n"
)

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level
CATEGORIES = TypeUsage._fields[1:]

Samples = Sequence[tuple[tuple[str, ...], float]]  # label values, and the sample's value
Family = tuple[str, str, tuple[str, ...], Samples]  # name, help, labels in addition to LABELS, samples

# These include vLLM's bounds: its dashboards select some of them by value.
SHORT_LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1, 0.15, 0.2, 0.25,
0.3, 0.4, 0.5,
         0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
LONG_LATENCY_BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
60.0, 120.0, 240.0,
        480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
COUNT_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SHORT_LATENCY_BOUNDS),
    "inter_token_latency_seconds": ("Between two tokens of a sequence", SHORT_LATENCY_BOUNDS),
    "request_time_per_output_token_seconds": ("A request's mean time per token after its first", SHORT_LATENCY_BOUNDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", LONG_LATENCY_BOUNDS),
    "request_queue_time_seconds": ("From arrival to the first step", LONG_LATENCY_BOUNDS),
    "request_prefill_time_seconds": ("From the first step to the first token", LONG_LATENCY_BOUNDS),
    "request_decode_time_seconds": ("From the first token to the end", LONG_LATENCY_BOUNDS),
    "request_inference_time_seconds": ("From the first step to the end", LONG_LATENCY_BOUNDS),
    "front_lag_seconds": (
        "From a step's end until its outputs are detokenized and passed to clients",
        SHORT_LATENCY_BOUNDS,
    ),
    "iteration_tokens_total": ("Prompt and output tokens computed in a step", STEP_TOKEN_BOUNDS),
    "request_prompt_tokens": ("Prompt tokens of a request", COUNT_BOUNDS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were computed, not cached",
        COUNT_BOUNDS,
    ),
    "request_generation_tokens": ("Output tokens of a request", COUNT_BOUNDS),
    "request_max_num_generation_tokens": ("Output tokens of a request's longest output", COUNT_BOUNDS),
    "request_num_preemptions": ("How often a request was preempted", (0, 1, 2, 3, 5, 10, 20, 50)),
    "request_params_n": ("n of a request", (1, 2, 5, 10, 20, 50, 100)),
    "request_params_max_tokens": ("Tokens that a request may generate", COUNT_BOUNDS),
}
BOUNDS = {name: bounds for name, (_, bounds) in HISTOGRAMS.items()}


class Metrics(ServerCounters):
    """Counts the steps of `llm` as its observer, and renders its metrics. Every series has the labels `model_name` and
    `engine`. `config` adds settings that the engine does not know to cache_config_info."""

    def __init__(
        self, llm: AsyncLLM, model_name: str = "", prefix: str = "quire", config: EngineConfig | None = None
    ) -> None:
        super().__init__(BOUNDS)
        self.prefix, self.labels, self.config = PREFIXES[prefix], [model_name, FRONTEND_LABEL], config
        self.llm = llm
        llm.set_observer(self)

    # Counted as it happens

    def on_step_computed(self, tokens: int) -> None:
        """Count a step that computed `tokens` tokens."""
        self._observe("iteration_tokens_total", tokens)

    def on_outputs(self, outputs: Sequence[tuple[BranchOutput, RequestRecord]], now: float) -> None:
        """Count the outputs of a step, which ended at the time `now`."""
        gaps: dict[float, int] = {}
        for output, request in outputs:
            tokens = len(output.tokens)
            if tokens:
                seen = request.branch_progress.get(output.branch)
                if seen is None:
                    if output.branch == 0 and request.first_token_time is not None:
                        first = request.first_token_time - request.arrival_time
                        self._observe("time_to_first_token_seconds", first)
                    self._count_prompt(request)
                    request.branch_progress[output.branch] = [now, tokens]
                else:
                    gap = now - seen[0]
                    gaps[gap] = gaps.get(gap, 0) + 1
                    seen[0], seen[1] = now, seen[1] + tokens
            if output.done:
                self._on_request_end(output, request, now)
        for gap, times in gaps.items():
            self._observe("inter_token_latency_seconds", gap, times)
        self._observe("front_lag_seconds", time.monotonic() - now)

    def _count_prompt(self, request: RequestRecord) -> None:
        """Count the tokens of a prompt as computed or cached: at the request's first token, or at its end if it had
        none."""
        if not request.branch_progress and request.scheduled_time is not None:
            self.prompt_sources["local_compute"] += request.prompt_len - request.cached_tokens
            self.prompt_sources["local_cache_hit"] += request.cached_tokens

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def _on_request_end(self, output: BranchOutput, request: RequestRecord, now: float) -> None:
        self.finished[output.finish_reason or ""] += 1
        if request.trace is not None:
            request.trace.on_end(request, now, output.finish_reason or "")
        self._count_prompt(request)
        branches = [int(tokens) for _, tokens in request.branch_progress.values()]
        tokens = sum(branches)
        self._observe("e2e_request_latency_seconds", now - request.arrival_time)
        self._observe("request_prompt_tokens", request.prompt_len)
        self._observe("request_generation_tokens", tokens)
        self._observe("request_max_num_generation_tokens", max(branches, default=0))
        self._observe("request_num_preemptions", request.preemptions)
        self._observe("request_params_n", request.params.n)
        self._observe("request_params_max_tokens", request.max_tokens)
        if request.scheduled_time is None:
            return
        self._observe("request_prefill_kv_computed_tokens", request.prompt_len - request.cached_tokens)
        self._observe("request_queue_time_seconds", request.scheduled_time - request.arrival_time)
        self._observe("request_inference_time_seconds", now - request.scheduled_time)
        if request.first_token_time is not None:
            decode = now - request.first_token_time
            self._observe("request_prefill_time_seconds", request.first_token_time - request.scheduled_time)
            self._observe("request_decode_time_seconds", decode)
            if tokens > 1:
                self._observe("request_time_per_output_token_seconds", decode / (tokens - 1))

    # Read at scrape time, on any thread

    def own_counters(self) -> ServerCounters:
        """Return what this frontend has counted until now."""
        counters = ServerCounters(BOUNDS)
        counters.add(self)
        counters.aborted, counters.rejected = self.llm.num_aborted, self.llm.num_rejected
        counters.cpu_seconds = time.process_time() - (
            self.llm.metrics.seconds if self.llm.engine_client.is_in_process else 0
        )
        return counters

    def render(self, other_counters: Iterable[ServerCounters] = ()) -> bytes:
        """Return the metrics in Prometheus' text format. The counts of other frontends are added to this one's."""
        return generate_latest(FamilyCollector(self._all_families(other_counters)))

    def render_engine(self) -> bytes:
        """Return the metrics without counters of frontends, for a worker that does not know the others' counts: its own
        counts alone would look like counters that were reset."""
        return PARTIAL_COMMENT + generate_latest(FamilyCollector(self._engine_families()))

    def _engine_families(self) -> Iterator[Metric]:
        """Yield the metrics of each engine, numbered by the label `engine`."""
        llm, engines = self.llm, self.llm.engine_client.replicas
        # Requests that no engine has accepted yet are counted as the first one's.
        pending = [llm.num_pending if engine is engines[0] else 0 for engine in engines]
        gauges = [engine_gauges(*each, cache_info(llm, self.config)) for each in zip(engines, pending)]
        yield from self._families(GaugeMetricFamily, gauges)
        yield from self._families(CounterMetricFamily, [engine_counters(engine.metrics) for engine in engines])

    def _families(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], engines: Sequence[Iterable[Family]]
    ) -> Iterator[Metric]:
        """Yield the metrics of several engines, which all have the same ones."""
        for each in zip(*engines):
            name, text, labels, _ = each[0]
            family = kind(self.prefix + name, text, labels=[*LABELS, *labels])
            for engine, (_, _, _, samples) in enumerate(each):
                for values, value in samples:
                    family.add_metric([self.labels[0], str(engine), *values], value)
            yield family

    def _all_families(self, other_counters: Iterable[ServerCounters]) -> Iterator[Metric]:
        whole = self.own_counters()
        for other in other_counters:
            whole.add(other)
        yield from self._engine_families()
        yield from self._families(CounterMetricFamily, [frontend_counters(whole, self.llm.metrics)])
        yield from self._families(CounterMetricFamily, [handover_counters(self.llm.engine_client.handover_counts)])
        for name, (text, _) in HISTOGRAMS.items():
            histogram, family = whole.histograms[name], HistogramMetricFamily(self.prefix + name, text, labels=LABELS)
            family.add_metric(self.labels, histogram.cumulative(), histogram.total)
            yield family
        yield from self._http(whole)

    def _http(self, whole: ServerCounters) -> Iterator[Metric]:
        prefix = "" if self.prefix == PREFIXES["vllm"] else self.prefix  # vLLM's HTTP metrics have none
        labels = [*LABELS, "handler", "method"]
        text = "HTTP requests except probes, by class of status"
        requests = CounterMetricFamily(f"{prefix}http_requests", text, labels=[*labels, "status"])
        for labelled, count in whole.http.requests.items():
            requests.add_metric([*self.labels, *labelled], count)
        yield requests
        text = "Seconds until requests were answered; of a stream, until its end"
        seconds = HistogramMetricFamily(f"{prefix}http_request_duration_seconds", text, labels=labels)
        for names, histogram in whole.http.durations.items():
            seconds.add_metric([*self.labels, *names], histogram.cumulative(), histogram.total)
        yield seconds


class FamilyCollector(NamedTuple):
    """A collector, in prometheus_client's sense, of metric families."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self.families


def engine_gauges(engine: EngineClient, pending: int, info: Mapping[str, object]) -> Iterator[Family]:
    """Yield the gauges: an engine's current state. `pending` requests wait for its acceptance; `info` are the settings
    of its KV memory."""
    metrics, sizes, health = engine.metrics, engine.queue_sizes, engine.health()
    is_up = health.alive and not health.stalled
    usage, sharing, types = metrics.account
    queued = sizes.waiting + pending
    deferred = min(sizes.deferred, queued)
    reasons = [(("capacity",), queued - deferred), (("deferred",), deferred)]
    text = "Waiting requests: capacity: for memory; deferred: for another request that computes a common prefix"
    yield "num_requests_waiting_by_reason", text, ("reason",), reasons
    by_category = [((category,), size) for category, size in usage._asdict().items()]
    yield "kv_bytes", "KV memory by category", ("category",), by_category
    text = "Pages in use by layer type: used by tokens, the rest of them (internal), and cached"
    by_type = [((layer_type, name), size) for layer_type, *rest in types for name, size in zip(CATEGORIES, rest)]
    yield "kv_layer_bytes", text, ("layer_type", "category"), by_type
    ranks = [((str(rank),), used.memory_bytes) for rank, used in enumerate(metrics.ranks)]
    yield "rank_memory_bytes", "Memory of each rank's process, with --tp", ("rank",), ranks
    held = (usage.total - usage.free - usage.cached) / max(usage.total, 1)
    for name, text, value in (
        ("num_requests_running", "Requests in memory", sizes.running),
        ("num_requests_waiting", "Requests in the queue", queued),
        ("num_requests_swapped", "Requests in host memory", sizes.swapped),
        ("kv_cache_usage_perc", "KV memory in use by requests and registered prefixes; 1 is all of it", held),
        ("kv_unshared_bytes", "KV memory that requests would hold if none shared a page", sharing.tables),
        ("kv_sharing_saved_bytes", "KV memory that they save by sharing", sharing.saved),
        (
            "kv_mapped_bytes",
            "Bytes mapped in the address ranges of sequences, with --memory virtual",
            metrics.mapped.mapped_bytes,
        ),
        ("engine_up", "1 while the engine serves, 0 if it has ended or hangs", int(is_up)),
        ("host_pages", "Host pages for swapped requests", sharing.host_pages),
        ("host_pages_used", "Host pages in use", sharing.host_pages_used),
        ("registered_prefixes", "Prefixes that the operator registered", sharing.prefixes),
        ("registered_prefix_tokens", "Tokens in them", sharing.prefix_tokens),
        ("registered_prefix_capacity_tokens", "Tokens that may be in them", sharing.prefix_capacity),
    ):
        yield name, text, (), [((), value)]
    states = [((state,), int(level == metrics.asleep)) for level, state in enumerate(SLEEP_STATES)]
    yield (
        "engine_sleep_state",
        "1 for the engine's state: awake, weights offloaded, or discarded",
        ("sleep_state",),
        states,
    )
    yield "cache_config_info", "The KV memory's shape", tuple(info), [(tuple(map(str, info.values())), 1)]


def cache_info(llm: AsyncLLM, config: EngineConfig | None) -> dict[str, object]:
    """Return the settings of the KV memory."""
    info = dict(llm.kv_cache_info)
    if config is not None:
        info["gpu_memory_utilization"] = config.gpu_memory_utilization
        info["enable_prefix_caching"] = config.enable_prefix_caching
    return info


def engine_counters(facts: EngineMetrics) -> Iterator[Family]:
    """Yield the counters of an engine since its start."""
    stats, sharing = facts.stats, facts.account.sharing
    for name, text, value in (
        (
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache, when a sequence is first admitted",
            sharing.queries,
        ),
        ("prefix_cache_hits", "Tokens found by these lookups", sharing.hits),
        (
            "prefix_cache_full_hits",
            "Tokens found in the prefix cache of full attention, even where windows lack them",
            sharing.full_hits,
        ),
        ("encoder_runs", "Images encoded", sharing.encoder_runs),
        ("encoder_parts", "Tiles of images encoded", sharing.encoder_parts),
        ("picture_hits", "Images that were found in the cache and not encoded again", sharing.picture_hits),
        ("num_preemptions", "Requests preempted", sum(facts.preempted.values())),
        ("kv_pages_copied", "Pages copied on write", sharing.copies),
        ("kv_maps", "Pages mapped by --memory virtual, in each buffer", facts.mapped.maps),
        ("kv_unmaps", "Pages unmapped", facts.mapped.unmaps),
        ("kv_maps_ahead", "Pages mapped while a step computed", facts.mapped.overlapped),
        ("kv_map_stall_seconds", "Seconds that steps waited for pages to be mapped", facts.mapped.stall_seconds),
        ("kv_map_ahead_seconds", "Seconds of mapping pages after a step's launch", facts.mapped.overlap_seconds),
        ("swapped_out_bytes", "Bytes of KV memory copied to the host", sharing.swapped_out),
        ("swapped_in_bytes", "Bytes of KV memory copied back", sharing.swapped_in),
        ("prompt_tokens", "Prompt tokens of scheduled requests", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.generated_tokens),
        ("rank_restarts", "Restarts of ranks, with --on-rank-failure restart", stats.restarts),
        ("spec_decode_num_drafts", "Runs of draft tokens that were verified", stats.num_drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens that were verified", stats.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted", stats.accepted_tokens),
        ("engine_steps", "Steps of the engine", stats.steps),
        ("engine_idle_seconds", "Seconds that the device waited for the host between two steps", stats.idle_seconds),
        ("engine_step_seconds", "Seconds of steps, overlap counted once", stats.step_seconds),
    ):
        yield name, text, (), [((), value)]
    ways = [((way,), count) for way, count in facts.preempted.items()]
    yield "preemptions", "Requests preempted, by method", ("way",), ways
    positions = [((str(position),), count) for position, count in enumerate(takewhile(bool, stats.accepted_per_pos))]
    text = "Draft tokens that were accepted, by their position in a run"
    yield "spec_decode_num_accepted_tokens_per_pos", text, ("position",), positions


def handover_counters(counts: HandoverCounts) -> Iterator[Family]:
    """Yield the counters of prompts that prefill replicas computed."""
    yield "prompt_handovers", "Prompts computed by prefill replicas, and copied to others", (), [((), counts.handovers)]
    yield "prompt_handover_bytes", "Bytes of their pages", (), [((), counts.page_bytes)]
    text = "Prompts for prefill replicas that the replica computed that decodes: no room for pages, or a lost replica"
    yield "prompt_handover_fallbacks", text, (), [((), counts.fallbacks)]


def frontend_counters(counters: ServerCounters, facts: EngineMetrics) -> Iterator[Family]:
    """Yield the counters of all frontends, and the processor time of frontends, engine and ranks."""
    for name, text, value in (
        ("prompt_tokens_cached", "Prompt tokens that were found cached", counters.prompt_sources["local_cache_hit"]),
        ("aborted_requests", "Requests that were aborted: clients that left, shutdowns", counters.aborted),
        ("invalid_requests", "Requests refused with a 4xx status", counters.invalid),
        ("admission_rejections", "Requests refused for a full queue", counters.rejected),
    ):
        yield name, text, (), [((), value)]
    seconds = {"front": counters.cpu_seconds, "engine": facts.seconds}
    seconds |= {f"rank {rank}": used.cpu_seconds for rank, used in enumerate(facts.ranks)}
    reasons = sorted({"stop", "length", "abort", "error", *counters.finished})
    for name, text, label, counts in (
        (
            "prompt_tokens_by_source",
            "Prompt tokens of requests that have an output",
            "source",
            counters.prompt_sources,
        ),
        ("process_cpu_seconds", "Processor time of frontends, of the engine and of ranks", "process", seconds),
        ("request_success", "Requests that ended", "finished_reason", {why: counters.finished[why] for why in reasons}),
    ):
        yield name, text, (label,), [((key,), count) for key, count in counts.items()]
