"""Requests as Codex sends them to /v1/responses, written after the types of its source (ResponsesApiRequest and
ResponseItem): each has the whole conversation, and the items of answers come back without their ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import echo_service
import pytest
from echo_service import Running, Saying

from quire.text.chat_template import ChatTemplate

Json = dict[str, Any]
MARKERS = "<think>", "</think>"
TEMPLATE = (
    "{{ tools }}<think></think>{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}{% endfor %}"
)
STRING = {"type": "string"}
SHELL: Json = {
    "type": "function", "name": "shell_command", "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object", "additionalProperties": False, "required": ["command"],
        "properties": {"command": {"type": "string", "description": "The shell script to execute"},
                       "workdir": STRING, "timeout_ms": {"type": "number"}},
    },
}  # fmt: skip
STEP = {"type": "object", "properties": {"step": STRING, "status": STRING}, "required": ["step", "status"],
        "additionalProperties": False}  # fmt: skip
PLAN: Json = {
    "type": "function", "name": "update_plan", "description": "Updates the task plan.", "strict": False,
    "parameters": {"type": "object", "properties": {"explanation": STRING, "plan": {"type": "array", "items": STEP}},
                   "required": ["plan"], "additionalProperties": False},
}  # fmt: skip
PATCH: Json = {
    "type": "custom", "name": "apply_patch", "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
}  # fmt: skip
TOOLS = [SHELL, PLAN, PATCH, {"type": "local_shell"}, {"type": "web_search", "external_web_access": False}]
LEFT_OUT = ("tools[2].format", "tools[3] (local_shell)", "tools[4] (web_search)")
HEADERS = {
    "accept": "text/event-stream", "originator": "codex_cli_rs", "openai-beta": "responses=experimental",
    "user-agent": "codex_cli_rs/0.98.0", "session_id": "0", "conversation_id": "0",
}  # fmt: skip


def said(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


OPENING = [
    said("developer", "<permissions instructions>Ask before you write.</permissions instructions>"),
    said("user", "# AGENTS.md instructions for /repo\n\n<INSTRUCTIONS>\nBe short.\n</INSTRUCTIONS>"),
    said("user", "<environment_context>\n  <cwd>/repo</cwd>\n  <shell>bash</shell>\n</environment_context>"),
    said("user", "What is here?"),
]
ACTION = {"type": "exec", "command": ["ls"], "timeout_ms": None, "working_directory": "/repo", "env": None}
EARLIER = [  # what other models of the same conversation did
    {"type": "custom_tool_call", "status": "completed", "call_id": "p", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "p", "output": '{"output":"Success.","metadata":{"exit_code":0}}'},
    {"type": "local_shell_call", "call_id": "s", "status": "completed", "action": ACTION},
    {"type": "function_call_output", "call_id": "s", "output": "src"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "quire"}},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": "gAAAAABo"},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "0", "parent": None}},
    {"type": "compaction", "encrypted_content": "gAAAAABo"},
]


class Codex:
    """Its side of a conversation."""

    def __init__(self, running: Running) -> None:
        self.http, self.input = running.http, [*OPENING]

    def ask(self) -> tuple[list[Json], Json, str]:
        """The items of an answer, which are added to the conversation, its usage, and the Warning."""
        body = {
            "model": "echo", "instructions": "You are Codex, a coding agent. " * 20, "input": self.input,
            "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0", "text": {"verbosity": "low"},
        }  # fmt: skip
        with self.http.stream("POST", "/v1/responses", json=body, headers=HEADERS) as answer:
            lines = [*answer.iter_lines()]
        assert answer.status_code == 200, lines
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for item in done:
            kept = {name: value for name, value in item.items() if name not in ("id", "status")}
            if item["type"] == "reasoning":
                kept = {"encrypted_content": None, **kept}
            self.input.append(kept)
        return done, events[-1]["response"]["usage"], answer.headers["warning"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, Any]]:
    words = echo_service.tokenizer(MARKERS)
    runner = Saying(words)
    model = echo_service.built(runner, kv_tokens=32768, max_len=16384, max_num_batched_tokens=1024)
    model = model._replace(chat_template=ChatTemplate(TEMPLATE, {}), tokenizer=words)
    with echo_service.serving(model) as running:
        yield running, runner.say


def test_a_conversation(served: Any) -> None:
    """A call with reasoning, its result, an answer, and a second turn after what other models did."""
    running, say = served
    codex = Codex(running)
    say('<think>look</think>[{"name": "shell_command", "arguments": {"command": "ls"}}]', "A reader.", "Nothing more.")
    [thought, call], first, warning = codex.ask()
    assert thought["content"] == [{"type": "reasoning_text", "text": "look"}]
    assert (call["name"], json.loads(call["arguments"])) == ("shell_command", {"command": "ls"})
    assert all(name in warning for name in LEFT_OUT)
    codex.input.append({"type": "function_call_output", "call_id": call["call_id"], "output": "Exit code: 0\nreader"})
    [message], second, _ = codex.ask()
    assert message["content"][0]["text"] == "A reader."
    assert second["input_tokens_details"]["cached_tokens"] > 0.9 * first["input_tokens"]
    codex.input += [*EARLIER, said("user", "And now?")]
    [message], third, warning = codex.ask()
    assert message["content"][0]["text"] == "Nothing more."
    assert third["input_tokens_details"]["cached_tokens"] > 0.9 * second["input_tokens"]
    for name in ("(web_search_call)", "(ghost_snapshot)", "and 1 more"):
        assert name in warning
    assert "(local_shell_call)" not in warning  # it is shown as a call
