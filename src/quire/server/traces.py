"""OpenTelemetry traces: a span for each request, with vLLM's attributes, and a child for each of its phases. Spans are
made when a request ends, and a thread of the library exports them. No span has text of a prompt or of an output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from uuid import uuid4

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

import quire
from quire.text.output_stream import RequestRecord

SPAN_NAME = "llm_request"  # vLLM's
PHASES = ("queue", "prefill", "decode")
FLUSH_SECONDS = 2.0  # at the end of the server
Attributes = Mapping[str, str | int | float | list[str] | None]  # None: unknown, and left out


class RequestTracer:
    """Exports spans to the collector at `endpoint`, in batches. While the collector does not answer, the oldest spans
    are dropped. OpenTelemetry's environment variables set the bounds, the sampler, headers and the service's name."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        own = {"service.name": "quire", "service.instance.id": str(uuid4())}
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("quire", quire.__version__)
        self._propagator, self.model_name = TraceContextTextMapPropagator(), model_name

    def start(self, headers: Headers) -> HttpTrace:
        """Return the trace for the prompts of an HTTP request: the one that its headers name, or else a new one for
        each prompt."""
        carrier = {name: headers.getlist(name) for name in self._propagator.fields}
        if len(carrier["traceparent"]) > 1:  # invalid; the propagator would take the first one
            carrier = {}
        return HttpTrace(self, self._propagator.extract(carrier, Context()))

    def start_span(self, parent: Context, arrival: int, attributes: Attributes) -> Span:
        """Return the span of a request that arrived at `arrival`, in nanoseconds since the epoch."""
        known = {key: value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(SPAN_NAME, parent, SpanKind.SERVER, known, start_time=arrival)

    def add_phase(self, request: Span, name: str, start: int, end: int) -> None:
        """Add a child to the span of a request."""
        self._tracer.start_span(name, set_span_in_context(request, Context()), start_time=start).end(end)

    def close(self) -> None:
        """Export the remaining spans, for at most FLUSH_SECONDS."""
        flushing = threading.Thread(target=self._provider.shutdown, name="quire-traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


class HttpTrace:
    """The trace of the requests of one HTTP request, whose spans are children of `parent`."""

    def __init__(self, tracer: RequestTracer, parent: Context) -> None:
        self._tracer, self._parent, self._start = tracer, parent, time.monotonic()

    def on_end(self, record: RequestRecord, now: float, finish_reason: str) -> None:
        """Write the spans of a request that ended at the time `now`."""
        self._write(record, now, {"gen_ai.response.finish_reasons": [finish_reason]}, failed=False)

    def on_failure(self, record: RequestRecord, now: float, error: Exception) -> None:
        """Write the spans of a request that failed at the time `now`."""
        self._write(record, now, _error_attributes(error), failed=True)

    def on_refusal(self, id: str, error: Exception) -> None:
        """Write one span for an HTTP request that the engine did not accept."""
        to_epoch = _epoch_clock()
        attributes: Attributes = {"gen_ai.request.id": id, "gen_ai.response.model": self._tracer.model_name}
        attributes = {**attributes, **_error_attributes(error)}
        span = self._tracer.start_span(self._parent, to_epoch(self._start), attributes)
        span.set_status(StatusCode.ERROR)
        span.end(to_epoch(time.monotonic()))

    def _write(self, record: RequestRecord, now: float, result: Attributes, failed: bool) -> None:
        to_epoch = _epoch_clock()
        attributes = {"gen_ai.response.model": self._tracer.model_name, **_attributes(record, now), **result}
        span = self._tracer.start_span(self._parent, to_epoch(record.arrival_time), attributes)
        if not span.is_recording():  # not sampled
            return
        times = (record.arrival_time, record.scheduled_time, record.first_token_time)
        reached = [to_epoch(at) for at in times if at is not None]
        for name, (start, end) in zip(PHASES, pairwise([*reached, to_epoch(now)])):
            self._tracer.add_phase(span, name, start, end)
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(to_epoch(now))


def _epoch_clock() -> Callable[[float], int]:
    """Return a function from seconds of the monotonic clock to nanoseconds since the epoch."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda at: offset + int(at * 1e9)


def _error_attributes(error: Exception) -> Attributes:
    """Return the attributes of an error. Its message is left out: it may quote the request."""
    return {"error.type": type(error).__name__}


def _attributes(record: RequestRecord, now: float) -> Attributes:
    """Return the attributes of a request that ended at the time `now`. Latencies are in seconds."""
    arrival, scheduled, first = record.arrival_time, record.scheduled_time, record.first_token_time
    params = record.params
    return {
        "gen_ai.request.id": record.id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": record.max_tokens or params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": record.prompt_len,
        "gen_ai.usage.completion_tokens": sum(int(tokens) for _, tokens in record.branch_progress.values()),
        "gen_ai.latency.time_in_queue": _difference(arrival, scheduled),
        "gen_ai.latency.time_to_first_token": _difference(arrival, first),
        "gen_ai.latency.time_in_model_prefill": _difference(scheduled, first),
        "gen_ai.latency.time_in_model_decode": _difference(first, now),
        "gen_ai.latency.time_in_model_inference": _difference(scheduled, now),
        "gen_ai.latency.e2e": now - arrival,
        "quire.cached_tokens": record.cached_tokens,
        "quire.preemptions": record.preemptions,
        "quire.engine": record.engine,
    }


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
