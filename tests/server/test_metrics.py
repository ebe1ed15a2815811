"""Exact counts after known requests."""

from __future__ import annotations

import echo_service
import httpx
from prometheus_client.parser import text_string_to_metric_families


def samples(url: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if "le" not in sample.labels:
                label = next(iter(sample.labels.values()), "") if len(sample.labels) == 1 else ""
                found[f"{sample.name}:{label}" if label else sample.name] = sample.value
    return found


def test_counts_after_three_requests() -> None:
    with echo_service.serving() as running:
        for i in range(3):
            body = {"prompt": [10 + i] * 10, "max_tokens": 8, "ignore_eos": True}
            assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
        body = {"prompt": [10] * 10, "max_tokens": 4, "n": 2, "ignore_eos": True}
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
        assert running.idle()
        found = samples(running.url)
        assert found["quire_prompt_tokens_total"] == 40
        assert found["quire_generation_tokens_total"] == 3 * 8 + 2 * 4
        assert found["quire_iteration_tokens_total_sum"] == 40 + 32
        assert found["quire_request_success_total:length"] == 4
        assert found["quire_request_prompt_tokens_sum"] == 40
        assert found["quire_request_generation_tokens_sum"] == 32
        assert found["quire_request_params_n_sum"] == 5
        assert found["quire_request_params_max_tokens_sum"] == 28
        assert found["quire_time_to_first_token_seconds_count"] == 4
        assert found["quire_inter_token_latency_seconds_count"] == 3 * 7 + 2 * 3
        for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert found[f"quire_{name}_seconds_count"] == 4
        assert found["quire_prefix_cache_queries_total"] == 40
        assert found["quire_prefix_cache_hits_total"] == 8
        assert found["quire_num_preemptions_total"] == 0
        categories = [value for name, value in found.items() if name.startswith("quire_kv_bytes:")]
        assert sum(categories) == running.llm.engine.scheduler.memory.usage().total
        assert found["quire_cache_config_info"] == 1
