"""Exact counts after known requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from asking import linked
from echo_service import Echo, Placement, Servers
from memories import host_total
from prometheus_client.parser import text_string_to_metric_families
from waiting import INTERVAL, wait_until

from quire.config import EngineConfig
from quire.protocol.sampling_params import SamplingParams
from quire.server import shutdown
from quire.server.counters import CountHttpMiddleware, HttpCounters
from quire.server.metrics import LABELS, Metrics, engine_gauges
from quire.server.shutdown import status_line


def samples(url: str) -> dict[str, float]:
    """Values by name, and by the value of the one label that a series has of its own."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in LABELS]
            if "le" not in sample.labels:
                found[f"{sample.name}:{own[0]}" if len(own) == 1 else sample.name] = sample.value
    return found


def test_counts_after_five_requests(placement: Placement) -> None:
    model = echo_service.built()
    with echo_service.serving(model, placement=placement) as running:
        for i in range(3):
            body = {"prompt": [10 + i] * 10, "max_tokens": 8, "ignore_eos": True}
            assert running.http.post("/v1/completions", json=body).status_code == 200
        for _ in range(2):
            body = {"prompt": [10] * 10, "max_tokens": 4, "n": 2, "ignore_eos": True}
            assert running.http.post("/v1/completions", json=body).status_code == 200
        assert running.idle()
        found = samples(running.url)
        # A step takes in prompts less what was cached, and every output token but each branch's last.
        wanted = {
            "prompt_tokens_total": 50, "generation_tokens_total": 3 * 8 + 4 * 4, "num_preemptions_total": 0,
            "iteration_tokens_total_sum": 50 - 16 + 3 * 7 + 4 * 3,
            "iteration_tokens_total_count": found["quire_engine_steps_total"], "request_success_total:length": 5,
            "request_prompt_tokens_sum": 50, "request_generation_tokens_sum": 40, "request_params_n_sum": 7,
            "request_params_max_tokens_sum": 32, "time_to_first_token_seconds_count": 5,
            "inter_token_latency_seconds_count": 3 * 7 + 4 * 3, "e2e_request_latency_seconds_count": 5,
            "request_queue_time_seconds_count": 5, "request_prefill_time_seconds_count": 5,
            "request_decode_time_seconds_count": 5, "prefix_cache_queries_total": 50, "prefix_cache_hits_total": 16,
            "prompt_tokens_by_source_total:local_compute": 50 - 16, "prompt_tokens_by_source_total:local_cache_hit": 16,
            "prompt_tokens_cached_total": 16, "request_prefill_kv_computed_tokens_sum": 50 - 16,
            "request_max_num_generation_tokens_sum": 3 * 8 + 2 * 4, "request_num_preemptions_count": 5,
            "request_num_preemptions_sum": 0,
        }  # fmt: skip
        assert {name: found[f"quire_{name}"] for name in wanted} == wanted
        assert 0 < found["quire_front_lag_seconds_count"] <= found["quire_engine_steps_total"]
        categories = [value for name, value in found.items() if name.startswith("quire_kv_bytes:")]
        assert sum(categories) == model.engine.scheduler.memory.account().usage.total


