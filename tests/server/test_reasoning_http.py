"""Thoughts over HTTP: apart from the answer, whole and streamed; bounded; with tools and forms behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import echo_service
import pytest
from asking import MARKERS, TALK, StreamedChoice, Talker, choices_of, refusal, saying
from openai import BadRequestError

from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import Structured
from quire.server.reasoning import ModelReasoning, RequestReasoning
from quire.server.request_models import ChatRequest
from quire.text.harmony import FINAL
from quire.text.reasoning_parser import REASONING_FORMATS

pytestmark = pytest.mark.xdist_group(name="reasoning_http")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %};{% endfor %}{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% elif opened is defined %}<think>\n{% endif %}{% endif %}"
)
SAID = "<think>\nonce upon\n a time\n</think>\n\nquire"
THOUGHT, ANSWER = "once upon\n a time", "quire"
PAGES = {"type": "object", "properties": {"of": {"enum": ["quire", "ream"]}}, "required": ["of"]}
TOOLS: Any = [{"type": "function", "function": {"name": "pages", "parameters": PAGES}}]


@pytest.fixture(scope="module")
def served() -> Iterator[Talker]:
    with saying(TEMPLATE, MARKERS) as found:
        yield found


def streamed(served: Talker, **more: Any) -> tuple[StreamedChoice, Any]:
    chunks = [*served.chat(stream=True, stream_options={"include_usage": True}, **more)]
    [one] = choices_of(chunks)
    return one, chunks[-1]


def test_thoughts_are_apart_whole_and_streamed(served: Talker) -> None:
    served.say(SAID)
    whole = served.chat()
    [choice] = whole.choices
    assert (choice.message.reasoning_content, choice.message.reasoning) == (THOUGHT, THOUGHT)
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    several = served.chat(n=3)
    assert [(one.message.reasoning_content, one.message.content) for one in several.choices] == [(THOUGHT, ANSWER)] * 3
    thoughts = [found.usage.completion_tokens_details.reasoning_tokens for found in (several, whole)]
    assert thoughts[0] == 3 * thoughts[1]
    found, last = streamed(served)
    assert (found.thought, found.text) == (THOUGHT, ANSWER)
    within = len(echo_service.tokenizer(MARKERS).encode("\nonce upon\n a time\n", add_special_tokens=False))
    for usage in (whole.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == within
        assert usage.completion_tokens > within + 2


def test_what_was_cut_within_thoughts_can_be_sent_back(served: Talker) -> None:
    served.say(SAID)
    cut = served.chat(max_tokens=5).choices[0].message
    assert (cut.content, cut.reasoning_content) == (None, "once upon")
    for name in ("reasoning", "reasoning_content"):
        talk = [*TALK, {"role": "assistant", "content": "x", name: "hm"}]
        found = served.http.post("/tokenize", json={"messages": talk, "return_token_strs": True}).json()
        assert "(hm)" in "".join(found["token_strs"])
    for said in (cut, {"role": "assistant", "content": None, "reasoning": "once"}):
        assert served.chat(messages=[*TALK, said, *TALK]).choices[0].message.content == ANSWER
    with pytest.raises(BadRequestError, match="content must be a string"):
        served.chat(messages=[*TALK, {"role": "user", "content": None, "reasoning": "once"}, *TALK])


@pytest.mark.parametrize(
    ("variables", "text", "expected"),
    [
        ({"opened": True}, "once\n</think> quire", ("once", "quire")),
        ({"opened": True}, "once", ("once", None)),
        ({"enable_thinking": False}, "quire </think>", (None, "quire </think>")),
        ({}, "quire <think>", (None, "quire <think>")),
        ({}, "<think></think>quire", (None, "quire")),
    ],
)
def test_how_the_prompt_ends_counts(served: Talker, variables: Any, text: str, expected: Any) -> None:
    served.say(text)
    [choice] = served.chat(extra_body={"chat_template_kwargs": variables}).choices
    message = choice.message
    assert (getattr(message, "reasoning_content", None), message.content) == expected


def test_they_may_be_left_out(served: Talker) -> None:
    served.say(SAID)
    found = served.chat(extra_body={"include_reasoning": False})
    assert not hasattr(found.choices[0].message, "reasoning_content")
    assert found.choices[0].message.content == ANSWER
    assert found.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("opened", [False, True])
def test_a_budget_ends_them(served: Talker, budget: int, opened: bool) -> None:
    served.say("once upon a time there was a quire of pages" * 3)
    more: Any = {"thinking_token_budget": budget, "return_token_ids": True}
    if opened:
        more["chat_template_kwargs"] = {"opened": True}
    found = served.chat(extra_body=more, max_tokens=40)
    assert found.usage.completion_tokens_details.reasoning_tokens == budget
    ids = found.choices[0].token_ids
    begin, end = (echo_service.tokenizer(MARKERS).token_to_id(text) for text in MARKERS)
    assert ids.index(end) == budget + (not opened)
    assert opened or ids[0] == begin
    assert found.choices[0].message.content


def test_calls_come_behind_them(served: Talker) -> None:
    served.say('<think>once</think><tool_call>{"name": "pages", "arguments": {"of": "quire"}}</tool_call>')
    [choice] = served.chat(tools=TOOLS).choices
    assert choice.message.reasoning_content == "once"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"of": "quire"}
    served.say("<think>once</think>")
    for choice_of in ("required", {"type": "function", "function": {"name": "pages"}}):
        [choice] = served.chat(tools=TOOLS, tool_choice=choice_of).choices
        assert choice.message.reasoning_content == "once"
        assert json.loads(choice.message.tool_calls[0].function.arguments)["of"] in ("quire", "ream")
        found, _ = streamed(served, tools=TOOLS, tool_choice=choice_of)
        assert (found.thought, found.text) == ("once", "")
        assert json.loads(found.calls[0][2])["of"] in ("quire", "ream")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAGES, "strict": True}}
    for thoughts, variables in (("once", {}), (None, {"enable_thinking": False})):
        [choice] = served.chat(response_format=form, extra_body={"chat_template_kwargs": variables}).choices
        assert getattr(choice.message, "reasoning_content", None) == thoughts
        assert json.loads(choice.message.content)["of"] in ("quire", "ream")


def test_a_message_that_is_continued_within_its_thoughts(served: Talker) -> None:
    served.say(" me see</think>quire")
    for begun, expected in (("<think>let", ("me see", "quire")), ("The", (None, " me see</think>quire"))):
        more = {"continue_final_message": True, "add_generation_prompt": False}
        [choice] = served.chat(messages=[*TALK, {"role": "assistant", "content": begun}], extra_body=more).choices
        assert (getattr(choice.message, "reasoning_content", None), choice.message.content) == expected


def test_a_prompt_that_was_cut_still_says_what_follows(served: Talker) -> None:
    served.say("once</think>quire")
    more: Any = {"chat_template_kwargs": {"opened": True}, "truncate_prompt_tokens": 4}
    [choice] = served.chat(extra_body=more).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("once", ANSWER)


def test_markers_of_several_tokens() -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAGES, "strict": True}}
    opened: Any = {"chat_template_kwargs": {"opened": True}}
    within = len(echo_service.tokenizer().encode("once upon a time", add_special_tokens=False))
    with saying(TEMPLATE) as served:
        for more, begin in (({}, "<think>"), (opened, "")):
            served.say(f"{begin}once upon a time</think>quire")
            for usage in (served.chat(extra_body=more).usage, streamed(served, extra_body=more)[1].usage):
                assert usage.completion_tokens_details.reasoning_tokens == within
        message = served.chat(response_format=form).choices[0].message  # at once
        assert json.loads(message.content)["of"] in ("quire", "ream")
        assert getattr(message, "reasoning_content", None) is None
        for field, value in (("response_format", form), ("thinking_token_budget", 3)):
            told = refusal(served.http, "/v1/chat/completions", {"messages": TALK, field: value, **opened})
            assert told["param"] == field
            assert "'</think>' is not one token of this model" in told["message"]


def test_cut_within_thoughts_nothing_was_called(served: Talker) -> None:
    served.say("<think>once upon a time there was a quire</think>")
    named: Any = {"type": "function", "function": {"name": "pages"}}
    [choice] = served.chat(tools=TOOLS, tool_choice=named, max_tokens=3).choices
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, None)


def test_what_is_wrong_is_named(served: Talker) -> None:
    for more, message in (
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "x"}, "thinking_token_budget"),
        ({"thinking_token_budget": 4, "ignore_eos": True}, "ignore_eos can't be combined with thinking_token_budget"),
        ({"include_reasoning": "x"}, "include_reasoning"),
    ):
        told = refusal(served.http, "/v1/chat/completions", {"messages": TALK, **more})
        assert message in json.dumps(told), told


def test_thoughts_of_several_conversations(served: Talker) -> None:
    served.say(SAID)
    body = {"messages": [TALK, TALK, [{"role": "user", "content": "a", "odd": 1}]], "max_tokens": 200}
    answer = served.http.post("/v1/chat/completions/batch", json=body)
    messages = [choice["message"] for choice in answer.json()["choices"]]
    assert [(one["reasoning"], one["content"]) for one in messages] == [(THOUGHT, ANSWER)] * 3
    assert "messages.odd" in answer.headers["warning"]
    body["messages"] = [[*TALK, {"role": "assistant", "content": begun}] for begun in ("<think>once", "so")]
    answer = served.http.post("/v1/chat/completions/batch", json={**body, "continue_final_message": True})
    assert "begin the reasoning" in answer.json()["error"]["message"]


HARMONY = "{{ '<|start|>assistant<|channel|>analysis<|message|><|channel|>commentary' if tools }}<|start|>assistant"
TAGS = tuple(f"<|{tag}|>" for tag in ("start", "channel", "message", "constrain", "call", "return"))
ANALYSIS = "<|channel|>analysis<|message|>once upon a time<|start|>assistant"  # `<|end|>` would end these outputs


def test_messages_of_harmony() -> None:
    """Reasoning, an answer and a call; and a form behind the head of the answer, which is more than one token."""
    words = echo_service.tokenizer(TAGS)
    within = len(words.encode("once upon a time", add_special_tokens=False))
    with saying(HARMONY, TAGS) as served:
        served.say(f"{ANALYSIS}<|channel|>final<|message|>quire")
        [choice] = (whole := served.chat()).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("once upon a time", "quire")
        found, last = streamed(served)
        assert (found.thought, found.text) == ("once upon a time", "quire")
        for usage in (whole.usage, last.usage):
            assert usage.completion_tokens_details.reasoning_tokens == within
        served.say(f'{ANALYSIS}<|channel|>commentary to=functions.pages <|constrain|>json<|message|>{{"of": "ream"}}')
        [choice] = served.chat(tools=TOOLS).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("once upon a time", None)
        assert choice.message.tool_calls[0].function.name == "pages"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"of": "ream"}
        found, _ = streamed(served, tools=TOOLS)
        assert (found.calls[0][1:], found.text) == (["pages", '{"of": "ream"}'], "")
    words = echo_service.tokenizer((*TAGS, "assistant", "final"))
    reasoning = ModelReasoning("harmony", words)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAGES}}
    request = ChatRequest.model_validate({"messages": TALK, "response_format": form})
    parsed = RequestReasoning(REASONING_FORMATS["harmony"], "maybe", (1,), (), words.token_bytes)
    made = SamplingParams(structured=Structured("json", json.dumps(PAGES)))
    structured = reasoning.apply_to(made, request, parsed).structured
    assert structured is not None
    assert words.decode(list(structured.after), skip_special_tokens=False) == FINAL
    assert structured.opening == (1,)
