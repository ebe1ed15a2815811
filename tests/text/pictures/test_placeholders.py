"""The ids that stand for pictures, beside what the models' processors write."""

from __future__ import annotations

import pytest

from quire.errors import StartupError
from quire.text.pictures.placeholders import FAMILIES, read_placeholder, spread

WORDS = {"<image>": 5, "<img>": 6, "</img>": 7, "<IMG_CONTEXT>": 8, "<|image|>": 9, "<bos>": 2}


@pytest.mark.parametrize(
    ("kind", "rows", "ids", "start"),
    [
        ("llava", 3, [5, 5, 5], 0),
        ("internvl", 3, [6, 8, 8, 8, 7], 1),
        ("phi3", 2, [9, 9], 0),
        ("mllama", 6404, [9], 0),
        ("paligemma", 2, [5, 5], 0),
    ],
)
def test_ids(kind: str, rows: int, ids: list[int], start: int) -> None:
    placeholder = read_placeholder(kind, WORDS.get)
    assert placeholder.ids(rows) == ids
    assert placeholder.start == start
    assert placeholder.reserved == set(ids)
    assert (placeholder.leads, placeholder.bos, placeholder.ending) == (
        (True, 2, "\n") if kind == "paligemma" else (False, None, "")
    )


def test_marks_in_order_and_by_number() -> None:
    llava, phi3 = (read_placeholder(kind, WORDS.get) for kind in ("llava", "phi3"))
    assert llava.found("a<image>b<image>") == [(1, 8, 0), (9, 16, 1)]
    assert llava.found("a<|image_1|>") == []
    text = "<|image_2|>\n<|image_1|> and <|image_12|> but <|image_|> <|image_x|>"
    assert [text[begin:end] for begin, end, _ in phi3.found(text)] == ["<|image_2|>", "<|image_1|>", "<|image_12|>"]
    assert [number for _, _, number in phi3.found(text)] == [1, 0, 11]
    assert phi3.found(f"<|image_{'1' * 7}|>") == [], "numbers are short"
    intern = read_placeholder("internvl", WORDS.get)
    assert intern.found("<image>\n<IMG_CONTEXT>") == [(0, 7, 0), (8, 21, 1)]


def test_spread() -> None:
    intern = read_placeholder("internvl", WORDS.get)
    ids, places = spread([[1, 1], [], [3]], [2, 1], intern)
    assert ids == [1, 1, 6, 8, 8, 7, 6, 8, 7, 3]
    assert places == [3, 7]
    assert spread([[4]], [], intern) == ([4], [])
    with pytest.raises(AssertionError):
        spread([[4]], [1], intern)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_tokenizer_without_them(kind: str) -> None:
    with pytest.raises(StartupError, match="tokenizer has no"):
        read_placeholder(kind, lambda text: None)


def test_another_id_than_the_configs() -> None:
    assert read_placeholder("llava", WORDS.get, 5).token == 5
    assert read_placeholder("llava", lambda text: None, 11).token == 11, "an id beyond the tokenizer's vocabulary"
    with pytest.raises(StartupError, match="<image> is token 5 of the tokenizer, and config"):
        read_placeholder("llava", WORDS.get, 11)
