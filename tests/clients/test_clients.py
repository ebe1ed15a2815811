"""Clients that aren't ours, unmodified: the examples of extraction, by instructor in every mode of OpenAI's and
Anthropic's clients, by langchain's methods and by OpenAI's client for JavaScript; an agent of OpenAI's agents' library.
Anthropic's client, step by step. They live in an environment of their own (`make .venv/.clients`)."""

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

from quire.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients"
PYTHON = CLIENTS / "bin" / "python"
PROMPTED = "instructor JSON", "instructor MD_JSON", "instructor ANTHROPIC_JSON", "langchain json_mode"
"""What leaves it to the model to answer as it was asked."""
FREE = "instructor PARALLEL_TOOLS", "instructor ANTHROPIC_PARALLEL_TOOLS"
"""What leaves it to the model to call."""
OPEN = "instructor JSON_O1", "instructor JSON_SCHEMA"
"""What allows other members, so that what is drawn at random may not end in time."""
Served = tuple[str, Callable[[str], None]]
MARKERS = "<think>", "</think>"
TEMPLATE = "<think></think>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose model says what it is told to, unless a grammar forbids it."""
    runner = Saying()
    with echo_service.serving(echo_service.built(runner, kv_tokens=8192, max_len=4096)) as running:
        yield f"{running.url}/v1", runner.say


def answers(url: str, *wanted: str) -> dict[str, Any]:
    program = Path(__file__).with_name("asking_clients.py")
    done = subprocess.run([PYTHON, program, url, "echo", *wanted], capture_output=True, text=True, timeout=110)
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


def test_an_agent_with_a_tool(served: Served) -> None:
    """By /v1/responses: the library asks for the tool's result, then for the answer."""
    url, say = served
    say('[{"name": "weather", "arguments": {"city": "Paris"}}]')
    program = [PYTHON, Path(__file__).with_name("running_agent.py"), url, "echo"]
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


@pytest.fixture(scope="module")
def say_and_step() -> Iterator[tuple[Callable[[str], None], Callable[[str], Any]]]:
    """What the model is to say, and the client, which writes a line and reads one."""
    runner = Saying(echo_service.tokenizer(MARKERS))
    model = echo_service.built(runner, kv_tokens=8192, max_len=2048)
    model = model._replace(chat_template=ChatTemplate(TEMPLATE, {}), tokenizer=echo_service.tokenizer(MARKERS))
    with echo_service.serving(model, keys=["one"], max_body=40_000) as running:
        program = [PYTHON, Path(__file__).with_name("running_anthropic.py"), running.url, "echo"]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:

            def step(line: str) -> Any:
                client.stdin.write(f"{line}\n")
                client.stdin.flush()
                return json.loads(client.stdout.readline())

            yield runner.say, step
            client.stdin.close()
        assert client.returncode == 0


def test_messages(say_and_step: Any) -> None:
    say, step = say_and_step
    say("once upon a time")
    created = step("create")
    assert created["content"] == [{"type": "text", "text": "once upon a time"}]
    assert (created["stop_reason"], created["role"]) == ("end_turn", "assistant")
    assert step("count") > 0
    say('<think>once</think>{"title":"once","number":7}')
    assert step("parse") == {"title": "once", "number": 7}


def test_streams(say_and_step: Any) -> None:
    say, step = say_and_step
    say("<think>\nonce upon\n</think>\n\nquire")
    text, message, _ = step("stream")
    assert text == "quire"
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == "once upon"
    assert message["usage"]["output_tokens"] > message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    say('[{"name": "weather", "arguments": {"city": "Paris"}}]')
    _, message, events = step("stream")
    assert (message["stop_reason"], message["content"][0]["input"]) == ("tool_use", {"city": "Paris"})
    assert {"input_json", "content_block_stop", "message_stop"} <= {*events}


def test_a_loop_with_a_tool(say_and_step: Any) -> None:
    say, step = say_and_step
    say('[{"name": "weather", "arguments": {"city": "Paris"}}]')
    assert step("tools") == "Paris"
    say("Paris: rain.")
    assert step("rain") == ["tool_use", "end_turn", "Paris: rain."]


def test_errors(say_and_step: Any) -> None:
    _, step = say_and_step
    found = step("errors")
    assert [(name, code, body["error"]["type"]) for name, code, body in found] == [
        ("BadRequestError", 400, "invalid_request_error"),
        ("NotFoundError", 404, "not_found_error"),
        ("AuthenticationError", 401, "authentication_error"),
        ("ContentTooLargeError", 413, "request_too_large"),
    ]
