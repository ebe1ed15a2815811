"""What a model thought, read from what it says: whole, and cut anywhere."""

from __future__ import annotations

import random

import pytest

from quire.errors import StartupError
from quire.text.thoughts import ALIASES, FORMATS, Opening, Thoughts, opening_of, thoughts_named, thoughts_of

WORDS = (
    "so", " ", "\n", "\n\n", "a < b", "<", "</", "<thi", "</thin", "[", "[/THIN", "Here is", "Here", "é", "🙂", "{}",
)  # fmt: skip
ENDS = ("\n", "", " ", "\n\n")


def said(name: str, opening: Opening, rng: random.Random) -> tuple[str, str, str]:
    """A made-up output, its thoughts and its answer."""
    form = FORMATS[name]
    thought, answer = ("".join(rng.choices(WORDS, k=rng.randint(1, 12))).strip() for _ in range(2))
    begin = "" if opening == "open" and rng.random() < 0.7 else rng.choice(ENDS) + form.begin
    text = f"{begin}{rng.choice(ENDS)}{thought}{rng.choice(ENDS)}{form.end}{rng.choice(ENDS)}{answer}"
    return text, thought, answer


def read(reader: Thoughts, pieces: list[str]) -> tuple[str, str]:
    found = [reader.push(piece, at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    thought, answer = ("".join(parts) for parts in zip(*found))
    return thought, answer


@pytest.mark.parametrize("opening", ["open", "maybe"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_hundred_outputs_whole_and_cut_at_every_character(name: str, opening: Opening) -> None:
    rng = random.Random(name)
    form = FORMATS[name]
    for _ in range(100):
        text, thought, answer = said(name, opening, rng)
        assert form.end not in thought
        if form.begin in thought[: len(form.begin)]:
            continue
        whole = Thoughts(form, opening)
        assert read(whole, [text]) == (thought, answer), text
        for at in range(1, len(text)):
            assert read(Thoughts(form, opening), [text[:at], text[at:]]) == (thought, answer)
        apart = Thoughts(form, opening)
        assert read(apart, list(text)) == (thought, answer)
        assert apart.steps == whole.steps <= 2 * len(text)


@pytest.mark.parametrize("name", FORMATS)
def test_where_there_are_none_all_is_the_answer(name: str) -> None:
    form = FORMATS[name]
    for text in (" \nplain", form.begin[:-1], "", "  ", f"a{form.begin}b{form.end}c", f"{form.end}x"):
        assert read(Thoughts(form, "maybe"), [text]) == ("", text)
        assert read(Thoughts(form, "maybe"), list(text) or [""]) == ("", text)
        assert read(Thoughts(form, "closed"), [text]) == ("", text)


ADVERSARIAL = {
    name: (form.end[:-1], form.begin[:-1], " ", form.end[0], form.begin + form.end, " " + form.end[:2], "a", "\n" * 50)
    for name, form in FORMATS.items()
}


@pytest.mark.parametrize("name", FORMATS)
def test_steps_are_linear_in_adversarial_texts(name: str) -> None:
    for unit in ADVERSARIAL[name]:
        reader = Thoughts(FORMATS[name], "open")
        text = unit * (100_000 // len(unit))
        reader.push(text, last=True)
        assert reader.steps <= 2 * len(text) + 2


def test_how_a_prompt_ends_says_what_follows() -> None:
    think, r1 = FORMATS["think"], FORMATS["deepseek_r1"]
    assert opening_of(think, "<|assistant|>\n<think>\n") == "open"
    assert opening_of(think, "<|assistant|>\n<think>\n\n</think>\n\n") == "closed"
    assert opening_of(think, "<|assistant|>") == "maybe"
    assert opening_of(r1, "<|assistant|>") == "open"
    assert opening_of(r1, "<think><|assistant|>The", "The") == "closed"
    assert opening_of(think, "<|assistant|><think>let me", "<think>let me") == "open"
    assert opening_of(think, "<|assistant|><think>so</think>It", "<think>so</think>It") == "closed"


def test_names_and_signs() -> None:
    assert thoughts_of("{% if '</think>' in content %}") == "think"
    assert thoughts_of("[THINK]") == "mistral"
    assert thoughts_of("{{ messages }}") == "off"
    assert {thoughts_named(name) for name in (*FORMATS, *ALIASES)} == set(FORMATS)
    assert thoughts_named("off") == "off"
    with pytest.raises(StartupError, match=r"--reasoning-parser is 'other'. It is one of"):
        thoughts_named("other")
