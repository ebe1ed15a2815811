"""Calls of tools in outputs: what is found is what was meant, wherever the text is cut, in steps linear in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from quire.errors import StartupError
from quire.text.tool_parsers.base import ParsedEvent, ToolCallParser
from quire.text.tool_parsers.formats import TOOL_PARSERS, detect_tool_format, tool_format_named

# Outputs as models write them, a hundred a format and more, with the calls and the text that are in them


NAMES = ("get_weather", "search", "math.add", "book-flight", "f")
WORDS = (
    "Paris", "naïve café", "日本 😀", 'say "hi"', "it's", "C:\\dir\\n", "line\nbreak\ttab", "<tool_call>",
    "</tool_call>", "}{][", "a, b; c)", "[TOOL_CALLS]", "", "\u2028", "<|python_tag|>", "=", '{"name": "f"}', "<", "</",
)  # fmt: skip
TEXTS = ("", "I'll look.", "Let me see:\nfirst this", "a < b, [x] and {y}", "Ünï 😀", "one <tool_cal two", "[TOOL_ no")
Calls = list[tuple[str, dict[str, Any]]]


class Recorded(NamedTuple):
    """An output, its calls, and its text without white space."""

    text: str
    calls: Calls
    content: str


def value(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(8 if depth else 6)
    if kind < 3:
        return chance.choice(WORDS)
    if kind == 3:
        return chance.choice((0, -7, 12345678901234567890, 1.5, -2.5e-7, 3e20))
    if kind == 4:
        return chance.choice((True, False, None))
    if kind == 5:
        return chance.choice(([], {}, [[]], [{}]))
    if kind == 6:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(WORDS) + str(i): value(chance, depth - 1) for i in range(chance.randrange(4))}


def calls_of(chance: random.Random) -> Calls:
    keys = ("city", "days", "query", "opts", "x_1")
    return [
        (chance.choice(NAMES), {key: value(chance, 3) for key in chance.sample(keys, chance.randrange(4))})
        for _ in range(chance.choice((1, 1, 1, 2, 3)))
    ]


def dumped(chance: random.Random, given: Any) -> str:
    return json.dumps(given, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, None, 2)))


def as_object(chance: random.Random, call: tuple[str, dict[str, Any]], word: str = "arguments") -> str:
    name, arguments = call
    given: Any = arguments if chance.random() < 0.85 else json.dumps(arguments)
    members: list[tuple[str, Any]] = [("name", name)]
    if arguments or chance.random() < 0.8:
        members.append((word, given))
    if chance.random() < 0.3:
        members.insert(chance.randrange(3), ("id", chance.choice(("x1", 7, {"a": ["}"]}, None))))
    if chance.random() < 0.3:
        members.reverse()
    return dumped(chance, dict(members))


def stripped(*texts: str) -> str:
    return "".join("".join(texts).split())


def hermes(chance: random.Random) -> Recorded:
    calls, text, said = calls_of(chance), "", []
    for call in calls:
        said.append(chance.choice(TEXTS))
        space = chance.choice(("\n", "", " \n "))
        text += said[-1] + chance.choice(("", "\n")) + f"<tool_call>{space}{as_object(chance, call)}{space}</tool_call>"
    said.append(chance.choice(TEXTS))
    return Recorded(text + chance.choice(("\n", "")) + said[-1], calls, stripped(*said))


def llama(chance: random.Random) -> Recorded:
    calls = calls_of(chance)
    before, after = chance.choice(("", "", "I'll call: ")), chance.choice(("", "", " Done."))
    tag = "<|python_tag|>" if before or chance.random() < 0.4 else chance.choice(("", "\n "))
    text = chance.choice(("; ", ";", "\n")).join(as_object(chance, call, "parameters") for call in calls)
    return Recorded(before + tag + text + after, calls, stripped(before, after))


def mistral(chance: random.Random) -> Recorded:
    calls, before = calls_of(chance), chance.choice(TEXTS)
    if chance.random() < 0.5:
        text = chance.choice(("[TOOL_CALLS]", "[TOOL_CALLS] "))
        after = chance.choice(("", "", " Done."))
        text += "[" + ", ".join(as_object(chance, call) for call in calls) + "]" + after
        return Recorded(before + text, calls, stripped(before, after))
    text = ""
    for name, arguments in calls:
        text += "[TOOL_CALLS]" + name + chance.choice(("", "[ARGS]", "[CALL_ID]a1B2[ARGS]")) + dumped(chance, arguments)
    return Recorded(before + text, calls, stripped(before))


def plain(chance: random.Random) -> Recorded:
    calls = calls_of(chance)
    objects = [as_object(chance, call, chance.choice(("arguments", "parameters"))) for call in calls]
    listed = len(calls) > 1 or chance.random() < 0.5
    text = "[" + ",\n".join(objects) + "]" if listed else objects[0]
    after = chance.choice(("", "", "\nThat is all."))
    return Recorded(chance.choice(("", "\n")) + text + after, calls, stripped(after))


def literal(chance: random.Random, given: Any) -> str:
    if isinstance(given, dict):
        return "{" + ", ".join(f"{key!r}: {literal(chance, item)}" for key, item in given.items()) + "}"
    if isinstance(given, list):
        comma = "," if given and chance.random() < 0.2 else ""
        return "[" + ", ".join(literal(chance, item) for item in given) + comma + "]"
    return json.dumps(given, ensure_ascii=False) if isinstance(given, str) and chance.random() < 0.5 else repr(given)


def pythonic(chance: random.Random) -> Recorded:
    calls = calls_of(chance)
    space = chance.choice(("", " ", "\n"))
    made = [
        f"{name}({f',{space}'.join(f'{key}={literal(chance, item)}' for key, item in arguments.items())})"
        for name, arguments in calls
    ]
    text, before = "[" + f",{space}".join(made) + "]", ""
    if chance.random() < 0.4:
        before = chance.choice(("", "I'll call: "))
        text = f"{before}<|python_start|>{text}<|python_end|>"
    after = chance.choice(("", "", " Done."))
    return Recorded(text + after, calls, stripped(before, after))


def harmony(chance: random.Random) -> Recorded:
    """As HarmonyParser leaves it: texts, and calls with their tags. The last tag ends the output."""
    calls, text, said = calls_of(chance), "", []
    for name, arguments in calls:
        said.append(chance.choice(TEXTS))
        space, kind = chance.choice(("", "functions.")), chance.choice(("", " <|constrain|>json", " json"))
        head = f"commentary to={space}{name}{kind}"
        if chance.random() < 0.3:
            head = f" to=functions.{name} commentary"
        text += f"{said[-1]}<|channel|>{head}<|message|>{dumped(chance, arguments)}<|call|>"
    end = chance.choice(("", "<|call|>"))
    return Recorded(text.removesuffix("<|call|>") + end, calls, stripped(*said))


MAKERS: dict[str, Callable[[random.Random], Recorded]] = {
    "harmony": harmony, "hermes": hermes, "json": plain, "llama3_json": llama, "mistral": mistral, "pythonic": pythonic,
}  # fmt: skip


def recorded(format: str, count: int = 100) -> list[Recorded]:
    chance = random.Random(f"{format} 1")
    return [MAKERS[format](chance) for _ in range(count)]


# What is malformed, or no call: (output, calls as names and argument texts, text).
MALFORMED: dict[str, list[tuple[str, list[tuple[str, str]], str]]] = {
    "hermes": [
        ("", [], ""),
        ("  two spaces \n", [], "  two spaces \n"),
        ("<tool_call>", [], "<tool_call>"),
        ("<tool_call>no JSON</tool_call>", [], "<tool_call>no JSON</tool_call>"),
        ('<tool_call>{"arguments": {}}</tool_call>', [], '<tool_call>{"arguments": {}}</tool_call>'),
        ('<tool_call>{"name": 5}</tool_call>', [], '<tool_call>{"name": 5}</tool_call>'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')], ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')], ""),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n\t2"}}</tool_call>', [("f", '{"a": "1\\n\\t2"}')], ""),
        ('<tool_call>{"name": "f", "arguments": {"a": "C:\\dir"}}</tool_call>', [("f", '{"a": "C:\\\\dir"}')], ""),
        ('<tool_call>\n```json\n{"name": "f"}\n```\n</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}', [("f", "{}"), ("g", "{}")], ""),
        ('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', [("f", "{}"), ("g", "{}")], ""),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")], ""),
        ('<tool_call>{"arguments": "{\\"a\\": \\"\\ud83d\\ude00\\"}", "name": "f"}', [("f", '{"a": "😀"}')], ""),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\d\\"}"}', [("f", '{"a": "\\\\d"}')], ""),
        ('<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>', [("f", "{}")], ""),
        ("<<tool_call>{\"name\": \"f\"}</tool_call>", [("f", "{}")], "<"),
    ],
    "harmony": [
        ("<|channel|>", [], "<|channel|>"),
        ("<|channel|>final<|message|>so", [], "<|channel|>final<|message|>so"),
        ("<|channel|>commentary to=<|message|>{}", [], "<|channel|>commentary to=<|message|>{}"),
        ("<|channel|>commentary to=functions.f", [], "<|channel|>commentary to=functions.f"),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1', [("f", '{"a": 1')], ""),
        ('<|channel|>commentary to=functions.f<|message|>\n{"a": "1\n2"}<|cal', [("f", '{"a": "1\\n2"}')], ""),
        ("<|channel|>commentary to=f<|message|>{}<|call|>so", [("f", "{}")], "so"),
    ],
    "json": [
        ('{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}'),
        ('{"answer": [1, 2]}', [], '{"answer": [1, 2]}'),
        ("[1, 2]", [], "[1, 2]"),
        ('Sure: {"name": "f"}', [], 'Sure: {"name": "f"}'),
        ('{"name": "f"', [("f", "")], ""),
        ('```json\n{"name": "f", "arguments": {"a": 1}}\n```', [("f", '{"a": 1}')], ""),
        ('```json\n{"name": "f"}\n```\n```python\nx\n```', [("f", "{}")], "\n```python\nx\n```"),
        ('```\n[{"name": "f"}, {"name": "g"}]\n```\nDone.', [("f", "{}"), ("g", "{}")], "\nDone."),
        ('```python\n{"name": "Ann"}\n```', [], '```python\n{"name": "Ann"}\n```'),
        ('{"name": "\\u0066"}', [("f", "{}")], ""),
        ("", [], ""),
    ],
    "llama3_json": [
        ('<|python_tag|>print("f")', [], '<|python_tag|>print("f")'),
        ('{"name": "unknown", "parameters": {}}', [], '{"name": "unknown", "parameters": {}}'),
        ('{"name": "f", "parameters": {}}; and', [("f", "{}")], "; and"),
    ],
    "mistral": [
        ("[TOOL_CALLS]", [], "[TOOL_CALLS]"),
        ("[TOOL_CALLS]two words{}", [], "[TOOL_CALLS]two words{}"),
        ("[TOOL_CALLS]f[ARG]{}", [], "[TOOL_CALLS]f[ARG]{}"),
        ('[TOOL_CALLS]f{"a": [1', [("f", '{"a": [1')], ""),
        ('[TOOL_CALLS]f{"a": "1\n2"}', [("f", '{"a": "1\\n2"}')], ""),
        ("[TOOL_CALLS][]", [], "[TOOL_CALLS][]"),
        ('[TOOL_CALLS]```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', [("f", '{"a": 1}')], ""),
        ('[TOOL_CALLS] ```\n{"name": "f"}\n```\nDone.', [("f", "{}")], "\nDone."),
        ("[TOOL_CALLS]```json\nf{}\n```", [], "[TOOL_CALLS]```json\nf{}\n```"),
    ],
    "pythonic": [
        ("[1, 2]", [], "[1, 2]"),
        ("[other(x=1)]", [], "[other(x=1)]"),
        ("[f(x='a", [("f", '{"x": "a')], ""),
        ("[f(), g()]", [("f", "{}"), ("g", "{}")], ""),
        ("[f(x='\\x41\\u00e9\\U0001f600\\q')]", [("f", '{"x": "Aé😀\\\\q"}')], ""),
    ],
}  # fmt: skip

# No calls, and the part of each that is taken for one where it comes in single characters.
BROKEN: dict[str, list[tuple[str, list[tuple[str, str]]]]] = {
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call> so', [("f", '{"a": 1\n')]),
        ('so\n<tool_call>{"name": "f", "arguments": 12}</tool_call>', [("f", "12")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "say "hi""}}</tool_call>', [("f", '{"a": "say "hi""}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', [("f", '{"a": 1,}')]),
    ],
    "harmony": [
        ('<|channel|>commentary to=f<|message|>{"a": [1,]}<|call|>', [("f", '{"a": [1,]}')]),
        ('so <|channel|>commentary to=f code<|message|>x = 1', [("f", "x")]),
    ],
    "mistral": [('[TOOL_CALLS]f{"a": [1,]} so', [("f", '{"a": [1,]}')])],
    "pythonic": [
        ("[f(1)]", [("f", "")]),
        ("[f(x=open)] so", [("f", '{"x": ')]),
        ("[f(x={1: 2})]", [("f", '{"x": {')]),
    ],
}  # fmt: skip


TOOLS = (*NAMES, "g")
TENTH = 10  # which outputs are cut at every character
Found = tuple[list[tuple[str, str]], str]


def reader(format: str) -> ToolCallParser:
    return TOOL_PARSERS[format](TOOLS)


def found(events: list[ParsedEvent]) -> Found:
    calls: list[tuple[str, str]] = []
    text = ""
    for kind, piece, index in events:
        if kind == "content":
            text += piece
        elif kind == "call":
            assert index == len(calls)
            calls.append((piece, ""))
        else:
            assert index == len(calls) - 1
            calls[index] = calls[index][0], calls[index][1] + piece
    return calls, text


def read(format: str, *pieces: str) -> Found:
    one = reader(format)
    return found([event for piece in pieces for event in one.feed(piece)] + one.finish())


@pytest.mark.parametrize("format", TOOL_PARSERS)
def test_recorded_outputs(format: str) -> None:
    """Whole and in single characters; a tenth of them cut at every character."""
    outputs = recorded(format)
    assert len(outputs) >= 100
    for number, output in enumerate(outputs):
        calls, text = whole = read(format, output.text)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == output.calls, output.text
        assert stripped(text) == output.content, output.text
        assert text == text.rstrip()
        assert read(format, *output.text) == whole, output.text
        for cut in range(1, len(output.text) if number % TENTH == 0 else 1):
            assert read(format, output.text[:cut], output.text[cut:]) == whole, (output.text, cut)


@pytest.mark.parametrize("format", TOOL_PARSERS)
def test_malformed_outputs(format: str) -> None:
    for text, calls, content in MALFORMED[format]:
        assert read(format, text) == read(format, *text), text
        seen = read(format, text)
        assert seen[0] == calls, text
        if content or not calls:
            assert seen[1] == content, text


@pytest.mark.parametrize("format", BROKEN)
def test_a_call_that_is_none_is_text_unless_a_part_was_passed_on(format: str) -> None:
    """All of it; and a call beside it stays one."""
    for text, begun in BROKEN[format]:
        assert read(format, text) == ([], text)
        assert read(format, *text)[0] == begun
    if format == "hermes":
        good = '<tool_call>{"name": "f", "arguments": {"b": 2}}</tool_call>'
        for text, _ in BROKEN[format]:
            assert read(format, good + text) == ([("f", '{"b": 2}')], text)
            assert read(format, text + good) == ([("f", '{"b": 2}')], text)


@pytest.mark.parametrize("format", TOOL_PARSERS)
def test_any_text_is_text_or_calls(format: str) -> None:
    """Every end of a recorded output that lost its beginning, and every beginning: nothing raises, and what has no
    calls is all text."""
    for output in recorded(format, 12):
        for cut in range(0, len(output.text), 7):
            for text in (output.text[:cut], output.text[cut:], output.text[cut:] + output.text[:cut]):
                calls, said = read(format, text)
                assert read(format, *text) == (calls, said), text
                assert calls or said == text


ADVERSARIAL = (
    "<tool_call>", "<tool_call>{", "<", '<tool_call>{"', '<tool_call>{"name": "f", "arguments": {"', "[TOOL_CALLS]",
    "[TOOL_CALLS]f", "[TOOL_CALLS][", '{"', "{", "[", "[f(", "[f(x=[", '{"name": "f"};', "\\", '"\\', '{"name": "',
    "<|python_tag|>{", " ", "\n<", "[f(x='\\u", '<tool_call>{"arguments": {"a": "', "</tool_call>",
    "<|python_start|>[f(),", "aaaa<tool_cal", "<|channel|>", "<|channel|>commentary to=f<|message|>",
    "<|channel|>commentary to=f<|message|>{}",
)  # fmt: skip


def repeated(piece: str, size: int) -> str:
    return (piece * (size // len(piece) + 1))[:size]


def steps(format: str, text: str) -> int:
    one = reader(format)
    one.feed(text)
    one.finish()
    return one.steps


@pytest.mark.parametrize("format", TOOL_PARSERS)
def test_steps_are_linear(format: str) -> None:
    """What is hard to match, 100 KB of it together: so many steps a character whatever the length."""
    for piece in ADVERSARIAL:
        few, many = (steps(format, repeated(piece, size)) for size in (4_000, 8_000))
        assert few <= 3 * 4_000, piece
        assert many <= 2.1 * few + 100, piece
    assert steps(format, "".join(repeated(piece, 4_000) for piece in ADVERSARIAL)) <= 300_000


def test_formats_of_templates() -> None:
    assert detect_tool_format("{{ '<tool_call>' }}") == "hermes"
    assert detect_tool_format("[TOOL_CALLS]") == "mistral"
    assert detect_tool_format("'functions.' + name + '<|channel|>commentary '") == "harmony"
    assert tool_format_named("openai") == "harmony"
    assert detect_tool_format("x <|python_tag|> y") == "llama3_json"
    assert detect_tool_format("[func_name1(params_name1=params_value1]") == "pythonic"
    assert detect_tool_format("{{ messages }}") == "json"
    assert tool_format_named("llama4_pythonic") == "pythonic"
    with pytest.raises(StartupError, match="--tool-call-parser is 'other'"):
        tool_format_named("other")
