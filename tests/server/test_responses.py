"""/v1/responses by OpenAI's own client: texts, streams, parsed objects, a loop with a tool,
conversations that go on, what is stored for whom, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import echo_service
import httpx
import pytest
from asking import CALL, CALLS, HERMES, MARKERS, SAID, Talker, openai_of, refusal, saying
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError
from pydantic import BaseModel
from waiting import wait_until

from quire.errors import InputError, StartupError
from quire.protocol.step_plan import StepResult
from quire.server import answer_size
from quire.server.errors import UnknownResponse
from quire.server.options import ServeOptions, check_options
from quire.server.response_models import InputItemList, ResponsesResponse, ResponseStreamEvent
from quire.server.responses import routes
from quire.server.responses.render import ResponseItems, custom_input
from quire.server.responses.routes import ResponseStore

pytestmark = pytest.mark.xdist_group(name="responses")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"type": "function", **FUNCTION}
CALLED = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
ASKED = {"role": "user", "content": "Tell."}
RETURNED = {"type": "function_call_output", "call_id": "a", "output": "rain"}


class Page(BaseModel):
    title: str
    number: int


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """A Talker, its runner, and a client of another user."""
    with (
        saying(HERMES, keys=["one", "two"], store_responses=4) as found,
        openai_of(found.running, "two") as other,
    ):
        runner = found.say.__self__  # type: ignore[attr-defined]
        yield SimpleNamespace(**found._asdict(), chat=found.chat, respond=found.respond, other=other, runner=runner)


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
        ResponseStreamEvent.model_validate(event, strict=True)
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


def test_a_custom_tool(served: Talker) -> None:
    """It is a function of a text for the model, and its call has the text, also one that is cut off or another's."""
    shell: Any = {"type": "custom", "name": "shell", "description": "runs it"}
    call = '<tool_call>\n{"name": "shell", "arguments": %s}\n</tool_call>'
    served.say(call % '{"input": "ls \\"é\\""}' + CALL % "Oslo" + call % '{"command": 1}')
    found = served.respond(tools=[shell, TOOL])
    assert [tool.type for tool in found.tools] == ["custom", "function"]
    assert kinds(found) == ["custom_tool_call", "function_call", "custom_tool_call"]
    first, _, last = found.output
    assert (first.name, first.input, json.loads(last.input)) == ("shell", 'ls "é"', {"command": 1})
    ResponsesResponse.model_validate(served.http.get(f"/v1/responses/{found.id}").json())
    again = [*served.client.responses.retrieve(found.id, stream=True)]
    for events in (again, [*served.respond(tools=[shell, TOOL], stream=True)]):
        for event in events:
            ResponseStreamEvent.model_validate(event.to_dict())
        done = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert done == deltas == [first.input, last.input]
        assert [item.to_dict()["type"] for item in events[-1].response.output] == kinds(found)
    output: Any = {"type": "custom_tool_call_output", "call_id": first.call_id, "output": "a"}
    served.say("Good.")
    assert served.respond(input=[output], previous_response_id=found.id).output_text == "Good."
    assert custom_input('{"input": "ab') == "ab"


def test_formats_of_custom_tools(served: Talker) -> None:
    shell: Any = {"type": "custom", "name": "shell"}
    for syntax, definition, warns in (("regex", "ab{3,5}c", False), ("lark", 'start: "a"', True)):
        form = {"type": "grammar", "syntax": syntax, "definition": definition}
        body = {"input": "Tell.", "tools": [{**shell, "format": form}], "tool_choice": {**shell, "format": None}}
        answer = served.http.post("/v1/responses", json={**body, "max_output_tokens": 60})
        assert ("tools[0].format" in answer.headers.get("warning", "")) is warns
        [item] = answer.json()["output"]
        assert item["type"] == "custom_tool_call"
        assert answer.json()["tools"][0]["format"] == form
        assert warns or re.fullmatch(definition, item["input"])


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
    served.client.responses.delete(first.id)
    for id in (first.id, third.id, "resp_0"):
        with pytest.raises(APIStatusError) as gone:
            served.client.responses.retrieve(id)
        assert gone.value.status_code == 404
    refused = refusal(served.http, "/v1/responses", {"input": "a", "previous_response_id": first.id})
    assert refused["param"] == "previous_response_id"


