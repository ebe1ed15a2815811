"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from echo_service import Echo, Placement, Running
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from served_process import SERVE, served
from waiting import wait_until

from quire.errors import StartupError
from quire.server.options import ServeOptions, check_options
from quire.server.traces import FLUSH_SECONDS, RequestTracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "a quire of the pages that nobody may see"
BODY = {"prompt": SECRET, "max_tokens": 6, "ignore_eos": True}


class Collector:
    """An OTLP/HTTP receiver. It answers each export after `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.bodies: list[bytes] = []
        self.paths = set[str]()
        outer, self.answer = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.add(self.path)
                outer.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                outer.answer.wait(seconds)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    @property
    def exports(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def spans(self) -> list[Span]:
        return [span for one in self.exports for r in one.resource_spans for s in r.scope_spans for span in s.spans]

    def requests(self) -> dict[str, Span]:
        """The spans of requests, by the request's id."""
        return {str(values(span)["gen_ai.request.id"]): span for span in self.spans() if span.name == "llm_request"}

    def phases(self, request: Span) -> dict[str, Span]:
        """The children of a request's span."""
        found = {span.name: span for span in self.spans() if span.parent_span_id == request.span_id}
        assert all(span.trace_id == request.trace_id for span in found.values())
        return found


@contextmanager
def collecting(seconds: float = 0.0) -> Iterator[Collector]:
    collector = Collector(seconds)
    thread = threading.Thread(target=collector.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        collector.answer.set()
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@contextmanager
def traced(url: str, model: Any = None, **options: Any) -> Iterator[Running]:
    """A server whose spans are all exported at its end."""
    tracer = RequestTracer(url, "echo")
    try:
        with echo_service.serving(model, tracer=tracer, **options) as running:
            yield running
            assert running.idle()
    finally:
        tracer.close()


def values(span: Span) -> dict[str, Any]:
    """The attributes of a span."""
    found: dict[str, Any] = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def complete(running: Running, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    answer = running.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return str(answer.json()["id"])


def test_spans_of_requests(placement: Placement) -> None:
    before = time.time_ns()
    with collecting() as collector:
        with traced(collector.url, placement=placement) as running:
            plain = complete(running, BODY, {"traceparent": TRACEPARENT, "tracestate": "vendor=x"})
            streamed = running.http.post("/v1/completions", json={**BODY, "stream": True, "temperature": 0.5})
            batch = complete(running, {**BODY, "prompt": [SECRET, SECRET]}, {"traceparent": TRACEPARENT})
            refused = running.http.post(
                "/v1/completions", json={"prompt": [echo_service.VOCAB]}, headers={"traceparent": TRACEPARENT}
            )
            assert refused.status_code == 400
        requests = collector.requests()
        [named, *_] = streamed.text.removeprefix('data: {"id":"').split('"')
        assert {*requests} >= {f"{plain}-0", f"{named}-0", f"{batch}-0", f"{batch}-1"}
        assert len(requests) == 5
        after, order = time.time_ns(), ("queue", "prefill", "decode")
        for id, span in requests.items():
            phases, found = collector.phases(span), values(span)
            assert span.kind == Span.SPAN_KIND_SERVER
            assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= after
            if "error.type" in found:
                assert span.status.code == Status.STATUS_CODE_ERROR
                assert (found["error.type"], phases) == ("InputError", {})
                continue
            assert (set(phases), span.status.code) == ({*order}, Status.STATUS_CODE_UNSET)
            times = [span.start_time_unix_nano, *(phases[name].end_time_unix_nano for name in order)]
            assert times == [*(phases[name].start_time_unix_nano for name in order), span.end_time_unix_nano]
            assert times == sorted(times)
            assert found["gen_ai.response.finish_reasons"] == ["length"]
            assert found["gen_ai.response.model"] == "echo"
            assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.request.max_tokens"] == 6
            assert found["gen_ai.usage.prompt_tokens"] > 4
            assert found["gen_ai.request.n"] == 1
            assert found["gen_ai.request.temperature"] == (0.5 if id == f"{named}-0" else 1.0)
            assert found["quire.engine"] == found["quire.preemptions"] == 0
            assert found["gen_ai.latency.e2e"] * 1e9 == pytest.approx(times[-1] - times[0], abs=1e3)
            assert found["gen_ai.latency.time_in_queue"] * 1e9 == pytest.approx(times[1] - times[0], abs=1e3)
            assert found["gen_ai.latency.time_to_first_token"] * 1e9 == pytest.approx(times[2] - times[0], abs=1e3)
        assert values(requests[f"{named}-0"])["quire.cached_tokens"] > 0
        own = requests.pop(f"{named}-0")
        assert (own.parent_span_id, own.trace_id != bytes.fromhex(TRACE)) == (b"", True)
        assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in requests.values()} == {(TRACE, PARENT)}
        assert requests[f"{plain}-0"].trace_state == "vendor=x"
        assert len(collector.spans()) == 5 + 4 * 3
        assert collector.paths == {"/v1/traces"}
        sent = b"".join(collector.bodies)
        assert not any(word.encode() in sent for word in SECRET.split() if len(word) > 4 and word != "quire")


def test_aborted_requests(brake: Path) -> None:
    """One client leaves while its request runs, and one while it waits; its span has the phases that it reached."""
    model = echo_service.built(Echo(brake=str(brake)), max_num_seqs=1)
    with collecting() as collector:
        with traced(collector.url, model) as running:
            body = {"prompt": [9] * 8, "max_tokens": 200, "ignore_eos": True, "stream": True}
            with running.http.stream("POST", "/v1/completions", json=body) as first:
                lines = first.iter_lines()  # the client would leave if nothing referred to it
                assert "data:" in next(lines)
                with httpx.Client(base_url=running.url) as other, other.stream("POST", "/v1/completions", json=body):
                    wait_until(lambda: running.llm.queued == 1, "the second request waits")
                wait_until(lambda: running.llm.active == 1, "it was aborted")
            brake.unlink()
        found = sorted(len(collector.phases(span)) for span in collector.requests().values())
        assert found == [1, 3]
        for span in collector.requests().values():
            assert values(span)["gen_ai.response.finish_reasons"] == ["abort"]
            ends = [one.end_time_unix_nano for one in collector.phases(span).values()]
            assert max(ends) == span.end_time_unix_nano


def test_failed_requests() -> None:
    """The engine dies: the request's span has the error's type, and what was computed until then."""
    model = echo_service.built(Echo(fail_at=5))
    with collecting() as collector:
        tracer = RequestTracer(collector.url, "echo")
        with echo_service.serving(model, tracer=tracer, placement="thread") as running:
            answer = running.http.post("/v1/completions", json={**BODY, "max_tokens": 50})
            assert answer.status_code == 503
            later = running.http.post("/v1/completions", json=BODY)
            assert later.status_code >= 500
        tracer.close()
        failed, refused = collector.requests().values()
        assert {span.status.code for span in (failed, refused)} == {Status.STATUS_CODE_ERROR}
        assert {values(span)["error.type"] for span in (failed, refused)} == {"EngineDead"}
        assert set(collector.phases(failed)) == {"queue", "prefill", "decode"}
        assert 0 < values(failed)["gen_ai.usage.completion_tokens"] < 50


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", f"{TRACEPARENT}-more", "0" * 6000],
)
def test_invalid_headers_are_ignored(header: str) -> None:
    trace = _parents_of([("traceparent", header)])
    assert trace.parent_span_id == b""


