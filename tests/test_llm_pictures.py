"""Pictures offline: LLM.generate and LLM.chat, and a bad one among others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import seeing
from picture_files import drawn, uri, written
from seeing import END, Noted

from quire.errors import InputError
from quire.llm import LLM
from quire.vocabulary.params import SamplingParams

SEEDED = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
PNG = written(drawn(8, 8))


@pytest.fixture
def seen() -> Iterator[tuple[LLM, Noted]]:
    model, noted = seeing.built()
    with LLM.of(model) as llm:
        yield llm, noted


def given(image: Any, text: str = "see <image>") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image}}


def test_prompts_with_pictures(seen: tuple[LLM, Noted]) -> None:
    llm, noted = seen
    prompts = [given(PNG), "once upon", given([drawn(8, 8), np.asarray(drawn(8, 4))], "<image> and <image>")]
    first, plain, two = llm.generate(prompts, SEEDED, use_tqdm=False)
    assert [len(media) for media in noted.media] == [1, 2]
    assert [result.prompt_token_ids.count(END) for result in (first, plain, two)] == [1, 0, 2]
    assert first.prompt == "see <image>"
    assert noted.media[0][0].key == noted.media[1][0].key != noted.media[1][1].key
    assert len(first.outputs[0].token_ids) == 4
    [alone] = llm.generate("once upon", SEEDED, use_tqdm=False)
    assert alone.outputs[0].token_ids == plain.outputs[0].token_ids


def test_chats_with_pictures(seen: tuple[LLM, Noted]) -> None:
    llm, noted = seen
    part = {"type": "image_url", "image_url": {"url": uri(PNG)}}
    [answer] = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "what"}]}], SEEDED, use_tqdm=False)
    assert answer.prompt_token_ids.count(END) == 1
    assert len(noted.media) == 1


def test_a_bad_picture_leaves_nothing_behind(seen: tuple[LLM, Noted]) -> None:
    llm, noted = seen
    with pytest.raises(InputError, match=r"multi_modal_data\.image can't be read"):
        llm.generate([given(PNG), given(PNG[:50])], SEEDED, use_tqdm=False)
    assert noted.media == []
    assert not llm.engine.unfinished
    assert len(llm.generate([given(PNG)], SEEDED, use_tqdm=False)) == 1


def test_a_model_without_eyes() -> None:
    model, _ = seeing.built()
    with LLM.of(model._replace(sight=None)) as llm, pytest.raises(InputError, match="this model reads only text"):
        llm.generate(given(PNG), SEEDED, use_tqdm=False)