def test_log_probabilities_are_those_of_the_chat(served: Any) -> None:
    served.say("once upon a time")
    asked: Any = {"model": "echo", "top_logprobs": 2}
    more: Any = {"temperature": 0, "extra_body": {"seed": 7}}
    messages: Any = [ASKED]
    chat = served.client.chat.completions.create(**asked, logprobs=True, messages=messages, seed=7, temperature=0)
    told = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
    asked |= {"input": "Tell.", "include": ["message.output_text.logprobs"]}
    whole = served.client.responses.create(**asked, **more)
    assert whole.top_logprobs == 2
    *events, last = served.client.responses.create(**asked, **more, stream=True)
    for found in (whole, last.response, served.client.responses.retrieve(whole.id)):
        assert [entry.to_dict() for entry in found.output[0].content[0].logprobs] == told
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry["token"] for entry in told]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.logprob for entry in done.logprobs] == [entry["logprob"] for entry in told]
    del asked["top_logprobs"]
    alone = served.client.responses.create(**asked, **more).output[0].content[0].logprobs
    assert [entry.logprob for entry in alone] == [entry["logprob"] for entry in told]
    assert not any(entry.top_logprobs for entry in alone)
    served.say(SAID + " é.")
    for stream in (False, True):
        found = served.client.responses.create(**asked, **more, tools=[TOOL], stream=stream)
        found = [*found][-1].response if stream else found
        texts = [item.content[0] for item in found.output if item.type == "message"]
        tokens = [b"".join(bytes(entry.bytes) for entry in text.logprobs).decode() for text in texts]
        assert tokens == ["Let me see.", "Wait. é.<|end|>"]


def test_a_conversation_is_truncated(served: Any) -> None:
    served.say("once")
    long = [{"role": "user" if i % 2 else "assistant", "content": f"{i} " + "once " * 20} for i in range(99)]
    talk: Any = [{"role": "system", "content": "Be kind."}, *long, {"role": "user", "content": "Tell."}]
    asked: Any = {"model": "echo", "input": talk, "truncation": "auto", "instructions": "Be brief."}
    found = served.client.responses.with_raw_response.create(**asked, max_output_tokens=100)
    response = found.parse()
    assert (response.truncation, response.status) == ("auto", "completed")
    assert response.usage.input_tokens <= 924
    dropped = int(found.headers["warning"].split(" of its items")[0].split()[-1])
    kept = [*talk[:1], *talk[dropped + 1 :]]
    for items, fits in (kept, True), ([*talk[:1], *talk[dropped:]], False):
        counted = served.client.responses.input_tokens.count(model="echo", input=items, instructions="Be brief.")
        assert (counted.input_tokens <= 924) is fits
    assert len(served.client.responses.input_items.list(response.id, limit=100).data) == 100
    shorter = served.client.responses.create(**asked | {"max_output_tokens": 600})
    assert shorter.usage.input_tokens <= 424
    loop: Any = [ASKED, *({**item, "call_id": f"{i}"} for i in range(99) for item in (CALLED, RETURNED))]
    loop = served.client.responses.with_raw_response.create(model="echo", input=loop, truncation="auto")
    assert "of its items were dropped" in loop.headers["warning"]
    fits = served.client.responses.with_raw_response.create(model="echo", input="Tell.", truncation="auto")
    assert "warning" not in fits.headers


