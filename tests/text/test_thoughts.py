"""What a model thought, read from what it says: whole, and cut anywhere."""

from __future__ import annotations

import random

import pytest

from quire.errors import StartupError
from quire.text.reasoning_parser import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    ReasoningParser,
    ReasoningStart,
    detect_reasoning_format,
    reasoning_format_named,
    reasoning_start,
)

WORDS = (
    "so", " ", "\n", "\n\n", "a < b", "<", "</", "<thi", "</thin", "[", "[/THIN", "Here is", "Here", "é", "🙂", "{}",
)  # fmt: skip
ENDS = ("\n", "", " ", "\n\n")


def said(name: str, opening: ReasoningStart, rng: random.Random) -> tuple[str, str, str]:
    """A made-up output, its thoughts and its answer."""
    form = REASONING_FORMATS[name]
    thought, answer = ("".join(rng.choices(WORDS, k=rng.randint(1, 12))).strip() for _ in range(2))
    begin = "" if opening == "open" and rng.random() < 0.7 else rng.choice(ENDS) + form.begin
    text = f"{begin}{rng.choice(ENDS)}{thought}{rng.choice(ENDS)}{form.end}{rng.choice(ENDS)}{answer}"
    return text, thought, answer


def read(reader: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    found = [reader.push(piece, at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    thought, answer = ("".join(parts) for parts in zip(*found))
    return thought, answer


@pytest.mark.parametrize("opening", ["open", "maybe"])
@pytest.mark.parametrize("name", REASONING_FORMATS)
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


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_where_there_are_none_all_is_the_answer(name: str) -> None:
    form = REASONING_FORMATS[name]
    for text in (" \nplain", form.begin[:-1], "", "  ", f"a{form.begin}b{form.end}c", f"{form.end}x"):
        assert read(ReasoningParser(form, "maybe"), [text]) == ("", text)
        assert read(ReasoningParser(form, "maybe"), list(text) or [""]) == ("", text)
        assert read(ReasoningParser(form, "closed"), [text]) == ("", text)


ADVERSARIAL = {
    name: (form.end[:-1], form.begin[:-1], " ", form.end[0], form.begin + form.end, " " + form.end[:2], "a", "\n" * 50)
    for name, form in REASONING_FORMATS.items()
}


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_steps_are_linear_in_adversarial_texts(name: str) -> None:
    for unit in ADVERSARIAL[name]:
        reader = ReasoningParser(REASONING_FORMATS[name], "open")
        text = unit * (100_000 // len(unit))
        reader.push(text, last=True)
        assert reader.steps <= 2 * len(text) + 2


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
    assert detect_reasoning_format("{{ messages }}") == "off"
    assert {reasoning_format_named(name) for name in (*REASONING_FORMATS, *REASONING_ALIASES)} == set(REASONING_FORMATS)
    assert reasoning_format_named("off") == "off"
    with pytest.raises(StartupError, match=r"--reasoning-parser is 'other'. It is one of"):
        reasoning_format_named("other")
