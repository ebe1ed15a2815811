"""An example for clients, over the bundled model: the agent calls its tool and gets an answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import echo_service
import pytest
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # scripts, not a part of the package

import agent

from quire.config import EngineConfig
from quire.startup.build import build


@contextmanager
def client_of(**settings: Any) -> Iterator[OpenAI]:
    model = build(EngineConfig(kv_tokens=4096, max_num_seqs=4, device="cpu", **settings))
    with (
        echo_service.serving(model) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_it_calls_its_tool() -> None:
    with client_of() as client:
        question, called, *rest = agent.run(client, "How many pages has a quire?")
    assert question["role"] == "user"
    results = {message["tool_call_id"]: message["content"] for message in rest if message["role"] == "tool"}
    for call in called["tool_calls"]:
        assert call["function"]["name"] == "pages"
        thing = json.loads(call["function"]["arguments"])["thing"]
        assert results[call["id"]] == str(agent.PAGES[thing])
    assert rest[-1]["role"] == "assistant"
    assert rest[-1]["content"]


@pytest.mark.parametrize(("max_tokens", "settings"), [(5, {}), (12, {}), (100, {"max_model_len": 192})])
def test_it_survives(max_tokens: int, settings: dict[str, Any]) -> None:
    """Calls that are cut, and a conversation that outgrows the model."""
    with client_of(**settings) as client:
        messages = agent.run(client, "How many pages has a quire?", max_tokens)
    assert messages[0]["role"] == "user"
    if max_tokens == 12:
        assert any(message["content"].startswith("Error: ") for message in messages if message["role"] == "tool")