def test_input_tokens_are_counted(served: Any) -> None:
    served.say("once")
    asked: Any = {"model": "echo", "input": "Tell.", "instructions": "Be kind.", "tools": [TOOL]}
    first = served.client.responses.create(**asked)
    counted = served.client.responses.input_tokens.count(**asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    more: Any = {"model": "echo", "input": "More.", "previous_response_id": first.id}
    counted = served.client.responses.input_tokens.count(**more)
    assert counted.input_tokens == served.client.responses.create(**more).usage.input_tokens
    long = served.client.responses.input_tokens.count(model="echo", input="once " * 7000)
    assert long.input_tokens > 7000


def test_input_items_are_listed(served: Any) -> None:
    served.say("once")
    talk: Any = [ASKED, {"role": "assistant", "content": "So."}, CALLED, {"id": "mine", **RETURNED}]
    first = served.client.responses.create(model="echo", input=talk)
    second = served.client.responses.create(model="echo", input="More.", previous_response_id=first.id)
    found = list(served.client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in found] == ["message", "message", "function_call", "function_call_output", "message",
                                             "message"]  # fmt: skip
    assert [item.content[0].text for item in found if item.type == "message"] == ["Tell.", "So.", "once", "More."]
    assert (found[3].id, found[4].id) == ("mine", first.output[0].id)
    assert len({item.id for item in found}) == 6
    pages = served.client.responses.input_items.list(second.id, limit=4)
    assert [item.id for item in pages] == [item.id for item in found[::-1]]
    path = f"/v1/responses/{second.id}/input_items"
    page = served.http.get(path, params={"limit": 4, "after": found[5].id}).json()
    InputItemList.model_validate(page, strict=True)
    assert (page["first_id"], page["last_id"], page["has_more"]) == (found[4].id, found[1].id, True)
    for params in ({"limit": 101}, {"order": "up"}, {"after": "none"}):
        answer = served.http.get(path, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(params)))
    with pytest.raises(APIStatusError, match="there is no response"):
        served.other.responses.input_items.list(second.id)
    odd: Any = [{"id": "m", "role": "user", "content": text, "mood": "\ud83d"} for text in "abc"]
    headers = {"content-type": "application/json"}
    kept = served.http.post("/v1/responses", content=json.dumps({"input": odd}), headers=headers).json()["id"]
    ids = [one["id"] for one in served.http.get(f"/v1/responses/{kept}/input_items").json()["data"]]
    assert len({*ids}) == 3


def test_items_are_referred_to(served: Any) -> None:
    """An item of a stored response of the same user; others are left out with a warning."""
    served.say("once")
    first = served.respond()
    talk: list[Any] = [
        ASKED,
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "More."},
    ]
    found = served.respond(input=talk)
    whole = served.respond(input=[ASKED, {"role": "assistant", "content": "once"}, talk[2]])
    assert found.usage.input_tokens == whole.usage.input_tokens
    body = {"model": "echo", "input": talk}
    left_out = served.http.post("/v1/responses", json=body, headers={"authorization": "Bearer two"})
    assert "input[1] (item_reference)" in left_out.headers["warning"]
    served.client.responses.delete(first.id)
    assert "input[1] (item_reference)" in served.http.post("/v1/responses", json=body).headers["warning"]


def test_a_stored_response_is_streamed(served: Any) -> None:
    served.say(SAID)
    *live, last = served.client.responses.create(model="echo", input="Tell.", tools=[TOOL], top_logprobs=1, stream=True)
    events = list(served.client.responses.retrieve(last.response.id, stream=True))
    assert events[-1].to_dict() == last.to_dict() | {"sequence_number": len(events) - 1}
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def joined(events: list[Any]) -> list[Any]:
        """Each event, but the first delta only of several."""
        named = [(event.type, getattr(event, "output_index", 0)) for event in events]
        return [name for i, name in enumerate(named) if i == 0 or name != named[i - 1]]

    assert joined(events[:-1]) == joined(live)
    with served.client.responses.stream(response_id=last.response.id, starting_after=4) as stream:
        assert next(event.sequence_number for event in stream) == 5


def ended(served: Any, id: str) -> Any:
    """The response, once it has ended."""

    def get() -> Any:
        found = served.client.responses.retrieve(id)
        return found if found.status not in ("queued", "in_progress") else None

    return wait_until(get, "the response has ended")


