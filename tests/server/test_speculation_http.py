"""Speculative decoding over HTTP, with the bundled pair of models: the same answers, and the counts of draft tokens in
metrics, usage, the console and the status line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import echo_service
import pytest
from echo_service import Running
from test_console import scenes
from test_metrics import samples

from quire.config import EngineConfig
from quire.server.shutdown import status_line

pytestmark = pytest.mark.xdist_group(name="speculation_http")  # they share what takes seconds to make

DETAILS = "completion_tokens_details"
LONG = {"max_tokens": 48, "ignore_eos": True, "seed": 6, "temperature": 1.2}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    config = EngineConfig(
        device="cpu", kv_tokens=4096, threads=1, speculative_model="tiny-draft", speculative_method="both",
        adaptive_speculation=False,
    )  # fmt: skip
    with echo_service.serving(config, metrics_prefix="vllm") as found:
        yield found


def counts(running: Running) -> list[float]:
    found = samples(running.url)
    return [found[f"vllm:spec_decode_{name}_total"] for name in NAMES]


def post(running: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "Once"}), ("/v1/chat/completions", CHAT)])
def test_answers_are_the_same_and_usage_counts_drafts(running: Running, path: str, body: dict[str, Any]) -> None:
    before = counts(running)
    plain, drafted = (post(running, path, **body, **LONG, speculate=speculate) for speculate in (False, True))
    choices, others = plain["choices"], drafted["choices"]
    assert choices == others
    assert DETAILS not in plain["usage"]
    assert running.idle()
    runs, draft_tokens, accepted = (now - was for now, was in zip(counts(running), before))
    details = drafted["usage"].pop(DETAILS)
    assert details == {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": draft_tokens - accepted}
    assert 0 < accepted < draft_tokens
    assert runs <= 48
    assert drafted["usage"]["completion_tokens"] == 48


def test_each_chunk_has_the_counts_so_far(running: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["One", "Two"], **LONG, "stream": True, "stream_options": options}
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    *parts, total = chunks
    last = {part["choices"][0]["index"]: part["usage"][DETAILS] for part in parts if DETAILS in part["usage"]}
    assert total["usage"][DETAILS] == {name: last[0][name] + last[1][name] for name in last[0]}


def test_tokens_after_a_stop_string_are_not_accepted(running: Running) -> None:
    body = {"prompt": [300] * 12, "temperature": 0, "logit_bias": {"300": 100}, "ignore_eos": True}
    text = post(running, "/v1/completions", **body, max_tokens=1)["choices"][0]["text"]
    usage = post(running, "/v1/completions", **body, max_tokens=40, stop=[text * 2])["usage"]
    details, completion = usage[DETAILS], usage["completion_tokens"]
    assert 0 <= details["accepted_prediction_tokens"] <= completion == 2
    assert details["rejected_prediction_tokens"] > 0


def test_metrics_have_the_places_of_accepted_tokens(running: Running) -> None:
    post(running, "/v1/completions", prompt="Once upon", **LONG)
    assert running.idle()
    found = samples(running.url)
    places = {
        name.rpartition(":")[2]: value
        for name, value in found.items()
        if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total:")
    }
    assert list(places) == ["0", "1", "2", "3", "4"]  # --num-speculative-tokens
    assert sum(places.values()) == found["vllm:spec_decode_num_accepted_tokens_total"]
    assert sorted(places.values(), reverse=True) == list(places.values())


def test_the_console_and_the_status_line_say_what_is_accepted(running: Running) -> None:
    post(running, "/v1/completions", prompt="There was", **LONG)
    assert running.idle()
    runs, draft_tokens, accepted = counts(running)
    drafts = scenes(running, 1)[0]["drafts"]
    assert drafts == {"accepted": accepted / draft_tokens, "length": 1 + accepted / runs}
    assert f", accepted {accepted / draft_tokens:.0%} of drafts, {1 + accepted / runs:.2f} tokens each" in status_line(
        running.llm, 0.0, 0.0
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**CHAT, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_every_api_takes_the_parameter(running: Running, path: str, body: dict[str, Any]) -> None:
    before = counts(running)
    post(running, path, model="echo", **body, speculate=False)
    assert counts(running) == before
    refused = running.http.post(path, json={"model": "echo", **body, "speculate": [1]})
    assert refused.status_code == 400
    assert "speculate" in refused.text


def test_without_speculation_nothing_is_shown(running: Running) -> None:
    with echo_service.serving(placement="thread") as plain:
        assert scenes(plain, 1)[0]["drafts"] is None
        assert "of drafts" not in status_line(plain.llm, 0.0, 0.0)
        assert DETAILS not in post(plain, "/v1/completions", prompt="a", max_tokens=4)["usage"]
