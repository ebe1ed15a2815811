"""/v1/messages as Anthropic's clients see it: messages whole and streamed event by event, tools, thoughts, what is
cached, counted tokens, keys, and what is refused. Their own client: tests/clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asking import CALLS, HERMES, MARKERS, SAID, Talker, saying

from quire.server.adapter import parse_partial_arguments
from quire.server.anthropic.render import MessageBlocks
from quire.server.response_models import MessageError, MessagesResponse

pytestmark = pytest.mark.xdist_group(name="messages")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Tell."}
ASKED: dict[str, Any] = {"model": "echo", "max_tokens": 300, "messages": [USER]}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}


class Server(Talker):
    """With what this route is asked."""

    def ask(self, status: int = 200, **more: Any) -> Any:
        """The answer to ASKED and `more`, where None is left out."""
        body = {name: value for name, value in (ASKED | more).items() if value is not None}
        answer = self.http.post("/v1/messages", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def counted(self, **body: Any) -> int:
        answer = self.http.post("/v1/messages/count_tokens", json={"messages": [USER], **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["input_tokens"]

    def events(self, **more: Any) -> list[dict[str, Any]]:
        """The events of a stream, each of which has its name."""
        lines = self.http.post("/v1/messages", json=ASKED | more | {"stream": True}).text.split("\n\n")
        assert lines.pop() == ""
        found = []
        for line in lines:
            name, data = line.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with saying(HERMES, keys=["one", "two"], max_body=40_000, store_responses=1) as found:
        found.http.headers = httpx.Headers({"x-api-key": "one", "anthropic-version": "2023-06-01"})
        yield Server(*found)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events come to; they come in the order that Anthropic's do."""
    start, *middle, delta, stop = (event for event in events if event["type"] != "ping")
    assert [start["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    message, blocks, closed, text = start["message"], list[Any](), 0, ""
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    for event in middle:
        assert event["index"] == closed
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            blocks.append(event["content_block"])
            text = ""
        assert len(blocks) == closed + 1
        name, tool = blocks[-1]["type"], blocks[-1]["type"] == "tool_use"
        if kind == "delta":
            assert event["delta"]["type"] in ("input_json_delta" if tool else f"{name}_delta", "signature_delta")
            text += event["delta"].get("partial_json" if tool else name, "")
        elif kind == "stop":
            blocks[-1] = blocks[-1] | ({"input": parse_partial_arguments(text)} if tool else {name: text})
            closed += 1
        else:
            assert kind == "start"
    assert len(blocks) == closed
    return message | {"content": blocks} | delta["delta"] | {"usage": delta["usage"]}


def bare(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its ids, and without what depends on what was asked before."""
    MessagesResponse.model_validate(message)
    assert message["id"].startswith("msg_")
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content, "usage": message["usage"]["output_tokens"]}


def test_how_messages_end(served: Server) -> None:
    served.say("once upon a time there was")
    for cut in (served.ask(max_tokens=2), joined(served.events(max_tokens=2))):
        assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    for ended in (served.ask(stop_sequences=["x", " time"]), joined(served.events(stop_sequences=["x", " time"]))):
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", " time")
        assert ended["content"] == [{"type": "text", "text": "once upon a"}]
    served.say("once " * 1100)
    full = served.ask(max_tokens=2000)
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert full["usage"]["input_tokens"] + full["usage"]["cache_read_input_tokens"] < 1024
    served.say("")
    assert served.ask()["content"] == joined(served.events())["content"] == [{"type": "text", "text": ""}]


def test_what_a_client_may_leave_out_and_send(served: Server) -> None:
    served.say("a")
    usage = served.ask(model=None)["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    headers = {"anthropic-version": "none", "anthropic-beta": "x"}
    assert served.http.post("/v1/messages", json=ASKED, headers=headers).status_code == 200


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_is_held(served: Server, field: str) -> None:
    served.say("no JSON")
    form = {"type": "json_schema", "schema": {"const": {"city": "Oslo"}}}
    [block] = served.ask(**{field: {"format": form} if field == "output_config" else form})["content"]
    assert json.loads(block["text"]) == {"city": "Oslo"}


def test_a_prompt_that_is_too_long_is_counted(served: Server) -> None:
    long = {"messages": [{"role": "user", "content": "once " * 7000}]}  # more characters than a prompt may have too
    assert served.counted(**long) > 7000
    assert "prompt is too long" in served.ask(400, **long)["error"]["message"]
    answer = served.http.post("/v1/messages/count_tokens", json={"messages": [{**USER, "content": "once " * 9000}]})
    assert answer.status_code == 413


def test_tools(served: Server) -> None:
    served.say(SAID)
    whole = served.ask(tools=[TOOL])
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use", "text"]
    assert [block["input"] for block in whole["content"][1:3]] == [{"city": "Paris"}, {"city": "Oslo"}]
    assert (whole["model"], whole["stop_reason"], whole["stop_sequence"]) == ("echo", "tool_use", None)
    events = served.events(tools=[TOOL])
    assert bare(joined(events)) == bare(whole)
    assert [event["type"] for event in events][:3] == ["message_start", "ping", "content_block_start"]
    texts = ["", ""]
    for event in events:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[event["index"] - 1] += event["delta"]["partial_json"]
    assert [json.loads(text) for text in texts] == [{"city": "Paris"}, {"city": "Oslo"}]
    alone = served.ask(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in alone["content"]].count("tool_use") == 1
    none = served.ask(tools=[TOOL], tool_choice={"type": "none"})
    assert (none["stop_reason"], none["content"][0]["text"]) == ("end_turn", SAID)
    for choice, text in (
        ({"type": "any"}, '[{"name":"weather","arguments":{"city":"Rome"}}]'),
        ({"type": "tool", "name": "weather"}, '{"city":"Rome"}'),
    ):
        served.say(text)
        forced = served.ask(tools=[TOOL], tool_choice=choice)
        assert [(block["name"], block["input"]) for block in forced["content"]] == [("weather", {"city": "Rome"})]
        assert forced["stop_reason"] == "tool_use"
        assert bare(joined(served.events(tools=[TOOL], tool_choice=choice))) == bare(forced)
    cut = served.ask(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=4)
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"a": [1, 2', {"a": [1, 2]}), ("[1]", {}), ('{"a": NaN}', {}), ('{"a": 1e999}', {}), ('{"a": ' * 300 + "1", {})],
)
def test_arguments_that_were_cut(text: str, found: dict[str, Any]) -> None:
    assert parse_partial_arguments(text) == found


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "user", "content": [{"type": "text", "text": "Both."}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "See."}, USE, {**USE, "id": "b", "input": {"city": "Paris"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "gone"}], "is_error": True},
        RESULT, {"type": "text", "text": "Well?"},
    ]},
]  # fmt: skip


def test_a_history_is_the_messages_of_a_chat(served: Server) -> None:
    """The prompt has as many tokens as that of the messages they are, and is the same: all of it is cached then."""
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?\nBoth."},
        {"role": "assistant", "content": "See.", "reasoning_content": "Hm.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "b", "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    given = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    told = served.http.post("/tokenize", json=given).json()["count"]
    served.say("Yes.")
    served.http.post("/v1/chat/completions", json=given)
    asked: Any = {"messages": HISTORY, "system": [{"type": "text", "text": "Be kind."}], "tools": [TOOL]}
    usage = served.ask(**asked)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == told == served.counted(**asked)
    assert usage["cache_read_input_tokens"] >= told - 4  # all pages that are full
    started = served.events(**asked)[0]["message"]["usage"]
    assert started == usage | {"output_tokens": 0}


def test_the_last_message_is_continued(served: Server) -> None:
    served.say("upon")
    last = {"role": "assistant", "content": "once "}
    assert served.ask(messages=[USER, last])["content"][0]["text"] == "upon"
    told = {"messages": [USER, last], "continue_final_message": True}
    assert served.counted(messages=[USER, last]) == served.http.post("/tokenize", json=told).json()["count"]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": ["a"]}, "messages must be a list of objects"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
     "messages[0].content[0].source must have plain text"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type is 'video'"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type is 'tool_use'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [*HISTORY[:3], {"role": "user", "content": [{**RESULT, "is_error": "no"}]}]},
     "messages[3].content[0].is_error"),
    ({"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, PICTURE]}]},
     "messages[1].content[1].source is an image, and this model reads only text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
     "messages[0].content[0].source.type is 'url'"),
    ({"system": 5}, "system must be a string or a list of blocks"),
    ({"system": [PICTURE]}, "system[0].type is 'image'"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must have"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"top_k": "a"}, "top_k"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "from 1 to 299, less than max_tokens, got 300"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format must be an object that has"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"n": 2}, "n is not supported in /v1/messages"),
    ({"stop": ["a"]}, "stop is not supported in /v1/messages: it is stop_sequences here"),
    ({"thread": {"type": "create"}}, "thread is not supported: send all messages"),
]  # fmt: skip


def test_what_calls_are_not_held_to_is_told(served: Server) -> None:
    tools = [{**TOOL, "input_schema": {"properties": {"x": {"not": {}}}}}]
    answer = served.http.post("/v1/messages", json={**ASKED, "tools": tools, "tool_choice": {"type": "any"}})
    assert "not enforced in tool calls: tools[0].input_schema#/properties/x/not" in answer.headers["Warning"]


@pytest.mark.parametrize(("more", "text"), REFUSALS)
def test_refusals(served: Server, more: dict[str, Any], text: str) -> None:
    found = served.ask(400, **more)
    MessageError.model_validate(found)
    assert found["error"]["type"] == "invalid_request_error"
    assert text in found["error"]["message"]


def test_errors_around_the_route(served: Server) -> None:
    """Whoever answers, a client of this route gets what it knows."""
    url, post, kind = f"{served.running.url}/v1/messages", served.http.post, {"content-type": "application/json"}
    for answer, status, name in (
        *((httpx.post(url + path, json=ASKED, headers=keys), 401, "authentication_error")
          for path in ("", "/count_tokens", "/batches") for keys in ({}, {"x-api-key": "on"})),
        (post(url, json=ASKED | {"model": "claude"}), 404, "not_found_error"),
        (post(url, content=b"x" * 50_000), 413, "request_too_large"),
        (post(url, content=b"{", headers=kind), 400, "invalid_request_error"),
        (post(url, content=b"[]", headers=kind), 400, "invalid_request_error"),
        (served.http.get(url), 405, "invalid_request_error"),
    ):  # fmt: skip
        assert (answer.status_code, MessageError.model_validate(answer.json()).error.type) == (status, name)
    early = httpx.post(url, json=ASKED, headers={f"x-{i}": "y" for i in range(101)})  # no path is known yet
    assert (early.status_code, early.json()["error"]["type"]) == (431, "HeadersTooLargeError")
    assert "message" in httpx.post(f"{served.running.url}/v1/completions").json()["error"]  # OpenAI's, elsewhere


def test_the_key_has_two_headers(served: Server) -> None:
    other = {"Authorization": "Bearer two", "x-api-key": ""}
    assert served.http.post("/v1/messages?beta=true", json=ASKED, headers=other).status_code == 200
    twice = [("x-api-key", "one"), ("x-api-key", "one")]
    assert httpx.get(f"{served.running.url}/v1/models", headers=twice).status_code == 401
    both = {"Authorization": "Bearer no", "x-api-key": "one"}
    assert httpx.get(f"{served.running.url}/v1/models", headers=both).status_code == 200
    served.say("a")
    url = f"{served.running.url}/v1/responses/" + served.http.post("/v1/responses", json={"input": "a"}).json()["id"]
    assert served.http.get(url).status_code == 200
    for other in ({"x-api-key": "two"}, {"Authorization": "Bearer two"}):
        assert httpx.get(url, headers=other).status_code == 404
    assert httpx.get(url, headers={"Authorization": "Bearer one"}).status_code == 200


def test_what_is_ignored_is_named(served: Server) -> None:
    served.say("a")
    cached = {"type": "ephemeral"}
    block = {"type": "text", "text": "a", "cache_control": cached, "citations": None}
    body = ASKED | {
        "system": [block], "messages": [{"role": "user", "content": [{**block, "mood": 1}]}], "mood": 1,
        "tools": [{**TOOL, "cache_control": cached, "defer_loading": True}], "service_tier": "auto",
        "thinking": {"type": "adaptive", "budget": 5}, "output_config": {"effort": "low", "taste": 1},
    }  # fmt: skip
    wanted = ["cache_control", "mood", "output_config.taste", "reasoning_effort", "text.mood", "thinking.budget",
              "tools.defer_loading"]  # fmt: skip
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens"):
            del body["max_tokens"]
        answer = served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert sorted(answer.headers["warning"].split(": ")[1].rstrip('"').split(", ")) == wanted


def test_a_budget_of_a_model_without_thoughts(served: Server) -> None:
    served.say("a")
    asked = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 20}}
    answer = served.http.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"].rstrip('"').endswith(": thinking")
    assert [block["type"] for block in answer.json()["content"]] == ["text"]


def test_thoughts_pictures_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "<think></think>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    with saying(template, MARKERS) as found:
        server = Server(*found)
        server.say("<think>\nonce upon\n</think>\n\nquire")
        whole = server.ask()
        assert [(block["type"], block.get("thinking")) for block in whole["content"]] == [
            ("thinking", "once upon"), ("text", None),
        ]  # fmt: skip
        assert whole["content"][0]["signature"] == ""
        assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]
        events = server.events()
        assert bare(joined(events)) == bare(whole)
        at = [event.get("delta", {}).get("type") for event in events].index("signature_delta")
        assert events[at + 1]["type"] == "content_block_stop"
        hidden = server.ask(thinking={"type": "adaptive", "display": "omitted"})
        assert [block["type"] for block in hidden["content"]] == ["text"]
        short = server.ask(thinking={"type": "enabled", "budget_tokens": 2})
        assert short["usage"]["output_tokens_details"]["thinking_tokens"] == 2
        off = server.counted(thinking={"type": "disabled"})
        assert off == server.counted() + 2  # what the template writes then
        assert server.counted(thinking={"type": "enabled", "budget_tokens": 2}) == server.counted()

        def fails(*given: Any) -> Any:
            raise RuntimeError("secret")

        monkeypatch.setattr(MessageBlocks, "finish", fails)
        assert server.events()[-1] == {"type": "error", "error": {"type": "api_error", "message": "internal error"}}
        assert server.ask(500)["error"] == {"type": "api_error", "message": "internal error"}
