"""Histories are read as well as they can be: what an assistant or a tool once wrote is never refused, and the nearest
conversation that a template can express is rendered."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quire.errors import InputError, StartupError
from quire.text.chat_messages import read_messages
from quire.text.chat_template import ChatTemplate
from quire.text.template_fit import LATE_SYSTEM, RESULT, TOOLS_PROMPT
from quire.text.template_process import RenderTimeout
from quire.text.tools import read_tools

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather."}}]
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
HERMES = (
    "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}]{% endfor %}{% endfor %}"
)
JSON_ARGUMENTS = HERMES.replace("c.function.arguments is string", "false")
STRICT = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + STRICT
SHORT_IDS = (
    "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}[{{ c.function.name }} {{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('so do these') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ m.tool_call_id }}{% endfor %}"
)


def say(role: str, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(arguments: Any = "{}", name: str = "weather", id: str | None = "call_1") -> dict[str, Any]:
    return say("assistant", None, tool_calls=[{"id": id, "function": {"name": name, "arguments": arguments}}])


def result(content: Any = "sun", id: str | None = "call_1") -> dict[str, Any]:
    return say("tool", content, tool_call_id=id)


@cache
def compiled(source: str) -> ChatTemplate:
    """Return the template, whose process all tests share."""
    return ChatTemplate(source, {})


def rendered(source: str, messages: list[Any], tools: Any = None, **more: Any) -> str:
    parsed = read_messages(messages)
    return compiled(source).render_parsed(parsed, None, False, tools=read_tools(tools) if tools else (), **more)


NO_OBJECTS: dict[str, tuple[Any, Any]] = {  # arguments: what a template that takes text gets, and what another one gets
    '{"text": "He said "hi""}': ('{"text": "He said "hi""}', {"arguments": '{"text": "He said "hi""}'}),
    '{"a": ': ('{"a": ', {"arguments": '{"a": '}),
    "[1]": ("[1]", {"arguments": "[1]"}),
    '"Rome"': ('"Rome"', {"arguments": '"Rome"'}),
    "5": ("5", {"arguments": "5"}),
    '{"a": NaN}': ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
    '{"a": 1e999}': ('{"a": 1e999}', {"arguments": '{"a": 1e999}'}),
    "[" * 50_000: ("[" * 50_000, {"arguments": "[" * 50_000}),
    "null": ("{}", {}),
    '{"a": ' + "[" * 40 + "]" * 40 + "}": (
        '{"a": ' + "[" * 40 + "]" * 40 + "}",
        {"arguments": '{"a": ' + "[" * 40 + "]" * 40 + "}"},
    ),
}


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda text: text[:20])
def test_arguments_that_are_no_object_are_shown(arguments: str) -> None:
    history = [say("user"), call(arguments), result()]
    [note] = read_messages(history).notes
    assert note.startswith("messages[1].tool_calls[0].function.arguments is no JSON")
    text, wrapped = NO_OBJECTS[arguments]
    assert f"[weather {text}]" in rendered(HERMES, history)
    assert f"[weather {json.dumps(wrapped)}]" in rendered(JSON_ARGUMENTS, history)
    assert json.dumps({"name": "weather", "arguments": {} if text == "{}" else text}) in rendered(CHATML, history)


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", '{"a": [1]}', {"a": [1]}])
def test_arguments_that_are_an_object_stay_one(arguments: Any) -> None:
    parsed = read_messages([say("user"), call(arguments), result()])
    expected = {"a": [1]} if arguments and "a" in arguments else {}
    assert parsed.messages[1]["tool_calls"][0]["function"]["arguments"] == expected
    assert parsed.notes == []


READ: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # a message, how it is read, and the number of notes
    "null": (say("assistant", None), say("assistant", ""), 0),
    "absent": ({"role": "assistant"}, say("assistant", ""), 0),
    "no parts": (say("assistant", []), say("assistant", ""), 0),
    "refusal": (say("assistant", None, refusal="no"), say("assistant", "no"), 0),
    "text and refusal": (say("assistant", "a", refusal="no"), say("assistant", "a\nno"), 0),
    "null refusal": (say("assistant", "a", refusal=None, audio=None), say("assistant", "a"), 0),
    "audio": (say("assistant", "a", audio={"id": "x"}), say("assistant", "a"), 1),
    "parts": (
        say("assistant", [{"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "b"}]),
        say("assistant", "no\nb"), 0,
    ),
    "input text": (say("user", [{"type": "input_text", "text": "a"}]), say("user", "a"), 0),
    "thinking": (
        say("assistant", [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]),
        say("assistant", "a", reasoning_content="hm"), 0,
    ),
    "Mistral's thinking": (
        say("assistant", [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]),
        say("assistant", "", reasoning_content="hm"), 0,
    ),
    "another part": (say("assistant", [{"type": "video", "video": 1}]), say("assistant", ""), 1),
    "a tool's part": (result([{"type": "tool_reference"}]), say("tool", "", tool_call_id="call_1"), 1),
    "tool null": (result(None), say("tool", "", tool_call_id="call_1"), 0),
    "tool without parts": (result([]), say("tool", "", tool_call_id="call_1"), 0),
    "tool object": (result({"é": 1}), say("tool", '{"é": 1}', tool_call_id="call_1"), 0),
    "empty id": (result(id=""), say("tool", "sun"), 0),
    "long id": (result(id="x" * 500), say("tool", "sun", tool_call_id="x" * 500), 0),
    "number": (say("assistant", 5), say("assistant", "5"), 0),
    "a tool's number": (result(1.5), say("tool", "1.5", tool_call_id="call_1"), 0),
    "texts": (result(["a", "b"]), say("tool", "a\nb", tool_call_id="call_1"), 0),
    "function": ({"role": "function", "name": "f", "content": "1"}, say("tool", "1", name="f"), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_past_messages_are_read(name: str) -> None:
    given, expected, notes = READ[name]
    parsed = read_messages([given])
    assert parsed.messages == [expected]
    assert len(parsed.notes) == notes
    assert all(note.startswith("messages[0].") for note in parsed.notes)


def test_past_calls_are_read() -> None:
    """The older form of a call, a custom tool's, and names and ids that no definition may have."""
    old = say("assistant", None, function_call={"name": "f", "arguments": '{"a": 1}'})
    custom = say("assistant", "", tool_calls=[{"id": "", "type": "custom", "custom": {"name": "sh", "input": "ls"}}])
    [first, second, third] = read_messages([old, custom, call(name="a b/c:d" * 40, id=None)]).messages
    assert first["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert second["tool_calls"] == [{"type": "function", "function": {"name": "sh", "arguments": {"input": "ls"}}}]
    assert third["tool_calls"][0]["function"]["name"] == "a b/c:d" * 40


def test_notes_are_bounded() -> None:
    notes = read_messages([say("assistant", [{"type": "x"}])] * 1000).notes
    assert len(notes) == 9
    assert notes[-1] == "and 992 more"


@pytest.mark.parametrize(
    "message",
    [
        say("user", None), {"role": "user"}, say("user", [{"type": "document"}]), say("user", "a", tool_calls=[{}]),
        say("assistant", "", tool_calls=[{"function": {}}]), say("assistant", "", tool_calls=[{"type": "web"}]),
        say("assistant", "", tool_calls=[{"function": {"name": ""}}]), say("assistant", "", reasoning=5),
        say("user", "", tool_calls=[{"function": {"name": "f"}}]), call(id=[]),  # type: ignore[arg-type]
        say("assistant", "", function_call="f"), call({"a": float("nan")}),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"messages\[0\]"):
        read_messages([message])


USER, YO = say("user"), say("assistant", "yo")
FITTED: dict[str, tuple[str, list[Any], str]] = {  # a template, a history, and its text
    "as it is": (CHATML, [USER, USER, YO, YO], "<user>hi<user>hi<assistant>yo<assistant>yo"),
    "developer": (CHATML, [say("developer", "d"), USER], "<system>d<user>hi"),
    "developer named": (CHATML + "{# 'developer' #}", [say("developer", "d"), USER], "<developer>d<user>hi"),
    "two systems": (CHATML, [say("system", "s"), say("developer", "d"), USER], "<system>s\n\nd<user>hi"),
    "late system": (CHATML, [USER, YO, say("system", "s"), USER], "<user>hi<assistant>yo<system>s<user>hi"),
    "late system, moved": (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}|{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        [USER, YO, say("system", "s"), USER], f"<user>hi<assistant>yo<user>{LATE_SYSTEM}s<user>hi",
    ),
    "another role": (CHATML, [say("critic", "c"), USER], "<critic>c<user>hi"),
    "another role, dropped": (
        "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        [USER, say("critic", "c"), YO], "<user>hi<user>critic:\nc<assistant>yo",
    ),
    "system alone, dropped": (
        "{% for m in messages if m.role != 'system' or messages | length > 1 %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}", [say("system", "s")], "<user>s",
    ),
    "late system, strict": (
        STRICT, [USER, YO, say("system", "s"), USER], f"<user>hi<assistant>yo<user>{LATE_SYSTEM}s\n\nhi",
    ),
    "no system": (NO_SYSTEM, [say("system", "s"), USER, YO, USER], "<user>s\n\nhi<assistant>yo<user>hi"),
    "neighbors, strict": (STRICT, [USER, USER, YO, YO], "<user>hi\n\nhi<assistant>yo\n\nyo"),
    "assistant first, strict": (STRICT, [YO, USER], "<user><assistant>yo<user>hi"),
    "assistant after system, strict": (STRICT, [say("system", "s"), YO, USER], "s|<user><assistant>yo<user>hi"),
    "two results, strict": (
        STRICT, [USER, call(), result(), result("rain"), USER],
        f'<user>hi<assistant>{{"name": "weather", "arguments": {{}}}}<user>{RESULT}sun\n\n{RESULT}rain\n\nhi',
    ),
    "a result first": (HERMES, [result(), USER], "None<tool>sun<user>hi"),
    "a result first, strict": (STRICT, [result(), USER], f"<user>{RESULT}sun\n\nhi"),
    "a message between": (
        HERMES, [USER, call(), USER, result()], "None<user>hi<assistant>[weather {}]<user>hi<tool>sun",
    ),
    "short ids": (
        SHORT_IDS, [USER, call(), result()], "None<user>hi[weather 6f0c3ca1f]<assistant><tool>sun6f0c3ca1f",
    ),
    "short ids kept": (
        SHORT_IDS, [USER, call(id="a1B2c3D4e"), result(id="a1B2c3D4e")],
        "None<user>hi[weather a1B2c3D4e]<assistant><tool>suna1B2c3D4e",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTED)
def test_the_nearest_conversation_is_rendered(name: str) -> None:
    source, history, expected = FITTED[name]
    text = rendered(source, history)
    if "short ids" not in name:
        assert text == expected
        return
    id = text.partition("[weather ")[2][:9]
    assert id.isalnum()
    assert text == expected.replace("6f0c3ca1f", id)


def test_turns_only_grow() -> None:
    """What was rendered of a conversation stays as it was while messages are added, so that its prefix is found."""
    history = [
        say("system", "s"), USER, call("["), result(), result("rain"), USER, YO, say("system", "late"), USER, USER, YO,
        YO, call(), USER, result(id="x"), USER,
    ]  # fmt: skip
    for source in (CHATML, HERMES, JSON_ARGUMENTS, STRICT, NO_SYSTEM):
        texts = [rendered(source, history[:count], TOOLS) for count in range(2, len(history))]
        for before, after in pairwise(texts):
            assert after.startswith(before), source


def test_tools_are_described_where_the_template_has_none() -> None:
    text = rendered(STRICT, [USER, call(), result()], TOOLS)
    assert text.startswith(TOOLS_PROMPT.format(tools=json.dumps(TOOLS[0]["function"])) + "|<user>hi<assistant>{")
    assert "weather" not in rendered(STRICT, [USER], None)


def test_variables_that_a_template_does_not_read_have_no_effect() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% else %}{% set first = '' %}"
        "{% endif %}{% if not thinking is defined %}{% set thinking = true %}{% endif %}{{ first }}{{ thinking }}"
        "{{ mode }}"
        "{% for m in messages %}{% set role = m.role %}{{ role }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.variables == {"thinking", "mode"}
    assert template.render([USER], thinking=False, mode="fast", other=[1] * 5000, first="x") == "Falsefastuser"
    template.close()


def test_where_named_templates_are(tmp_path: Path) -> None:
    """A processor's template wins over the tokenizer's; `tool_use` is for requests with tools."""

    def found(tools: Any = None) -> str:
        template = ChatTemplate.find(tmp_path)
        assert template is not None
        try:
            return template.render_parsed(read_messages([USER]), None, tools=read_tools(tools) if tools else ())
        finally:
            template.close()

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "tokenizer"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert found() == "processor"
    with_tools = (
        "\n  {% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\n\n"
    )
    named = [{"name": "default", "template": " D\n{% set x = 1 %}\n"}, {"name": "tool_use", "template": with_tools}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    for tools, one in ((None, named[0]), (TOOLS, named[1])):
        alone = PreTrainedTokenizerFast(tokenizer_object=_tokenizer()).apply_chat_template(
            [USER], chat_template=one["template"], tools=tools, tokenize=False
        )
        assert found(tools) == alone
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(StartupError, match=r"chat_template.json is no JSON"):
        found()
    (tmp_path / "chat_template.jinja").write_text("J")
    assert (found(), found(TOOLS)) == ("J", "J")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ tools | length }}")
    assert (found(), found(TOOLS)) == ("J", "T1")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())


def test_a_probe_that_is_late_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may make a template late. One that always is, is not probed for ever."""
    template, renders, late = ChatTemplate(HERMES, {}), 0, True
    render = template._process.render

    def count(*given: Any) -> str | None:
        nonlocal renders
        renders += 1
        if late:
            raise RenderTimeout("it ran longer than 1 s")
        return render(*given)

    monkeypatch.setattr(template._process, "render", count)
    assert not template.traits(None).calls
    late = False
    assert template.traits(None).calls
    once = renders
    assert template.traits(None).calls
    assert renders == once

    template, late = ChatTemplate(HERMES, {}), True
    monkeypatch.setattr(template._process, "render", count)
    for _ in range(4):
        assert not template.content_formats().accepts_parts
        assert not template.traits(None).calls
    assert renders < 4 * once
