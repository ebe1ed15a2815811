"""/v1/responses by OpenAI's own client: texts, streams, parsed objects, a loop with a tool,
conversations that go on, what is stored for whom, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import echo_service
import httpx
import pytest
from asking import CALLS, HERMES, MARKERS, SAID, Talker, refusal, saying
from openai import APIStatusError
from pydantic import BaseModel

from quire.errors import InputError, StartupError
from quire.server.errors import UnknownResponse
from quire.server.options import ServeOptions, check_options
from quire.server.response_models import ResponsesResponse
from quire.server.responses import routes
from quire.server.responses.render import ResponseItems
from quire.server.responses.routes import ResponseStore

pytestmark = pytest.mark.xdist_group(name="responses")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"type": "function", **FUNCTION}
CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "a", "output": "rain"}


class Page(BaseModel):
    title: str
    number: int


@pytest.fixture(scope="module")
def served() -> Iterator[Talker]:
    with saying(HERMES, keys=["one", "two"], store_responses=4) as found:
        yield found


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def test_a_text_whole_and_streamed(served: Talker) -> None:
    served.say("once upon a time")
    asked: Any = {"instructions": "Be kind.", "metadata": {"a": "b"}}
    found = served.respond(**asked, temperature=0.5, max_output_tokens=40)
    assert (found.status, found.output_text, kinds(found)) == ("completed", "once upon a time", ["message"])
    assert (found.instructions, found.metadata, found.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    text, events = "", list[Any]()
    for event in served.respond(**asked, stream=True):
        events.append(event)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == "once upon a time"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events if event.type != "response.output_text.delta"]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.output_tokens == found.usage.output_tokens
    with served.client.responses.stream(model="echo", input="Tell.", **asked) as stream:
        assert stream.get_final_response().output_text == text


def test_the_wire_is_as_described(served: Talker) -> None:
    served.say(SAID)
    body = {"input": "Tell.", "tools": [TOOL]}
    *lines, end = served.http.post("/v1/responses", json=body | {"stream": True}).text.split("\n\n")
    assert end == ""
    for line in lines:
        name, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
    for found in (served.http.post("/v1/responses", json=body).json(), event["response"]):
        items = ResponsesResponse.model_validate(found).output
        assert [item.type for item in items] == ["message", "function_call", "function_call", "message"]
        assert len({item.id for item in items}) == 4


def test_cut_and_empty_outputs(served: Talker) -> None:
    served.say("once upon a time there was")
    cut = served.respond(max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"
    *_, last = served.respond(max_output_tokens=2, stream=True)
    assert (last.type, last.response.usage.output_tokens) == ("response.incomplete", 2)
    ended = served.respond(extra_body={"stop": [" time"]})
    assert (ended.status, ended.output_text) == ("completed", "once upon a")
    served.say(SAID)
    said = SAID[: SAID.index("Paris") + 4]
    most = len(echo_service.tokenizer().encode(said, add_special_tokens=False))
    called = served.respond(tools=[TOOL], max_output_tokens=most)
    assert called.output[-1].status == "incomplete"
    assert '{"city": "Pari'.startswith(called.output[-1].arguments)
    result: Any = {"type": "function_call_output", "call_id": called.output[-1].call_id, "output": "It was cut."}
    kept = served.respond(tools=[TOOL], previous_response_id=called.id, input=[result])
    assert kept.status == "completed"
    served.say("")
    empty = served.respond()
    assert (empty.status, empty.output_text, kinds(empty)) == ("completed", "", ["message"])


def test_objects_are_parsed(served: Talker) -> None:
    served.say('{"title": "once", "number": 7}')
    parsed = served.client.responses.parse(model="echo", input="Tell.", text_format=Page)
    assert parsed.output_parsed == Page(title="once", number=7)
    with served.client.responses.stream(model="echo", input="Tell.", text_format=Page) as stream:
        assert stream.get_final_response().output_parsed == Page(title="once", number=7)
    served.say("no JSON at all")
    some = served.respond(text={"format": {"type": "json_object"}}, max_output_tokens=200)
    assert some.output_text.lstrip()[0] == "{"


def test_a_loop_with_a_tool(served: Talker) -> None:
    served.say(SAID)
    talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    asked: Any = {"tools": [TOOL]}
    first = served.respond(**asked, input=talk)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Paris"}), ("weather", {"city": "Oslo"}),
    ]  # fmt: skip
    one = served.respond(**asked, input=talk, parallel_tool_calls=False)
    assert kinds(one).count("function_call") == 1
    served.say("It rains.")
    talk += [item.to_dict() for item in first.output[:3]]
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    second = served.respond(**asked, input=talk)
    assert second.output_text == "It rains."
    again = served.respond(**asked, previous_response_id=first.id, input=talk[-2:])
    assert again.output_text == "It rains."
    assert again.usage.input_tokens > second.usage.input_tokens  # the first response said "Wait." after its calls
    forced = served.respond(
        **asked, input=talk[:1], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=100
    )
    assert kinds(forced) == ["function_call"]
    streamed = served.respond(**asked, input=talk[:1], tool_choice="required", stream=True)
    joined = "".join(event.delta for event in streamed if event.type == "response.function_call_arguments.delta")
    assert joined.startswith("{")


def test_items_are_the_messages_of_a_chat(served: Talker) -> None:
    served.say("Yes.")
    items: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "See."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "Ah."}]},
        {"role": "assistant", "content": "So."},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "See.\nSo.", "reasoning_content": "Hm.Ah.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    told = served.http.post("/tokenize", json={"messages": messages, "tools": tools}).json()
    found = served.respond(instructions="Be kind.", input=items, tools=[TOOL])
    assert found.usage.input_tokens == told["count"]


def test_a_conversation_goes_on(served: Talker) -> None:
    served.say("once")
    first = served.respond(instructions="Be kind.")
    second = served.respond(input="More.", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    talk = ("user", "Tell."), ("assistant", "once"), ("user", "More.")
    third = served.respond(input=[{"role": role, "content": said} for role, said in talk], store=False)
    assert second.usage.input_tokens == third.usage.input_tokens  # without the first one's instructions
    assert (first.store, third.store) == (True, False)
    assert served.client.responses.retrieve(first.id).to_dict() == first.to_dict()
    for event in served.respond(input="On.", previous_response_id=second.id, stream=True):
        last = event
    assert served.client.responses.retrieve(last.response.id).output_text == "once"
    with pytest.raises(APIStatusError, match="can't be streamed"):
        list(served.client.responses.retrieve(first.id, stream=True))
    served.client.responses.delete(first.id)
    for id in (first.id, third.id, "resp_0"):
        with pytest.raises(APIStatusError) as gone:
            served.client.responses.retrieve(id)
        assert gone.value.status_code == 404
    refused = refusal(served.http, "/v1/responses", {"input": "a", "previous_response_id": first.id})
    assert refused["param"] == "previous_response_id"


def test_a_key_finds_only_its_own(served: Talker) -> None:
    served.say("once")
    mine = served.respond()
    other = served.client.with_options(api_key="two").responses
    for ask in (other.retrieve, other.delete):
        with pytest.raises(APIStatusError) as gone:
            ask(mine.id)
        assert gone.value.status_code == 404
    with pytest.raises(APIStatusError) as gone:
        other.create(model="echo", input="More.", previous_response_id=mine.id)
    assert (gone.value.status_code, gone.value.body["param"]) == (400, "previous_response_id")
    assert served.client.responses.retrieve(mine.id).id == mine.id
    assert httpx.get(f"{served.running.url}/v1/responses/{mine.id}").status_code == 401


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(2)
    for id in "abc":
        store.put(b"me", b'[{"ask":1}]', {"id": id, "output": [{"say": id}]})
    assert len(store) == 2
    with pytest.raises(UnknownResponse):
        store.get("a", b"me")
    assert json.loads(store.get("c", b"me").items) == [{"ask": 1}, {"say": "c"}]
    assert store.bytes == sum(store.get(id, b"me").size for id in "bc")
    monkeypatch.setattr(routes, "MAX_STORED_BYTES", store.bytes)
    store.put(b"me", b'[{"ask":1}]', {"id": "d", "output": [{"say": "d" * 9}]})
    assert len(store) == 1  # both older ones had to go
    store.put(b"me", b'[{"ask":1}]', {"id": "e", "output": [{"say": "e" * 999}]})
    assert (len(store), store.bytes) == (0, 0)
    monkeypatch.setattr(routes, "MAX_CONVERSATION", 10)
    with pytest.raises(InputError, match=r"has 22 bytes.* may have 10"):
        store.dump_items([{"ask": "a" * 10}])


def test_the_flag() -> None:
    for options in ({"store_responses": -1}, {"store_responses": 5, "fronts": 2}):
        with pytest.raises(StartupError, match=f"--store-responses is {options['store_responses']}"):
            check_options(ServeOptions(**options))


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "got nothing"),
    ({"input": 5}, "input", "a string or a list"),
    ({"input": []}, "input", "1 to 1024"),
    ({"input": [{"role": "user", "content": "a"}] * 1025}, "input", "got 1025"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input", "input[0].role"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input", "web_search_call"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input", "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input", "file_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input", "input[0] has a tool's"),
    ({"input": [{**CALLED, "arguments": "{"}]}, "input", "input[0].arguments is"),
    ({"input": [CALLED, {**CALLED, "arguments": "5"}]}, "input", "input[1].arguments must be"),
    ({"input": [CALLED, {**CALLED, "call_id": "b", "name": "a b"}]}, "input", "input[1].name must have"),
    ({"input": [CALLED, {**RETURNED, "call_id": "b"}]}, "input", "input[1].call_id is 'b'"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type is 'web_search'"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name must have"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no such tool"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format must be an object that has a schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text", "x"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"input": "once " * 1100}, "input", "1024"),
    ({"truncation": "auto"}, "truncation", "auto"),
    ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs", "not supported"),
    ({"background": True}, "background", "not supported"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"n": 2}, "n", "not supported"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    ({"metadata": {"a": 5}}, "metadata", "'a'"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 entries, got 17"),
    ({"previous_response_id": "resp_0"}, "previous_response_id", "resp_0"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "text"), REFUSALS)
def test_refusals(served: Talker, body: dict[str, Any], param: str, text: str) -> None:
    asked = {"input": "a", **body} if body else {}
    error = refusal(served.http, "/v1/responses", asked)
    assert error["param"] == param
    assert text in error["message"]


def test_what_is_ignored_is_named(served: Talker) -> None:
    served.say("a")
    body = {"input": "a", "text": {"verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}, "mood": 1,
            "include": ["reasoning.encrypted_content"], "background": False, "user": "me"}  # fmt: skip
    answer = served.http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    named = answer.headers["warning"].split(": ")[1].rstrip('"').split(", ")
    assert sorted(named) == ["mood", "reasoning.summary", "reasoning_effort", "text.verbosity"]


def test_thoughts_are_items_and_failures_events(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "<think></think>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with saying(template, MARKERS) as thinking:
        thinking.say("<think>\nonce upon\n</think>\n\nquire")
        whole = thinking.respond()
        with thinking.client.responses.stream(model="echo", input="So?") as stream:
            told = [event.type for event in stream]
            last = stream.get_final_response()
        for found in (whole, last):
            assert kinds(found) == ["reasoning", "message"]
            assert found.output[0].content[0].text == "once upon"
            assert found.output_text == "quire"
            assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
        assert told.index("response.reasoning_text.done") < told.index("response.output_text.delta")

        def fails(*given: Any) -> Any:
            raise RuntimeError("secret")

        monkeypatch.setattr(ResponseItems, "finish", fails)
        *_, failed = thinking.respond(stream=True)
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert (failed.response.error.code, failed.response.error.message) == ("server_error", "internal error")


def test_without_a_store(http: httpx.Client) -> None:
    body = {"input": "once", "max_output_tokens": 2, "store": True}
    assert http.post("/v1/responses", json=body).json()["store"] is False
    answer = http.get("/v1/responses/resp_0")
    assert (answer.status_code, "--store-responses" in answer.text) == (404, True)
