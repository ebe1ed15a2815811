"""Tools over HTTP: the official client, recorded outputs, constrained calls, histories, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import echo_service
import jsonschema
import pytest
from asking import TALK, Talker, choices_of, openai_of, saying

from quire.text.chat_messages import read_messages
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.tools import read_tools

pytestmark = pytest.mark.xdist_group(name="tools_http")

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "Oslo"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
MADE = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLED: Any = {"role": "assistant", "content": None, "tool_calls": [MADE]}
HISTORY: Any = [*TALK, CALLED, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
SAID = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
BRIEF = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
)


@pytest.fixture(scope="module")
def said() -> Iterator[Talker]:
    with saying(BRIEF) as found:
        yield found


def joined(chunks: Any) -> tuple[str, list[list[str]], str | None]:
    """The text, the calls and the reason to end of a stream of one choice."""
    [one] = choices_of(chunks)
    return one.text, one.calls, one.reason


def test_one_call_where_parallel_ones_are_off(said: Talker) -> None:
    said.say(SAID + SAID.partition("\n")[2])
    for parallel, count in ((True, 2), (False, 1)):
        asked: Any = {"tools": TOOLS, "parallel_tool_calls": parallel}
        [choice] = said.chat(**asked).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert [json.loads(arguments) for _, _, arguments in calls] == [{"city": "Paris", "days": 2}] * count
        text, streamed, reason = joined(said.chat(**asked, stream=True))
        assert (text, reason) == ("Let me see.", "tool_calls")
        assert [("function", *call[1:]) for call in streamed] == calls
        with said.client.chat.completions.stream(model="echo", messages=TALK, **asked) as stream:
            [helped] = stream.get_final_completion().choices
        assert helped.message.tool_calls[0].function.arguments == calls[0][2]


def test_n_and_logprobs_beside_calls(said: Talker) -> None:
    said.say(SAID)
    asked = {"tools": TOOLS, "n": 2, "logprobs": True}
    choices = said.chat(**asked).choices
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["weather"] * 2
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id
    tokens = [entry.token for entry in choices[0].logprobs.content]
    seen, _ = choices_of(said.chat(**asked, stream=True))
    assert [entry.token for some in seen.logprobs for entry in some.content] == tokens


def test_text_stays_text(said: Talker) -> None:
    for text, tools, choice in (("Hello.", TOOLS, "auto"), (SAID, TOOLS, "none"), (SAID, [], "none")):
        said.say(text)
        asked = {"tools": tools, "tool_choice": choice}
        [done] = said.chat(**asked).choices
        assert (done.message.content, done.message.tool_calls, done.finish_reason) == (text, None, "stop")
        assert joined(said.chat(**asked, stream=True)) == (text, [], "stop")


def test_a_call_that_is_cut_keeps_its_reason(said: Talker) -> None:
    said.say(SAID)
    [choice] = said.chat(tools=TOOLS, max_tokens=50).choices
    assert choice.finish_reason == "length"
    assert SAID.partition('"arguments": ')[2].startswith(choice.message.tool_calls[0].function.arguments)


def test_templates_get_tools_and_calls(said: Talker) -> None:
    """As Hugging Face's do: tools as they are, arguments as objects, no content as an empty one."""
    body = {"messages": HISTORY, "tools": TOOLS}
    ids = said.http.post("/tokenize", json=body).json()["tokens"]
    text = said.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    head, _, rest = text.partition("<tool_call>")
    assert json.loads(head) == TOOLS
    assert rest == "user:once upon a time;assistant:Paris;tool:rain;"
    ids = said.http.post("/tokenize", json={"messages": HISTORY}).json()["tokens"]
    without = said.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert without == rest, "it goes on without tools"


def test_markers_that_are_special_tokens_are_read() -> None:
    """Those of calls and of thoughts; but not where special tokens are left out of the text."""
    backend = type(echo_service.tokenizer()._backend).from_str(echo_service.tokenizer()._backend.to_str())
    backend.add_special_tokens(["[TOOL_CALLS]", "[THINK]", "[/THINK]"])
    words = Tokenizer(backend, {"eos_token": "<|end|>"})
    runner = echo_service.Saying(words)
    runner.say('[THINK]once[/THINK][TOOL_CALLS][{"name": "time", "arguments": {}}]')
    template = ChatTemplate(
        "[THINK][/THINK][TOOL_CALLS]{{ tools }}{% for m in messages %}{{ m.content }};{% endfor %}", {}
    )
    model = echo_service.built(runner, kv_tokens=4096, max_len=1024)
    with (
        echo_service.serving(model._replace(chat_template=template, tokenizer=words)) as running,
        openai_of(running) as client,
    ):
        asked: Any = {"model": "echo", "messages": TALK, "tools": TOOLS}
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.reasoning_content, message.tool_calls[0].function.name) == ("once", "time")
        alone = client.chat.completions.create(model="echo", messages=TALK).choices[0].message
        assert alone.reasoning_content == "once"
        bare = client.chat.completions.create(**asked, extra_body={"skip_special_tokens": True}).choices[0].message
        assert (bare.content, bare.tool_calls) == ('once[{"name": "time", "arguments": {}}]', None)


