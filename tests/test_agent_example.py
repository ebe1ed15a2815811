"""Examples for clients, over the bundled model: the agent calls its tool and gets an answer; an extraction is a recipe,
whatever the model knows of bread."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import echo_service
import pytest
from openai import OpenAI

from quire.build import build
from quire.config import EngineConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = build(EngineConfig(kv_tokens=4096, max_num_seqs=4, device="cpu"))
    with echo_service.serving(model) as running:
        yield f"{running.url}/v1"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def test_an_extraction_is_of_the_form(url: str) -> None:
    extraction = example("extraction")
    extraction.MODEL = "echo"
    recipe = extraction.by_openai(url)
    assert isinstance(recipe, extraction.Recipe)
    assert recipe.ingredients


def test_it_calls_its_tool(url: str) -> None:
    agent = example("agent")
    with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        question, called, result, *rest = agent.run(client, "How many pages has a quire?")
    assert question["role"] == "user"
    [call] = called["tool_calls"]
    assert call["function"]["name"] == "pages"
    thing = json.loads(call["function"]["arguments"])["thing"]
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": str(agent.PAGES[thing])}
    assert rest[-1]["role"] == "assistant"
    assert rest[-1]["content"]
