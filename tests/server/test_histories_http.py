"""Histories that agents replay over HTTP, in the form of each API: they are answered, and a Warning names what was left
out or changed. The prompt is that of the nearest chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import echo_service
import pytest
from echo_service import Running, Servers

from quire.text.chat_template import ChatTemplate

TEMPLATE = (
    "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}{% endfor %}"
)
USER = {"role": "user", "content": "Weather?"}
Body = dict[str, Any]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    model = echo_service.built(echo_service.Saying(), kv_tokens=8192, max_len=2048)
    with echo_service.serving(model._replace(chat_template=ChatTemplate(TEMPLATE, {}))) as running:
        yield running


def call(arguments: str = "{}", name: str = "weather", id: str = "c1") -> Body:
    made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def result(text: str = "sun", id: str = "c1") -> Body:
    return {"role": "tool", "tool_call_id": id, "content": text}


def tokens_of(served: Running, messages: list[Body], **more: Any) -> int:
    answer = served.http.post("/tokenize", json={"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["count"])


# A chat's messages, and the words of its Warning.
CHATS: dict[str, tuple[list[Body], str]] = {
    "cut arguments": ([USER, call('{"a": '), result()], "messages[1].tool_calls[0].function.arguments is no JSON"),
    "a list": ([USER, call("[1]"), result()], "messages[1].tool_calls[0].function.arguments is no JSON object"),
    "null content": ([USER, {"role": "assistant", "content": None, "refusal": None}, USER], ""),
    "refusal": ([USER, {"role": "assistant", "content": None, "refusal": "no"}, USER], ""),
    "no content": ([USER, {"role": "assistant"}, USER], ""),
    "an unknown id": ([USER, call(), result(id="z")], ""),
    "a result first": ([result(), USER], ""),
    "a message between": ([USER, call(), USER, result()], ""),
    "a long name": ([USER, call(name="a b/c:d" * 20), result()], ""),
    "an empty id": ([USER, call(id=""), result(id="")], ""),
    "a long id": ([USER, call(id="x" * 300), result(id="x" * 300)], ""),
    "another part": (
        [USER, {"role": "assistant", "content": [{"type": "x"}]}, USER],
        "messages[1].content[0] was",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(served: Running, name: str) -> None:
    messages, words = CHATS[name]
    answer = served.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert words in answer.headers.get("warning", "")
    assert bool(words) == ("warning" in answer.headers)
    assert answer.json()["usage"]["prompt_tokens"] == tokens_of(served, messages)


TEXT = {"type": "text", "text": "hi"}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "sun"}
FOUND = {"type": "search_result", "source": "http://x", "title": "T", "content": [TEXT]}
DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
BILLED = [
    {"type": "text", "text": "x-anthropic-billing-header: cch=abc"},
    {"type": "text", "text": "Be."},
]


def said(*blocks: Any) -> Body:
    return {"role": "assistant", "content": [*blocks]}


def asked(*blocks: Any) -> Body:
    return {"role": "user", "content": [*blocks]}


# A body of /v1/messages, the chat that it is, and the words of its Warning.
MESSAGES: dict[str, tuple[Body, list[Body], str]] = {
    "a trailing call": ({"messages": [USER, said(USE)]}, [USER, call()], ""),
    "no call": ({"messages": [USER, asked(RESULT)]}, [USER, result()], ""),
    "result after text": (
        {"messages": [USER, said(USE), asked(TEXT, RESULT)]}, [USER, call(), result(), {**USER, "content": "hi"}], "",
    ),
    "an unknown id": (
        {"messages": [USER, said(USE), asked({**RESULT, "tool_use_id": "z"})]}, [USER, call(), result(id="z")], "",
    ),
    "input of text": (
        {"messages": [USER, said({**USE, "input": "{"}), asked(RESULT)]}, [USER, call("{"), result()],
        "messages[1].content[0].input is no JSON",
    ),
    "a name": (
        {"messages": [USER, said({**USE, "name": "a b"}), asked(RESULT)]}, [USER, call(name="a b"), result()], "",
    ),
    "no input": ({"messages": [USER, said({"type": "tool_use", "id": "c1", "name": "weather"})]}, [USER, call()], ""),
    "null content": (
        {"messages": [USER, {"role": "assistant", "content": None}, USER]}, [USER, {"role": "assistant"}, USER], "",
    ),
    "a result of texts": (
        {"messages": [USER, said(USE), asked({**RESULT, "content": ["a", "b"]})]}, [USER, call(), result("a\nb")], "",
    ),
    "a tool's reference": (
        {"messages": [USER, said(USE), asked({**RESULT, "content": [{"type": "tool_reference", "tool_name": "f"}]})]},
        [USER, call(), result("")], "messages[2].content[0].content[0] (tool_reference)",
    ),
    "found in a result": (
        {"messages": [USER, said(USE), asked({**RESULT, "content": [FOUND, DOCUMENT]})]},
        [USER, call(), result("T\nhttp://x\nhi\nT\nhi")], "",
    ),
    "a PDF in a result": (
        {"messages": [USER, said(USE), asked({**RESULT, "content": [{**DOCUMENT, "source": {"type": "base64"}}]})]},
        [USER, call(), result("")], "messages[2].content[0].content[0] (document)",
    ),
    "a document": ({"messages": [asked(DOCUMENT)]}, [{**USER, "content": "T\nhi"}], ""),
    "the past's tools": (
        {"messages": [USER, said({"type": "server_tool_use", "id": "s", "name": "web", "input": {}}, TEXT), USER]},
        [USER, {"role": "assistant", "content": "hi"}, USER], "messages[1].content[0] (server_tool_use)",
    ),
    "a billing header": (
        {"messages": [USER], "system": BILLED}, [{"role": "system", "content": "Be."}, USER],
        "system[0] (x-anthropic-billing-header)",
    ),
    "another tool": (
        {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, [USER],
        "tools[0] (web_search_20250305)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(served: Running, name: str) -> None:
    body, chat, words = MESSAGES[name]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = served.http.post(path, json=body | ({} if "count" in path else {"max_tokens": 1}))
        assert answer.status_code == 200, answer.text
        assert words in answer.headers.get("warning", "")
        assert bool(words) == ("warning" in answer.headers)
    assert answer.json()["input_tokens"] == tokens_of(served, chat)


def item(kind: str, **fields: Any) -> Body:
    return {"type": kind, **fields}


CALLED = item("function_call", call_id="c1", name="weather", arguments="{}")
OUTPUT = item("function_call_output", call_id="c1", output="sun")
ITEMS: dict[str, tuple[list[Body], list[Body], str]] = {  # items, the chat that they are, and the words of the Warning
    "cut arguments": (
        [USER, {**CALLED, "arguments": '{"a', "status": "incomplete"}, OUTPUT], [USER, call('{"a'), result()],
        "input[1].arguments is no JSON",
    ),
    "a list": ([USER, {**CALLED, "arguments": "[1]"}, OUTPUT], [USER, call("[1]"), result()], "input[1].arguments"),
    "no call": ([USER, OUTPUT], [USER, result()], ""),
    "a name": ([USER, {**CALLED, "name": "a/b"}, OUTPUT], [USER, call(name="a/b"), result()], ""),
    "null content": (
        [USER, item("message", role="assistant", content=None), USER], [USER, {"role": "assistant"}, USER], "",
    ),
    "a custom tool": (
        [USER, item("custom_tool_call", call_id="c1", name="sh", input="ls"),
         item("custom_tool_call_output", call_id="c1", output="a")],
        [USER, call('{"input": "ls"}', name="sh"), result("a")], "",
    ),
    "a shell": (
        [USER, item("local_shell_call", id="a", call_id="b", action={"command": ["ls"]}),
         item("local_shell_call_output", id="a", output="x"), USER,
         item("local_shell_call", call_id="c"), item("local_shell_call_output", id="c", output="y")],
        [USER, call('{"command": ["ls"]}', name="local_shell", id="b"), result("x", id="b"), USER,
         call(name="local_shell", id="c"), result("y", id="c")], "",
    ),
    "a shell whose result is a function's": (
        [USER, item("local_shell_call", id="a", call_id="b", action={"command": ["ls"]}),
         {**OUTPUT, "call_id": "b"}],
        [USER, call('{"command": ["ls"]}', name="local_shell", id="b"), result(id="b")], "",
    ),
    "a search": ([item("web_search_call", id="a", status="completed"), USER], [USER], "input[0] (web_search_call)"),
    "a reference": ([item("item_reference", id="zz"), USER], [USER], "input[0] (item_reference)"),
    "another part": (
        [USER, item("message", role="assistant", content=[item("x"), item("output_text", text="hi")]), USER],
        [USER, {"role": "assistant", "content": "hi"}, USER], "input[1].content[0] (x)",
    ),
    "no id": ([USER, {**CALLED, "call_id": None}, OUTPUT], [USER, call(id=""), result()], ""),
    "an object": ([USER, {**CALLED, "arguments": {"a": 1}}, OUTPUT], [USER, call('{"a": 1}'), result()], ""),
    "a user's other item": (
        [item("input_message", role="user", content="hi"), item("input_text", text="you")],
        [{**USER, "content": "hi"}, {**USER, "content": "you"}], "",
    ),
    "an object as output": ([USER, CALLED, {**OUTPUT, "output": {"a": 1}}], [USER, call(), result('{"a": 1}')], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ITEMS)
def test_items(served: Running, name: str) -> None:
    items, chat, words = ITEMS[name]
    answer = served.http.post("/v1/responses", json={"input": items, "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert words in answer.headers.get("warning", "")
    assert bool(words) == ("warning" in answer.headers)
    assert answer.json()["usage"]["input_tokens"] == tokens_of(served, chat)


def test_tools_that_are_not_run_are_left_out(served: Running) -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    tools = [{"type": "web_search"}, function, {"type": "local_shell"}]
    body = {"input": "hi", "tools": tools, "tool_choice": {"type": "web_search"}, "max_output_tokens": 1}
    answer = served.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert [tool["name"] for tool in answer.json()["tools"]] == ["f"]
    for words in ("tools[0] (web_search)", "tools[2] (local_shell)", "tool_choice"):
        assert words in answer.headers["warning"]
    strict = echo_service.serving(echo_service.built(echo_service.Saying()), strict=True)
    with strict as running:
        refused = running.http.post("/v1/responses", json=body)
    assert refused.status_code == 400
    assert "tools[0]" in refused.json()["error"]["message"] or "tool_choice" in refused.json()["error"]["message"]


def test_a_strict_server_names_a_block_by_the_client_s_path(servers: Servers) -> None:
    """Here the second message of the client is the third of the chat."""
    talk = [USER, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "a"}]}, USER]
    body = {"system": "Be kind.", "messages": talk, "max_tokens": 1}
    refused = servers(strict=True).http.post("/v1/messages", json=body)
    message = refused.json()["error"]["message"]
    assert (refused.status_code, "'messages[1].content[0] (server_tool_use)'" in message) == (400, True), message


def test_tokenize_names_what_was_left_out_as_a_chat_does(served: Running) -> None:
    talk = [USER, {"role": "assistant", "content": [{"type": "image", "x": 1}]}, USER]
    body = {"messages": talk, "chat_template_kwargs": {"enable_thinking": False}}
    warnings = [
        served.http.post(path, json=body | more).headers.get("warning")
        for path, more in (("/tokenize", {}), ("/v1/chat/completions", {"max_tokens": 1}))
    ]
    assert warnings[0] == warnings[1]
    assert "messages[1].content[0]" in warnings[0]


def test_our_own_cut_call_can_be_sent_back(served: Running) -> None:
    """In chat, Responses and Messages: a call that max_tokens cut, as the client read it, and a result."""
    http, parameters = served.http, {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "parameters": parameters}
    tools, warned = [{"type": "function", "function": function}], 0
    for count in range(16, 64, 4):
        body = {"messages": [USER], "tools": tools, "max_tokens": count, "tool_choice": "required", "seed": count}
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "length"
        made = choice["message"].get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "Error: cut"} for one in made]
        talk = [USER, choice["message"], *results, USER]
        again = http.post("/v1/chat/completions", json={"messages": talk, "tools": tools, "max_tokens": 1})
        assert again.status_code == 200, again.text
        warned += "arguments is no JSON" in again.headers.get("warning", "")
    assert warned, "some were cut within their arguments"


def test_allowed_tools(served: Running) -> None:
    """All stay in the prompt, and only the allowed ones are called."""
    http = served.http
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "abc"]
    allowed = [{"type": "function", "function": {"name": "b"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    body = {"messages": [USER], "tools": tools, "max_tokens": 60, "temperature": 1}
    for seed in range(5):
        answer = http.post("/v1/chat/completions", json={**body, "tool_choice": choice, "seed": seed}).json()
        assert {call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]} == {"b"}
        assert answer["usage"]["prompt_tokens"] == tokens_of(served, [USER], tools=tools)
    flat = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "abc"]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "c"}]}
    body = {"input": "hi", "tools": flat, "tool_choice": choice, "max_output_tokens": 60}
    answer = http.post("/v1/responses", json=body).json()
    assert {item["name"] for item in answer["output"] if item["type"] == "function_call"} == {"c"}
    for wrong, words in (
        ({"mode": "required", "tools": [{"type": "function", "function": {"name": "z"}}]}, "allows 'z'"),
        ({"mode": "none", "tools": allowed}, "allowed_tools must be"),
        ({"mode": "auto", "tools": []}, "allowed_tools must be"),
        ({"mode": "auto", "tools": 5}, "allowed_tools must be"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": ["f"]}}]}, "allowed_tools must be"),
        (None, "allowed_tools must be"),
    ):
        choice = {"type": "allowed_tools", "allowed_tools": wrong}
        refused = http.post("/v1/chat/completions", json={"messages": [USER], "tools": tools, "tool_choice": choice})
        assert (refused.status_code, words in refused.text) == (400, True), refused.text


def test_a_past_without_text_is_continued_and_echoed(served: Running) -> None:
    for part in (
        {"type": "refusal", "refusal": "no"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "image", "x": 1},
    ):
        last = {"role": "assistant", "content": [part]}
        for more in ({"echo": True}, {"continue_final_message": True, "add_generation_prompt": False}):
            body = {"messages": [USER, last], "max_tokens": 1, **more}
            answer = served.http.post("/v1/chat/completions", json=body)
            assert answer.status_code in (200, 400), answer.text


def test_variables_that_the_template_does_not_read(served: Running) -> None:
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "chat_template_kwargs.enable_thinking is no variable of the chat template" in answer.headers["warning"]


def test_an_overflow_has_the_words_of_each_api(served: Running) -> None:
    """Clients match them: OpenAI's first words and code, Anthropic's sentence."""
    long = "word " * 5000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": [5] * 5000}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/responses", {"input": long}),
    ):
        answer = served.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 2048 tokens")
        assert "However, the prompt has" in error["message"]
    body = {"messages": [{"role": "user", "content": long}]}
    error = served.http.post("/v1/messages", json=body | {"max_tokens": 1}).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(" tokens > 2048 maximum")
