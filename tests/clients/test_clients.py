"""Clients that aren't ours, unmodified: the examples of extraction, by instructor in every mode of OpenAI's and
Anthropic's clients, by langchain's methods and by OpenAI's client for JavaScript; an agent of OpenAI's agents' library.
They live in an environment of their own (`make .venv/.clients`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_service
import pytest
from asking_clients import ANTHROPIC, METHODS, MODES, RECIPE, RESPONSES
from echo_service import Saying

from quire.build import build
from quire.config import EngineConfig

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
PROMPTED = "instructor JSON", "instructor MD_JSON", "instructor ANTHROPIC_JSON", "langchain json_mode"
"""What leaves it to the model to answer as it was asked."""
FREE = "instructor PARALLEL_TOOLS", "instructor ANTHROPIC_PARALLEL_TOOLS"
"""What leaves it to the model to call."""
OPEN = "instructor JSON_O1", "instructor JSON_SCHEMA"
"""What allows other members, so that what is drawn at random may not end in time."""
Served = tuple[str, Callable[[str], None]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose model says what it is told to, unless a grammar forbids it."""
    runner = Saying()
    with echo_service.serving(echo_service.built(runner, kv_tokens=8192, max_len=4096)) as running:
        yield f"{running.url}/v1", runner.say


def answers(url: str, *wanted: str) -> dict[str, Any]:
    program = Path(__file__).with_name("asking_clients.py")
    done = subprocess.run(
        [CLIENTS / "bin" / "python", program, url, "echo", *wanted], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_instructor_and_langchain(served: Served) -> None:
    """Where a grammar sees to it the form is right, whatever the model would say."""
    url, say = served
    say("I don't know.")
    found = answers(url)
    assert found.keys() == {
        "openai", *(f"instructor {mode}" for mode in (*MODES, *RESPONSES, *ANTHROPIC)),
        *(f"langchain {method}" for method in METHODS),
    }  # fmt: skip
    for name, recipe in found.items():
        of_the_form = isinstance(recipe, dict) or (name in OPEN and recipe.startswith("IncompleteOutputException"))
        assert of_the_form == (name not in PROMPTED + FREE), (name, recipe)
    say(json.dumps(RECIPE))
    assert answers(url, *PROMPTED) == dict.fromkeys(PROMPTED, RECIPE)


def test_calls_that_the_model_is_free_to_make(served: Served) -> None:
    url, say = served
    say(json.dumps([{"name": "Recipe", "arguments": RECIPE}]))
    assert answers(url, *FREE) == dict.fromkeys(FREE, RECIPE)


def test_examples_over_the_bundled_model() -> None:
    """As one runs them: the recipe is one, whatever the model knows of bread."""
    model = build(EngineConfig(kv_tokens=4096, max_num_seqs=4, device="cpu"))
    wanted = "openai", "instructor TOOLS", "langchain json_schema"
    with echo_service.serving(model) as running:
        found = answers(f"{running.url}/v1", *wanted)
    assert found.keys() == {*wanted}
    for name, recipe in found.items():
        assert isinstance(recipe, dict), (name, recipe)
        assert recipe["ingredients"], name


def test_an_agent_with_a_tool(served: Served) -> None:
    """By /v1/responses: the library asks for the tool's result, then for the answer."""
    url, say = served
    say('[{"name": "weather", "arguments": {"city": "Paris"}}]')
    program = [CLIENTS / "bin" / "python", Path(__file__).with_name("running_agent.py"), url, "echo"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout.readline() == "Paris\n"
        say("Paris: rain.")
        assert agent.communicate("rain\n", timeout=60) == ("Paris: rain.\n", None)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_javascript(served: Served, tmp_path: Path) -> None:
    url, say = served
    say('{"title": "bread", "minutes": 40}')
    example = (ROOT / "examples" / "extraction.mjs").read_text().replace('"tiny"', '"echo"')
    (tmp_path / "extraction.mjs").write_text(example)
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    done = subprocess.run(["node", "extraction.mjs", url], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"title": "bread", "minutes": 40}
