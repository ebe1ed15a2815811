"""Families' eyes in the text plane: what users and templates write for pictures, and the prompts that come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.data.models.vision import VisionSettings
from quire.data.models.vision.shapes import PREPARED, VISION
from quire.errors import InputError
from quire.text.pictures import FamilyEyes, read_placeholder, read_preparation

WORDS = {"<image>": 90, "<img>": 91, "</img>": 92, "<IMG_CONTEXT>": 93, "<|image|>": 94, "<bos>": 2, "\n": 10}
PIECES = {token: word for word, token in WORDS.items()}
TEXTS = {
    "llava-onevision-7b": {"text_config": {"hidden_size": 64}},
    "internvl2-8b": {"llm_config": {"hidden_size": 64}},
    "phi-3-vision": {"hidden_size": 64},
    "paligemma2-10b": {"text_config": {"hidden_size": 3584}},
}


def eyes(name: str) -> FamilyEyes:
    said = PREPARED[name]
    vision = VisionSettings.read({**VISION[name], **TEXTS[name]}, said)
    placeholder = read_placeholder(vision.kind, WORDS.get)
    return FamilyEyes(read_preparation(said, vision.tiling, vision.normal.mean), placeholder, PIECES.__getitem__, [10])


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_what_stands_around_internvls_pictures() -> None:
    one = eyes("internvl2-8b")
    assert one.spelled("see <image> and <IMG_CONTEXT>") == "see <IMG_CONTEXT> and <IMG_CONTEXT>"
    assert {"<image>", "<img>", "</img>", "<IMG_CONTEXT>"} <= set(one.words)
    grid = one.prepare(noise(100, 100)).grid
    ids, spans = one.place([93, 7, 93], [grid, grid])
    assert spans == [(1, 256), (260, 256)]
    assert (ids[0], ids[257], ids[258], ids[259]) == (91, 92, 7, 91)


def test_phi3s_pictures_are_numbered() -> None:
    one = eyes("phi-3-vision")
    assert [one.marker(1), one.marker(12)] == ["<|image_1|>", "<|image_12|>"]
    assert one.spelled("<|image_1|> and <|image_2|>?") == "<|image|> and <|image|>?"
    assert one.spelled("none") == "none"
    for wrong in ("<|image_2|>", "<|image_1|><|image_1|>", "<|image_0|>", "<|image_2|><|image_1|>"):
        with pytest.raises(InputError, match=r"picture \d is marked '<\|image_\d\|>': they are numbered in order"):
            one.spelled(wrong)
    assert any(word in "so <|image_7|>" for word in one.words), "users can't write one"


def test_paligemmas_pictures_lead() -> None:
    one: Any = eyes("paligemma2-10b")
    grid = one.prepare(noise(50, 80)).grid
    for given in ([2, 90, 5, 6], [90, 2, 5, 6], [2, 5, 90, 6], [2, 90, 5, 6, 10]):
        ids, spans = one.place(given, [grid])
        assert spans == [(0, 256)]
        assert ids == [90] * 256 + [2, 5, 6, 10]
    ids, spans = one.place([2, 90, 90, 5], [grid, grid])
    assert spans == [(0, 256), (256, 256)]
    assert ids[512:] == [2, 5, 10]


def test_what_pictures_depend_on_is_told() -> None:
    assert len({eyes(name).settings for name in TEXTS}) == len(TEXTS)
    other = read_preparation({**PREPARED["llava-onevision-7b"], "resample": 2}, eyes("llava-onevision-7b").how.tiling,
                             (0.5, 0.5, 0.5))  # fmt: skip
    placeholder = read_placeholder("llava", WORDS.get)
    assert FamilyEyes(other, placeholder, PIECES.__getitem__).settings != eyes("llava-onevision-7b").settings