def test_headers_as_the_specification_has_them() -> None:
    twice = [("traceparent", TRACEPARENT)] * 2
    assert _parents_of(twice).parent_span_id == b""
    states = [("traceparent", TRACEPARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]
    assert _parents_of(states).trace_state == "a=1,b=2"
    later = _parents_of([("traceparent", f"01-{TRACE}-{PARENT}-01-more")])
    assert later.parent_span_id.hex() == PARENT


def _parents_of(headers: list[tuple[str, str]]) -> Span:
    """The span of an HTTP request with `headers`."""
    from starlette.datastructures import Headers

    with collecting() as collector:
        tracer = RequestTracer(collector.url, "echo")
        raw = [(name.encode(), value.encode()) for name, value in headers]
        tracer.start(Headers(raw=raw)).on_refusal("id", ValueError(SECRET))
        tracer.close()
        [span] = collector.spans()
    return span


def test_parents_that_are_not_sampled() -> None:
    with collecting() as collector:
        with traced(collector.url) as running:
            complete(running, BODY, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert not collector.bodies


def test_the_replica_is_named() -> None:
    with collecting() as collector:
        with traced(collector.url, placement="replicas") as running:
            for i in range(3):
                complete(running, {"prompt": [20 + i] * 40, "max_tokens": 4})
        engines = [values(span)["quire.engine"] for span in collector.requests().values()]
        assert len(engines) == 3
        assert set(engines) <= {0, 1, 2}


@pytest.mark.parametrize("kind", ["dead", "slow"])
def test_collectors_that_fail_slow_nothing(kind: str) -> None:
    """A collector that refuses connections, or never answers: requests go on, the queue is bounded, and the end does
    not wait longer than it should."""

    def seconds(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    with collecting(60.0) as collector:
        url = collector.url if kind == "slow" else "http://127.0.0.1:9/v1/traces"
        tracer = RequestTracer(url, "echo")
        with echo_service.serving(tracer=tracer) as running:
            complete(running, BODY)
            times = [seconds(lambda: complete(running, BODY)) for _ in range(50)]
            times += [
                seconds(lambda: complete(running, {**BODY, "prompt": [[5, 6]] * 16})) for _ in range(30)
            ]  # more spans than the queue holds
            assert sorted(times)[len(times) // 2] < 1
            assert max(times) < 5  # an export takes longer
        assert seconds(tracer.close) < FLUSH_SECONDS + 1


@pytest.mark.parametrize(
    "url", ["", "collector:4317", "grpc://collector:4317", "http://", "http://h:99999/", "http://[::1", "http://a b/"]
)
def test_endpoints_that_are_no_urls(url: str) -> None:
    with pytest.raises(StartupError, match="--otlp-traces-endpoint is") as raised:
        check_options(ServeOptions(otlp_traces_endpoint=url))
    assert raised.value.remedy == "Give a URL of HTTP, such as http://127.0.0.1:4318/v1/traces"
    check_options(ServeOptions(otlp_traces_endpoint="https://collector.example/v1/traces"))


@pytest.mark.parametrize("module", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"])
def test_a_missing_library_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "quire.server.traces")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartupError, match=r"--otlp-traces-endpoint needs OpenTelemetry.*pip install 'quire\[otel\]'"):
        check_options(ServeOptions(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))


def test_nothing_is_imported_without_the_option() -> None:
    code = (
        "import sys\n"
        "from quire.server.options import ServeOptions, check_options\n"
        "import quire.server.app, quire.server.api_server, quire.server.frontend_worker\n"
        "check_options(ServeOptions())\n"
        "assert quire.server.api_server.make_tracer(ServeOptions(), 'm') is None\n"
        "mine = ('opentelemetry.sdk', 'opentelemetry.exporter', 'quire.server.traces')\n"
        "print([name for name in sys.modules if name.startswith(mine)])"
    )  # FastAPI imports the API, if it is installed
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.full
def test_each_frontend_exports_its_requests(tmp_path: Path) -> None:
    with collecting() as collector:
        flags = ("--fronts", "2", "--device", "cpu", "--kv-tokens", "4096", "--otlp-traces-endpoint", collector.url)
        with served(tmp_path, *flags, command=SERVE) as server:
            server.ready()
            with ExitStack() as stack:  # connections that stay open are divided among frontends
                for _ in range(12):
                    client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
                    assert client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2}).status_code == 200
            server.process.terminate()
            assert server.child.wait(60) == 0, server.text
        assert len(collector.requests()) == 12
        assert len(collector.spans()) == 48
        instances = {str(item.value) for one in collector.exports for r in one.resource_spans
                     for item in r.resource.attributes if item.key == "service.instance.id"}  # fmt: skip
        assert len(instances) == 2