def test_templates_without_tools_are_told_of_them() -> None:
    template = ChatTemplate(echo_service.TEMPLATE, {})
    try:
        text = template.render_parsed(read_messages(HISTORY), None, tools=read_tools(TOOLS))
        system = template.render_parsed(read_messages([{"role": "system", "content": "Be brief."}, *TALK]), None,
                                tools=read_tools(TOOLS))  # fmt: skip
    finally:
        template.close()
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert json.dumps(TOOLS[0]["function"]) in text
    assert '<|im_start|>assistant\n{"name": "weather", "arguments": {"city": "Paris"}}<|im_end|>' in text
    assert "<|im_start|>user\nResult of the function:\nrain<|im_end|>" in text
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert system.count("<|im_start|>system") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_required_and_named_calls_are_valid(said: Talker, seed: int, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, parallel in (("required", False), (named, True)):
        done: Any = said.chat(
            tools=TOOLS[:1], tool_choice=choice, seed=seed, stream=stream,
            parallel_tool_calls=parallel, max_tokens=100,
        )  # fmt: skip
        if stream:
            text, calls, reason = joined(done)
            assert text == ""
            [(id, name, arguments)] = calls
        else:
            [made] = done.choices[0].message.tool_calls
            id, name, arguments = made.id, made.function.name, made.function.arguments
            reason = done.choices[0].finish_reason
        assert (name, reason) == ("weather", "tool_calls")
        assert id.startswith("call_")
        jsonschema.validate(json.loads(arguments), WEATHER)


def test_required_calls_that_are_cut_leave_no_text(said: Talker) -> None:
    """Wherever it is cut: within a call's name nothing of it is known, and it isn't text."""
    arguments = '{"city":"Oslo","days":2}'
    call = f'{{"name":"weather","arguments":{arguments}}}'
    said.say(f"[{call},{call}]")
    seen = set()
    for most in range(2, 90, 3):
        asked: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": most}
        [done] = said.chat(**asked).choices
        calls = done.message.tool_calls or ()
        assert (done.message.content or "", done.finish_reason) == ("", "length")
        assert all(arguments.startswith(made.function.arguments) for made in calls)
        seen.add(len(calls))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (None, {}), ({}, {}), ({"type": "object", "properties": {}}, {}),
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, {"a": 1}),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"const": {"a": 1}}}}, {"a": 1}),
    ],
)  # fmt: skip
def test_arguments_are_an_object_and_of_no_parameters_an_empty_one(said: Talker, parameters: Any, wanted: Any) -> None:
    said.say('"once"')
    tools = tools_of() if parameters is None else tools_of(parameters=parameters)
    asked: Any = {"tools": tools, "parallel_tool_calls": False, "max_tokens": 60}
    for choice in ("required", tools_of()[0]):
        [done] = said.chat(**asked, tool_choice=choice).choices
        [made] = done.message.tool_calls
        assert (json.loads(made.function.arguments), done.finish_reason) == (wanted, "tool_calls")


def test_a_form_of_the_text_gives_way_to_a_call(said: Talker) -> None:
    """As in OpenAI's API: response_format speaks of text, of which there is none."""
    said.say('{"a": 1}')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    asked: Any = {"tools": TOOLS[:1], "response_format": form, "max_tokens": 100,
                  "parallel_tool_calls": False}  # fmt: skip
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        [done] = said.chat(**asked, tool_choice=choice).choices
        [made] = done.message.tool_calls
        jsonschema.validate(json.loads(made.function.arguments), WEATHER)
    [done] = said.chat(**asked, tool_choice="none").choices
    assert json.loads(done.message.content) == {"a": 1}


def tools_of(**function: Any) -> Any:
    return [{"type": "function", "function": {"name": "a", **function}}]


FIVE = {"const": 5}
BOMB = {"allOf": [{"type": "integer", "multipleOf": number} for number in (5, 7, 11, 13, 17, 19)]}


@pytest.mark.parametrize(
    ("parameters", "lost"),
    [
        ({"properties": {"n": FIVE, "x": {"not": {"type": "null"}}}}, "{}#/properties/x/not"),
        pytest.param({"properties": {"n": FIVE, "x": {"$ref": "#/$defs/X"}},
                      "$defs": {"X": {"items": {"if": {}, "uniqueItems": True}}}},
                     "{0}#/$defs/X/items/if, {0}#/$defs/X/items/uniqueItems", id="two"),
        ({"properties": {"n": FIVE, "x": {"$ref": "#/$defs/X"}}}, "{}#/properties/x/$ref"),
        ({"properties": {"n": FIVE, "x": {"type": "string", "pattern": "^(?=a)b"}}}, "{}#/properties/x/pattern"),
        ({"properties": {"n": FIVE, "x": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}}, "{}#/properties/x/oneOf"),
        ({"properties": {"n": FIVE, "x": {"type": "string", "minLength": 1.0}}, "required": None}, None),
        ({"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#"}}}, "{}"),
        ({"properties": {"x": BOMB}}, "any parameters, as json: it is too complex"),
        ({"properties": {f"x{i}": {"not": {}} for i in range(9)}}, "any parameters, as json: Unimplemented keys"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "a"}}])
def test_calls_are_held_to_parameters_as_far_as_can_be(
    said: Talker, choice: Any, parameters: Any, lost: str | None
) -> None:
    """What has no grammar is named in a warning, whichever tool has it, and the rest is enforced: that `n` is 5, or
    that arguments are an object."""
    wrong, held = ('{"n":7}', '{"n":5') if "n" in parameters["properties"] else ("7", "{")
    said.say(f'[{{"name":"a","arguments":{wrong}}}]' if choice == "required" else wrong)
    body = {"messages": TALK, "tools": [*TOOLS, *tools_of(parameters=parameters)], "tool_choice": choice}
    answer = said.http.post("/v1/chat/completions", json={**body, "max_tokens": 60})
    assert answer.status_code == 200, answer.text
    warned = answer.headers.get("Warning", "")
    assert (
        (f"not enforced in tool calls: {lost.format('tools[2].function.parameters')}" in warned) if lost else not warned
    ), warned
    called = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (called["name"], called["arguments"][: len(held)]) == ("a", held)
