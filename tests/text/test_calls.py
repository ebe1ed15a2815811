"""Calls of tools in outputs: what is found is what was meant, wherever the text is cut, in steps linear in it."""

from __future__ import annotations

import json
from functools import partial

import pytest
from linear_time import ratio, repeated
from recorded_calls import BROKEN, MALFORMED, NAMES, recorded, stripped

from quire.errors import StartupError
from quire.text.calls.events import CallReader, Event
from quire.text.calls.formats import FORMATS, format_named, format_of

TOOLS = (*NAMES, "g")
TENTH = 10  # which outputs are cut at every character in each run; soak cuts the others
Found = tuple[list[tuple[str, str]], str]


def reader(format: str) -> CallReader:
    return FORMATS[format](TOOLS)


def found(events: list[Event]) -> Found:
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
    return found([event for piece in pieces for event in one.feed(piece)] + one.end())


def assert_cut_anywhere(format: str, text: str, whole: Found) -> None:
    for cut in range(1, len(text)):
        assert read(format, text[:cut], text[cut:]) == whole, (text, cut)


@pytest.mark.parametrize("format", FORMATS)
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
        if number % TENTH == 0:
            assert_cut_anywhere(format, output.text, whole)


@pytest.mark.soak
@pytest.mark.parametrize("format", FORMATS)
def test_recorded_outputs_cut_at_every_character(format: str) -> None:
    for number, output in enumerate(recorded(format)):
        if number % TENTH:
            assert_cut_anywhere(format, output.text, read(format, output.text))


@pytest.mark.parametrize("format", FORMATS)
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


@pytest.mark.parametrize("format", FORMATS)
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
    "<|python_start|>[f(),", "aaaa<tool_cal",
)  # fmt: skip


def steps(format: str, text: str) -> int:
    one = reader(format)
    one.feed(text)
    one.end()
    return one.steps


@pytest.mark.parametrize("format", FORMATS)
def test_steps_are_linear(format: str) -> None:
    """What is hard to match, 100 KB of it together: so many steps a character whatever the length."""
    for piece in ADVERSARIAL:
        few, many = (steps(format, repeated(piece, size)) for size in (4_000, 8_000))
        assert few <= 3 * 4_000, piece
        assert many <= 2.1 * few + 100, piece
    assert steps(format, "".join(repeated(piece, 4_000) for piece in ADVERSARIAL)) <= 300_000


@pytest.mark.soak
@pytest.mark.parametrize("format", FORMATS)
def test_time_is_linear(format: str) -> None:
    """Of 200 KB at once and in pieces less than 2.6 times that of 100 KB."""

    def fed(text: str, size: int) -> None:
        one = reader(format)
        for at in range(0, len(text), size):
            one.feed(text[at : at + size])
        one.end()

    for piece in ADVERSARIAL:
        for size in (200_000, 5):
            few, many = (partial(fed, repeated(piece, length), size) for length in (100_000, 200_000))
            assert ratio(many, few, 2.6) < 2.6, (piece, size)


def test_formats_of_templates() -> None:
    assert format_of("{{ '<tool_call>' }}") == "hermes"
    assert format_of("[TOOL_CALLS]") == "mistral"
    assert format_of("x <|python_tag|> y") == "llama3_json"
    assert format_of("[func_name1(params_name1=params_value1]") == "pythonic"
    assert format_of("{{ messages }}") == "json"
    assert format_named("llama4_pythonic") == "pythonic"
    with pytest.raises(StartupError, match="--tool-call-parser is 'other'"):
        format_named("other")
