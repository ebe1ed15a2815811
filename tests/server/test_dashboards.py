"""What dashboards ask for is there: our own, and the names that vLLM's ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from echo_service import Servers
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.xdist_group(name="dashboards")

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
    """And has the values that queries match."""
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
