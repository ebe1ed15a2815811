"""Anthropic's own Python client on /v1/messages, unmodified, from the environment of clients."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_service
import pytest
from echo_service import Saying

from quire.text.chat import ChatTemplate

PYTHON = Path(__file__).parents[2] / ".venv" / "clients" / "bin" / "python"
MARKERS = "<think>", "</think>"
TEMPLATE = "<think></think>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
Step = Callable[[str], Any]


@pytest.fixture(scope="module")
def say_and_step() -> Iterator[tuple[Callable[[str], None], Step]]:
    """What the model is to say, and the client, which writes a line and reads one."""
    runner = Saying(echo_service.tokenizer(MARKERS))
    model = echo_service.built(runner, kv_tokens=8192, max_len=2048)
    model = model._replace(chat=ChatTemplate(TEMPLATE, {}), tokenizer=echo_service.tokenizer(MARKERS))
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
    text, message = step("stream")
    assert text == "quire"
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == "once upon"
    assert message["usage"]["output_tokens"] > message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    say('[{"name": "weather", "arguments": {"city": "Paris"}}]')
    _, message = step("stream")
    assert (message["stop_reason"], message["content"][0]["input"]) == ("tool_use", {"city": "Paris"})
    assert {"input_json", "content_block_stop", "message_stop"} <= {*step("events")}


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