def test_a_response_in_the_background(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"model": "echo", "input": "Tell.", "background": True}
    served.say("once upon a time")
    steps, collect = Semaphore(0), served.runner.collect  # the steps that may end

    def wait_and_collect(ticket: int) -> StepResult:
        steps.acquire(timeout=30)
        return collect(ticket)

    monkeypatch.setattr(served.runner, "collect", wait_and_collect)
    begun = served.client.responses.create(**asked)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    steps.release(2)
    wait_until(lambda: served.client.responses.retrieve(begun.id).status == "in_progress", "it runs")
    [item] = served.client.responses.input_items.list(begun.id)
    assert item.content[0].text == "Tell."
    for refused in (
        lambda: list(served.client.responses.retrieve(begun.id, stream=True)),
        lambda: served.client.responses.create(model="echo", input="On.", previous_response_id=begun.id),
    ):
        with pytest.raises(BadRequestError):
            refused()
    for hidden in (served.other.responses.retrieve, served.other.responses.cancel, served.other.responses.delete):
        with pytest.raises(NotFoundError):
            hidden(begun.id)
    steps.release(100)
    done = ended(served, begun.id)
    assert (done.status, done.output_text) == ("completed", "once upon a time")
    assert served.client.responses.cancel(begun.id).to_dict() == done.to_dict()
    assert [*served.client.responses.retrieve(begun.id, stream=True)][-1].response.output_text == done.output_text
    cut = served.client.responses.create(**asked, max_output_tokens=2)
    assert ended(served, cut.id).status == "incomplete"
    plain = served.client.responses.create(model="echo", input="Tell.")
    with pytest.raises(BadRequestError, match="background"):
        served.client.responses.cancel(plain.id)