def test_the_lag_of_a_front_that_was_busy_is_seen(placement: Placement) -> None:
    async def work() -> tuple[float, float]:
        with linked(echo_service.built(Echo(pause=0.01)), placement) as llm:
            lag = Metrics(llm).histograms["front_lag_seconds"]
            stream = await llm.submit([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
            await anext(stream)
            before = lag.total
            time.sleep(0.3)  # the front is busy: its loop does not turn
            async for _ in stream:
                pass
            return before, lag.total

    before, after = asyncio.run(work())
    assert after - before > 0.25  # the first of some thirty steps waited 0.3 s, and the last of them not at all
    assert after - before < 60 * 0.3 + 2 * before


def test_http_requests_are_counted_by_route_and_bounded() -> None:
    with echo_service.serving(keys=["key"], root_path="/api") as running:
        headers = {"Authorization": "Bearer key"}
        for path in ("/v1/completions", "/api/v1/completions"):
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            assert running.http.post(path, json=body, headers=headers).status_code == 200
        assert running.http.post("/v1/completions", json={"n": 0}, headers=headers).status_code == 400
        assert running.http.get("/v1/models/echo", headers=headers).status_code == 200
        assert running.http.get("/v1/models/none", headers=headers).status_code == 404
        for i in range(30):
            assert running.http.request(f"ODD{i}", f"/odd/{i}", headers=headers).status_code == 404
            assert running.http.get("/health", headers=headers).status_code == 200
            assert running.http.get(f"/v1/models/{i}").status_code == 401
        counts = running.app.wrap.keywords["counters"]
        assert counts.requests == {
            ("/v1/completions", "POST", "2xx"): 2, ("/v1/completions", "POST", "4xx"): 1,
            ("/v1/models/{name:path}", "GET", "2xx"): 1, ("/v1/models/{name:path}", "GET", "4xx"): 1,
            ("none", "other", "4xx"): 30, ("none", "GET", "4xx"): 30,
        }  # fmt: skip
        text = running.http.get("/metrics", headers=headers).text
        invalid = 1 + 1 + 30  # a body, a model and paths; those without a key are none
        assert f'quire_invalid_requests_total{{engine="0",model_name="echo"}} {invalid}.0' in text
        own = 'engine="0",handler="/v1/completions",method="POST",model_name="echo"'
        assert f'quire_http_requests_total{{{own},status="2xx"}} 2.0' in text
        assert f"quire_http_request_duration_seconds_count{{{own}}} 3.0" in text


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_is_counted_once_and_before_its_last_part_leaves(fails: bool) -> None:
    """Else a client that asks at once for the metrics finds its own request missing."""
    counts, seen = HttpCounters(), []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if fails:
            raise ConnectionError("the client left")
        await send({"type": "http.response.body", "body": b"b"})

    async def send(message: Any) -> None:
        seen.append(counts.requests.total())

    with suppress(ConnectionError):
        asyncio.run(CountHttpMiddleware(answer, counts)({"type": "http", "method": "GET"}, None, send))  # type: ignore[arg-type]
    assert seen == ([0, 0] if fails else [0, 0, 1])
    assert counts.requests == {("none", "GET", "2xx"): 1}


def test_a_status_line_comes_while_anything_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert shutdown.STATUS_SECONDS == 10
    monkeypatch.setattr(shutdown, "STATUS_SECONDS", 0.02)
    caplog.set_level("INFO", "quire.server")

    async def work() -> None:
        with linked(echo_service.built(Echo(pause=0.01)), "thread") as llm:
            lines = asyncio.create_task(shutdown.log_status(llm))
            await asyncio.sleep(0.2)
            assert not caplog.records, "it is idle"
            async for _ in await llm.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)):
                pass
            lines.cancel()

    asyncio.run(work())
    assert "running 1, waiting 0, prompt " in caplog.text


