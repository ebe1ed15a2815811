"""Incremental detokenisation, compared with decoding everything at once."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detokenize import Detokenizer
from quire.text.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece", "metaspace", "wordpiece"]
characters = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from([*"  \n ab's.,?é日本語한", "👩‍👩‍👧", "👍🏽", "e\u0301", "<s>", "</s>", "▁", " n't"]),
)
texts = st.lists(characters, max_size=25).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders[request.param])


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[start:end]) for start, end in pairwise(borders)]
    return [*pieces, detokenizer.flush()]


def singly(ids: list[int]) -> list[int]:
    return list(range(len(ids)))


@given(text=texts, cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, text: str, cuts: list[int], skip: bool) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    for chosen in (singly(ids), cuts):
        pieces = stream(Detokenizer(tokenizer, [], skip), ids, chosen)
        assert "".join(pieces) == whole
        assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@given(prompt=texts, text=texts, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_output_continues_the_prompt(tokenizer: Tokenizer, prompt: str, text: str, skip: bool) -> None:
    head, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    before, whole = (tokenizer.decode(part, skip_special_tokens=skip) for part in (head, head + ids))
    tail = head if len(head) <= 16 else head[-16:]
    if not skip or any(id not in tokenizer.special_ids for id in tail):
        assert before + "".join(stream(Detokenizer(tokenizer, tail, skip), ids, singly(ids))) == whole


def test_random_byte_level_tokens_equal_the_whole(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40), st.lists(st.integers(0, 40)), st.booleans())
    @settings(max_examples=400, deadline=None)
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(Detokenizer(tokenizer, [], skip), ids, cuts)) == whole

    check()


def repaired(data: bytes) -> str:
    """UTF-8 with one U+FFFD for each byte that belongs to no character."""
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", "surrogateescape"))


def test_random_byte_fallback_tokens(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["sentencepiece"])
    zero = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\0")
    letter = tokenizer.encode("xa", add_special_tokens=False)[-1]
    assert (tokenizer.token_bytes(zero + 0xC3), tokenizer.convert_id(letter)) == (b"\xc3", "a")

    @given(st.lists(st.one_of(st.binary(max_size=6), characters.map(str.encode)), max_size=8))
    @settings(max_examples=400, deadline=None)
    def check(runs: list[bytes]) -> None:
        ids = [letter]
        for run in runs:
            ids += [*(zero + value for value in run), letter]
        text = "".join(stream(Detokenizer(tokenizer, [], True), ids, singly(ids)))
        assert text == "a" + "".join(repaired(run) + "a" for run in runs)
        broken = [repaired(run) for run in runs if "\ufffd" in repaired(run)]
        if all(set(run) == {"\ufffd"} for run in broken):  # otherwise the library drops good characters too
            assert text == tokenizer.decode(ids)

    check()


def test_half_a_character_is_held_until_the_end(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])
    ids = tokenizer.encode("🜁", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"), True)
    assert [detokenizer.push([id]) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"
    whole = Detokenizer(tokenizer, [*tokenizer.encode("a"), *ids[:2]], True)
    assert whole.push(ids[2:]) == "🜁"  # the prompt's half belongs to the first character


def test_a_leading_space_is_kept_after_a_prompt_only(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["sentencepiece"])
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert Detokenizer(tokenizer, [], True).push(ids) == "hello"
    assert Detokenizer(tokenizer, [tokenizer.bos_id or 0], True).push(ids) == "hello"
    assert Detokenizer(tokenizer, tokenizer.encode("page"), True).push(ids) == " hello"


def test_a_push_is_cheap_however_long_the_output(folders: dict[str, Path]) -> None:
    for kind in ("byte_level", "sentencepiece"):
        tokenizer = Tokenizer.load(folders[kind])
        detokenizer = Detokenizer(tokenizer, [], True)
        ids = tokenizer.encode("Hello 日本語, world. ") * 2000
        times, part = [], len(ids) // 4
        for at in range(0, 4 * part, part):
            start = time.thread_time()
            for id in ids[at : at + part]:
                detokenizer.push([id])
            times.append((time.thread_time() - start) / part)
        assert min(times[2:]) < 50e-6, times
