"""What a model thought, read from what it says: whole, and cut anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.errors import StartupError
from quire.text.harmony import ANALYSIS
from quire.text.reasoning_parser import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    ReasoningParser,
    ReasoningStart,
    detect_reasoning_format,
    new_parser,
    reasoning_format_named,
    reasoning_start,
)

WORDS = (
    "so", " ", "\n", "\n\n", "a < b", "<", "</", "<thi", "</thin", "[", "[/THIN", "Here is", "Here", "é", "🙂", "{}",
)  # fmt: skip
ENDS = ("\n", "", " ", "\n\n")
MARKED = [name for name in REASONING_FORMATS if name != "harmony"]  # which has a parser of its own


def said(name: str, opening: ReasoningStart, rng: random.Random) -> tuple[str, str, str]:
    """A made-up output, its thoughts and its answer."""
    form = REASONING_FORMATS[name]
    thought, answer = ("".join(rng.choices(WORDS, k=rng.randint(1, 12))).strip() for _ in range(2))
    begin = "" if opening == "open" and rng.random() < 0.7 else rng.choice(ENDS) + form.begin
    text = f"{begin}{rng.choice(ENDS)}{thought}{rng.choice(ENDS)}{form.end}{rng.choice(ENDS)}{answer}"
    return text, thought, answer


def read(reader: Any, pieces: list[str]) -> tuple[str, str]:
    found = [reader.push(piece, at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    thought, answer = ("".join(parts) for parts in zip(*found))
    return thought, answer


@pytest.mark.parametrize("opening", ["open", "maybe"])
@pytest.mark.parametrize("name", MARKED)
def test_a_hundred_outputs_whole_and_cut_at_every_character(name: str, opening: ReasoningStart) -> None:
    rng = random.Random(name)
    form = REASONING_FORMATS[name]
    for _ in range(100):
        text, thought, answer = said(name, opening, rng)
        assert form.end not in thought
        if form.begin in thought[: len(form.begin)]:
            continue
        whole = ReasoningParser(form, opening)
        assert read(whole, [text]) == (thought, answer), text
        for at in range(1, len(text)):
            assert read(ReasoningParser(form, opening), [text[:at], text[at:]]) == (thought, answer)
        apart = ReasoningParser(form, opening)
        assert read(apart, list(text)) == (thought, answer)
        assert apart.steps == whole.steps <= 2 * len(text)


@pytest.mark.parametrize("name", MARKED)
def test_where_there_are_none_all_is_the_answer(name: str) -> None:
    form = REASONING_FORMATS[name]
    for text in (" \nplain", form.begin[:-1], "", "  ", f"a{form.begin}b{form.end}c", f"{form.end}x"):
        assert read(ReasoningParser(form, "maybe"), [text]) == ("", text)
        assert read(ReasoningParser(form, "maybe"), list(text) or [""]) == ("", text)
        assert read(ReasoningParser(form, "closed"), [text]) == ("", text)


ADVERSARIAL = {
    name: (form.end[:-1], form.begin[:-1], " ", form.end[0], form.begin + form.end, " " + form.end[:2], "a", "\n" * 50)
    for name, form in REASONING_FORMATS.items()
    if name in MARKED
}


@pytest.mark.parametrize("name", MARKED)
def test_steps_are_linear_in_adversarial_texts(name: str) -> None:
    for unit in ADVERSARIAL[name]:
        reader = ReasoningParser(REASONING_FORMATS[name], "open")
        text = unit * (100_000 // len(unit))
        reader.push(text, last=True)
        assert reader.steps <= 2 * len(text) + 2


START, CALL = "<|end|><|start|>assistant", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
HARMONY: dict[str, tuple[str, str, str]] = {
    "both": (f"{ANALYSIS}so <it> is{START}<|channel|>final<|message|>Paris", "so <it> is", "Paris"),
    "an answer alone": ("<|channel|>final<|message|>a\n b<|return|>", "", "a\n b"),
    "reasoning alone": (f"{ANALYSIS}so\n ", "so\n ", ""),
    "a call": (
        f"{ANALYSIS}so{START}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>",
        "so",
        CALL,
    ),
    "a recipient before the channel": (f"{ANALYSIS}so{START} to=functions.f<|channel|>commentary json<|message|>{{}}",
                                       "so", CALL.removesuffix("<|call|>")),
    "a call at once": (f" to=functions.f{CALL.replace(' to=functions.f', '')}", "", CALL),
    "messages of one channel": (
        f"{ANALYSIS}a{START}{ANALYSIS}b{START}<|channel|>commentary<|message|>c{START}<|channel|>final<|message|>d",
        "a\nb",
        "c\nd",
    ),
    "without an end": (f"{ANALYSIS}so<|channel|>final<|message|>Paris", "so", "Paris"),
    "no messages": ('{"a": "<|", "b": "<b>"}', "", '{"a": "<|", "b": "<b>"}'),
    "no messages, as a recipient begins": ("to be", "", "to be"),
    "nothing but its beginning": (" t", "", " t"),
    "text after a message": (f"{ANALYSIS}so<|end|>Paris", "so", "Paris"),
    "a message that has not begun": (f"{ANALYSIS}so{START}<|channel|>fin", "so", ""),
    "a tag that is none": ("<|channel|>final<|message|>a <|ca", "", "a <|ca"),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMONY)
def test_harmony_whole_and_cut_at_every_character(case: str) -> None:
    text, thought, answer = HARMONY[case]
    form = REASONING_FORMATS["harmony"]
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        parser = new_parser(form, "maybe")
        assert read(parser, pieces) == (thought, answer), pieces
        assert parser.steps <= len(text)


def test_how_a_prompt_ends_says_what_follows() -> None:
    think, r1 = REASONING_FORMATS["think"], REASONING_FORMATS["deepseek_r1"]
    assert reasoning_start(think, "<|assistant|>\n<think>\n") == "open"
    assert reasoning_start(think, "<|assistant|>\n<think>\n\n</think>\n\n") == "closed"
    assert reasoning_start(think, "<|assistant|>") == "maybe"
    assert reasoning_start(r1, "<|assistant|>") == "open"
    assert reasoning_start(r1, "<think><|assistant|>The", "The") == "closed"
    assert reasoning_start(think, "<|assistant|><think>let me", "<think>let me") == "open"
    assert reasoning_start(think, "<|assistant|><think>so</think>It", "<think>so</think>It") == "closed"


def test_names_and_signs() -> None:
    assert detect_reasoning_format("{% if '</think>' in content %}") == "think"
    assert detect_reasoning_format("[THINK]") == "mistral"
    assert detect_reasoning_format("'<|start|>assistant<|channel|>analysis<|message|>' + thinking") == "harmony"
    assert detect_reasoning_format("{{ messages }}") == "off"
    assert {reasoning_format_named(name) for name in (*REASONING_FORMATS, *REASONING_ALIASES)} == set(REASONING_FORMATS)
    assert reasoning_format_named("off") == "off"
    with pytest.raises(StartupError, match=r"--reasoning-parser is 'other'. It is one of"):
        reasoning_format_named("other")