def test_cache_info() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    with echo_service.serving(echo_service.built(kv_tokens=640), config=config) as running:
        text = running.http.get("/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        info = families["quire_cache_config_info"].samples[0].labels
        total = running.llm.account.usage.total
    assert int(info["num_gpu_blocks"]) * int(info["block_size"]) == int(info["kv_cache_size_tokens"]) == 640
    assert float(info["kv_cache_max_concurrency"]) == 640 / echo_service.MAX_LEN
    assert int(info["kv_cache_memory_bytes"]) == total
    assert (info["gpu_memory_utilization"], info["enable_prefix_caching"]) == ("0.5", "True")


def test_who_waits_for_a_prefix_is_deferred() -> None:
    """Of two alike prompts the second waits for what the first computes; a third waits for a place in the batch."""
    model = echo_service.built(Echo(pause=0.1), kv_tokens=2048, max_num_batched_tokens=16, max_num_seqs=2)
    engine = model.engine
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with linked(model, "thread") as llm:
        Metrics(llm, "echo")
        seen = set()

        async def ask() -> None:
            prompt = [*range(10, 110)]
            await llm.submit_all([(str(i), prompt) for i in range(3)], params)
            while llm.active:
                found = {name: samples for name, _, _, samples in engine_gauges(llm.engine_client, llm.num_pending, {})}
                reasons = {key: value for (key,), value in found["num_requests_waiting_by_reason"]}
                seen.add((reasons["capacity"], reasons["deferred"]))
                await asyncio.sleep(INTERVAL)

        asyncio.run(ask())
    assert (1, 1) in seen, seen
    assert engine.scheduler.num_prefix_waiters == 0


def test_memory_swaps_and_sharing_are_live(placement: Placement) -> None:
    """Numbers seen while requests run, and what is left of them afterwards."""
    model = echo_service.built(
        Echo(pause=0.005), kv_tokens=256, prefix_tokens=32, preemption="swap", enable_prefix_caching=False
    )
    memory = model.engine.scheduler.memory  # the server's, or in another process its twin
    with echo_service.serving(model, placement=placement) as running:
        prefix = list(range(40, 62))
        asyncio.run(running.llm.register_prefix("rules", prefix))
        total = memory.account().usage.total  # asked here, as the engine's thread owns the account
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            body = {"prompt": [*prefix, 1], "max_tokens": 60, "n": 2, "ignore_eos": True}
            answers = [
                pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=60) for _ in range(6)
            ]
            shared, swapped, lines = 0.0, 0.0, set()
            while not all(answer.done() for answer in answers):
                found = samples(running.url)
                categories = [value for name, value in found.items() if name.startswith("quire_kv_bytes:")]
                assert sum(categories) == total
                assert found["quire_kv_sharing_saved_bytes"] <= found["quire_kv_unshared_bytes"]
                shared = max(shared, found["quire_kv_sharing_saved_bytes"])
                swapped = max(swapped, found["quire_host_pages_used"])
                lines.add(status_line(running.llm, 0, 0))
                time.sleep(INTERVAL)
        assert {answer.result().status_code for answer in answers} == {200}
        cached = [answer.result().json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [22] * 6
        assert shared > 0
        assert swapped > 0
        assert any("saved by sharing" in line and "host pages" in line and "preempted" in line for line in lines), lines
        wait_until(lambda: not running.llm.running and not running.llm.account.sharing.tables, "no request is left")
        found = samples(running.url)
        page = memory.kv_config.groups[0].page_bytes
        ways = [found["quire_preemptions_total:swap"], found["quire_preemptions_total:recompute"]]
        assert sum(ways) == found["quire_num_preemptions_total"]
        assert ways[0] > 0
        assert found["quire_request_num_preemptions_sum"] == found["quire_num_preemptions_total"]
        swaps = [found[f"quire_swapped_{way}_bytes_total"] for way in ("out", "in")]
        assert min(swaps) > 0
        assert [size % page for size in swaps] == [0, 0]
        assert found["quire_kv_pages_copied_total"] >= 6  # the prefix's partial page, once for each request
        assert found["quire_host_pages"] == host_total(memory)
        wanted = {
            "host_pages_used": 0, "num_requests_swapped": 0, "kv_unshared_bytes": 0, "kv_sharing_saved_bytes": 0,
            "registered_prefixes": 1, "registered_prefix_tokens": 22, "registered_prefix_capacity_tokens": 32,
            "kv_bytes:used": 5.5 * page, "kv_bytes:internal": 0.5 * page,
        }  # fmt: skip
        assert {name: found[f"quire_{name}"] for name in wanted} == wanted
        assert status_line(running.llm, 0, 0).endswith("1 prefixes of 22 tokens")
        if placement == "thread":
            assert swaps == [memory.swap.out_bytes, memory.swap.in_bytes]
            memory.check()


# What dashboards ask for: our own, and vLLM's

BOARD = Path(__file__).parents[2] / "examples" / "grafana" / "quire.json"
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds to what it scrapes

# What the Grafana dashboards among vLLM's examples ask for, and more of its names.
OF_VLLM = """generation_tokens_total kv_cache_usage_perc num_preemptions_total num_requests_running num_requests_waiting
num_requests_waiting_by_reason prefix_cache_hits_total prefix_cache_queries_total prompt_tokens_by_source_total
prompt_tokens_cached_total prompt_tokens_total request_success_total cache_config_info"""
HISTOGRAMS = """e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total
request_decode_time_seconds request_generation_tokens request_max_num_generation_tokens
request_prefill_kv_computed_tokens request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds
request_time_per_output_token_seconds time_to_first_token_seconds request_num_preemptions request_params_n
request_params_max_tokens"""

Series = dict[str, list[dict[str, str]]]


def scrape(servers: Servers, prefix: str) -> Series:
    """The labels of every sample by its name, after a request."""
    url = servers(metrics_prefix=prefix).url
    body = {"prompt": "once upon", "max_tokens": 3, "n": 2}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    text = httpx.get(f"{url}/metrics").text
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.fixture(scope="module")
def series(servers: Servers) -> Series:
    return scrape(servers, "quire")


def expressions() -> Iterator[str]:
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (found["query"]["query"] for found in board["templating"]["list"] if found["type"] == "query")


def asked(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of a PromQL expression with the labels that are asked of each, those to group by included."""
    groups = {label.strip() for found in re.findall(r"\bby \(([^)]*)\)", expression) for label in found.split(",")}
    for name, matchers in re.findall(r"\b(quire_\w+)(\{[^}]*\})?", expression):
        yield name, groups | set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))


def test_every_query_finds_its_series(series: Series) -> None:
    seen = 0
    for expression in expressions():
        for name, labels in asked(expression):
            assert name in series, f"{expression} asks for {name}"
            for label in labels - OF_PROMETHEUS:
                assert all(label in sample for sample in series[name]), f"{expression} asks {name} for {label}"
            seen += 1
    assert seen > 50


def test_every_series_names_model_and_engine(series: Series) -> None:
    assert len(series) > 40
    for name, samples in series.items():
        assert name.startswith("quire_")
        for labels in samples:
            assert (labels["model_name"], labels["engine"]) == ("echo", "0"), (name, labels)
    said = {"kv_bytes": "category", "preemptions_total": "way", "prompt_tokens_by_source_total": "source",
            "num_requests_waiting_by_reason": "reason", "request_success_total": "finished_reason"}  # fmt: skip
    values = {name: {sample[label] for sample in series[f"quire_{name}"]} for name, label in said.items()}
    assert values["num_requests_waiting_by_reason"] == {"capacity", "deferred"}
    assert values["prompt_tokens_by_source_total"] == {"local_compute", "local_cache_hit"}
    assert values["request_success_total"] >= {"stop", "length", "abort", "error"}
    assert values["preemptions_total"] == {"swap", "recompute"}


def test_vllm_has_its_own_names(servers: Servers) -> None:
    found = scrape(servers, "vllm")
    wanted = [*OF_VLLM.split(), *(f"{name}_{end}" for name in HISTOGRAMS.split() for end in ("bucket", "count", "sum"))]
    assert not [name for name in wanted if f"vllm:{name}" not in found]
    bare = {name for name in found if not name.startswith("vllm:")}
    assert bare == {
        "http_requests_total",
        *(f"http_request_duration_seconds_{end}" for end in ("bucket", "count", "sum")),
    }
    for name, bounds in (
        ("time_to_first_token_seconds", "0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0"),
        ("request_time_per_output_token_seconds", "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0"),
        ("e2e_request_latency_seconds", "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0"),
    ):  # which its dashboards and service levels ask for by value
        assert set(bounds.split()) <= {sample["le"] for sample in found[f"vllm:{name}_bucket"]}
