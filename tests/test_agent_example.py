"""The agent of the examples, over the bundled model: it calls its tool, and gets an answer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import echo_service
from openai import OpenAI

from quire.build import build
from quire.config import EngineConfig

EXAMPLE = Path(__file__).parents[1] / "examples" / "agent.py"


def test_it_calls_its_tool() -> None:
    spec = importlib.util.spec_from_file_location("agent", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    model = build(EngineConfig(kv_tokens=4096, max_num_seqs=4, device="cpu"))
    with (
        echo_service.serving(model) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        question, called, result, *rest = agent.run(client, "How many pages has a quire?")
    assert question["role"] == "user"
    [call] = called["tool_calls"]
    assert call["function"]["name"] == "pages"
    thing = json.loads(call["function"]["arguments"])["thing"]
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": str(agent.PAGES[thing])}
    assert rest[-1]["role"] == "assistant"
    assert rest[-1]["content"]
