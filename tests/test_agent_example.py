"""An example for clients, over the bundled model: the agent calls its tool and gets an answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import echo_service
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # scripts, not a part of the package

import agent

from quire.config import EngineConfig
from quire.startup.build import build


def test_it_calls_its_tool() -> None:
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