def test_a_stream_in_the_background(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without its client, and can be followed again from any event, while it runs and afterwards."""
    asked: Any = {"model": "echo", "input": "Tell.", "background": True, "stream": True}
    served.say("once upon a time there was")
    monkeypatch.setattr(served.runner, "pause", 0.05)
    whole = [event.to_dict() for event in served.client.responses.create(**asked)]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert (whole[0]["type"], whole[-1]["type"]) == ("response.created", "response.completed")
    id = whole[0]["response"]["id"]
    assert served.client.responses.retrieve(id).to_dict() == whole[-1]["response"]
    for after in (-1, 5, len(whole) - 2, len(whole)):
        again = served.client.responses.retrieve(id, stream=True, starting_after=after)
        assert [event.to_dict() for event in again] == whole[after + 1 :]
    with served.client.responses.create(**asked) as stream:
        begun = [next(stream).to_dict() for _ in range(4)]
    id = begun[0]["response"]["id"]
    with served.client.responses.retrieve(id, stream=True, starting_after=1) as stream:
        assert next(stream).to_dict() == begun[2]
        assert served.client.responses.retrieve(id).status == "in_progress"
        rest = [event.to_dict() for event in stream]
    texts = [event["delta"] for event in begun + rest if event["type"] == "response.output_text.delta"]
    assert ("".join(texts), rest[-1]["type"]) == ("once upon a time there was", "response.completed")
    assert served.running.idle()


def test_a_stream_in_the_background_is_cancelled_or_too_large(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"model": "echo", "input": "Tell.", "background": True, "stream": True}
    served.say("once " * 800)
    monkeypatch.setattr(served.runner, "pause", 0.05)
    with served.client.responses.create(**asked) as stream:
        id = next(stream).response.id
        assert served.client.responses.cancel(id).status == "cancelled"
        assert "response.completed" not in [event.type for event in stream]
    monkeypatch.setattr(answer_size, "MAX_HELD_BYTES", 6000)
    monkeypatch.setattr(answer_size, "MAX_EMBEDDING_BYTES", 0)
    *_, last = served.client.responses.create(**asked)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "bytes; the limit is 6000" in ended(served, last.response.id).error.message
    assert served.running.idle()


def test_responses_in_the_background_are_bounded_and_end(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"model": "echo", "input": "Tell.", "background": True}
    served.say("once " * 800)
    monkeypatch.setattr(served.runner, "pause", 0.05)
    begun = [served.client.responses.create(**asked) for _ in range(4)]
    with pytest.raises(InternalServerError, match="4 responses are in the background"):
        served.client.responses.create(**asked)
    cancelled = served.client.responses.cancel(begun[0].id)
    assert (cancelled.status, cancelled.output, cancelled.id) == ("cancelled", [], begun[0].id)
    assert served.client.responses.retrieve(begun[0].id).status == "cancelled"
    with pytest.raises(BadRequestError, match="was cancelled can't be streamed"):
        list(served.client.responses.retrieve(begun[0].id, stream=True))
    for response in begun[1:]:
        served.client.responses.delete(response.id)
        with pytest.raises(NotFoundError):
            served.client.responses.retrieve(response.id)
    assert served.running.idle()

    def fails(*given: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(ResponseItems, "finish", fails)
    failed = ended(served, served.client.responses.create(**asked, max_output_tokens=1).id)
    assert (failed.status, failed.error.message) == ("failed", "internal error")


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
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input", "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input", "file_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input", "name"),
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
    ({"input": "once " * 1100, "truncation": "auto"}, "input", "1024"),
    ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be between 0 and 20, got 21"),
    ({"logprobs": True}, "logprobs", "it is top_logprobs here"),
    ({"background": True, "store": False}, "background", "--store-responses"),
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


LENIENT: list[tuple[dict[str, Any], str]] = [
    ({"input": [ASKED, {"type": "web_search_call", "id": "ws_1"}]}, "web_search_call"),
    ({"input": [ASKED, {"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, ""),
    ({"input": [{**CALLED, "arguments": "{"}]}, "input[0].arguments is no JSON"),
    ({"input": [CALLED, {**CALLED, "arguments": "5"}]}, "input[1].arguments is no JSON object"),
    ({"input": [CALLED, {**CALLED, "call_id": "b", "name": "a b"}]}, ""),
    ({"input": [CALLED, {**RETURNED, "call_id": "b"}]}, ""),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
]


@pytest.mark.parametrize(("body", "text"), LENIENT)
def test_what_of_the_past_cannot_be_read_is_named(served: Any, body: dict[str, Any], text: str) -> None:
    served.say("a")
    answer = served.http.post("/v1/responses", json={"input": "a", **body})
    assert answer.status_code == 200, answer.text
    assert text in answer.headers.get("warning", "")


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
        whole = thinking.respond(input="So?", top_logprobs=1)
        with thinking.client.responses.stream(model="echo", input="So?") as stream:
            told = [event.type for event in stream]
            last = stream.get_final_response()
        for found in (whole, last):
            assert kinds(found) == ["reasoning", "message"]
            assert found.output[0].content[0].text == "once upon"
            assert found.output_text == "quire"
            assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
        scored = whole.output[1].content[0].logprobs
        assert b"".join(bytes(entry.bytes) for entry in scored).removesuffix(b"<|end|>") == b"quire"
        assert told.index("response.reasoning_text.done") < told.index("response.output_text.delta")

        def fails(*given: Any) -> Any:
            raise RuntimeError("secret")

        monkeypatch.setattr(ResponseItems, "finish", fails)
        *_, failed = thinking.respond(stream=True)
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert (failed.response.error.code, failed.response.error.message) == ("server_error", "internal error")


def test_without_a_store(http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "once", "max_output_tokens": 2, "store": True}
    assert http.post("/v1/responses", json=body).json()["store"] is False
    assert "--store-responses" in refusal(http, "/v1/responses", body | {"background": True})["message"]
    answer = http.get("/v1/responses/resp_0")
    assert (answer.status_code, "--store-responses" in answer.text) == (404, True)
