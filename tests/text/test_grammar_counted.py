"""Strings of counted characters: their masks are those that walking through the vocabulary makes, which isn't done."""

from __future__ import annotations

import random
from typing import Any

import pytest
from grammar_walks import Watched, form, grammars_of, listed, place_of, side_by_side, spoken

import quire.text.grammar_counted
from quire.bench.structured import made_up
from quire.text.grammar_counted import LEAST, RUNS, Kinds, spelled
from quire.text.grammars import CompiledGrammar, Grammars, Place


@pytest.fixture(scope="module")
def words() -> Grammars:
    return grammars_of(made_up(LEAST), LEAST)


@pytest.fixture(scope="module")
def walked() -> Grammars:
    """The same; it counts nothing."""
    found = grammars_of(made_up(LEAST), LEAST)
    found._made_masker().counted = None
    return found


def behind(grammar: CompiledGrammar, text: str) -> Place:
    place = grammar.matcher()
    assert spoken(grammar, place, text) == ""
    return place


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("schema", [
    listed(maxLength=24), listed(minLength=20, maxLength=60), listed(minLength=8, maxLength=8), listed(maxLength=5),
    listed(maxLength=2 * RUNS + 2),
    {"type": "object", "properties": {"da": {"type": "string", "maxLength": 9}, "gus": {"type": "string"},
     "gusda": {"anyOf": [{"type": "string", "minLength": 4, "maxLength": 12}, {"type": "null"}]}},
     "required": ["da", "gus", "gusda"], "additionalProperties": {"type": "string", "maxLength": 15}},
])  # fmt: skip
def test_masks_are_those_of_walking_through_the_vocabulary(
    words: Grammars, walked: Grammars, schema: Any, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rng, brief = form(schema, compact=True), random.Random(0), 0
    grammar, other = words.get(asked), walked.get(asked)
    characters = grammar.masker.counted.characters
    for each in (grammar, other):
        monkeypatch.setattr(each.masker, "one_by_one", one_by_one)
    for walk in range(4):
        pair = place_of(grammar, walk % 2 == 0), place_of(other, walk % 2 == 0)
        for place, _ in side_by_side(grammar, other, pair, rng, 40, lambda token: 0 < characters[token] < 9):
            brief += place._room > 0
    assert brief > 5


def test_the_vocabulary_is_not_walked_through_in_a_counted_string(words: Grammars) -> None:
    grammar = words.get(form(listed(minLength=3, maxLength=40), compact=True))
    place = behind(grammar, '["a')
    watched = Watched(place.inner)
    place.inner = watched  # type: ignore[assignment]
    for token in grammar.masker.spoken.letters[:4]:
        grammar.masks([place])
        assert place.accept(token[0]) == ""
    assert watched.asked == []
    [mask] = grammar.masks([place])
    quote, _ = grammar.masker.spoken.closing
    assert quote in grammar.masker.allowed(mask)
    assert place.accept(quote) == ""
    assert watched.asked[:2] == ["consume_tokens", "consume_token"]


@pytest.mark.parametrize("when", ["mask", "token"])
def test_where_the_short_vocabulary_fails_all_is_walked_through(
    words: Grammars, walked: Grammars, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = form(listed(minLength=3, maxLength=9), compact=True)
    grammar = words.get(schema)
    place, told = behind(grammar, '["ab'), walked.get(schema).matcher()
    assert place._room == 7
    for token in [*place._taken]:
        assert told.accept(token) == ""
    if when == "mask":
        place._brief = Watched(place._brief, "it is too complex")  # type: ignore[assignment]
        place.mask = None
    else:
        monkeypatch.setattr(quire.text.grammar_counted.Counted, "pass_over", lambda *_: False)
        token = grammar.masker.spoken.letters[0][0]
        assert place.accept(token) == told.accept(token) == ""
    assert grammar.masks([place]) == walked.get(schema).masks([told])
    assert place._room == 0


def test_what_begins_with_as_many_characters_and_goes_on_alike_is_of_a_kind() -> None:
    texts = [b'abc",', 'äöü",'.encode(), b'ab",', b"\xe6\x97", b"a\xe6", b"b\xe6", b"\\n", b"a\\n", b'"', b"a\x7fb"]
    kinds = Kinds(texts)
    found = [kinds.tokens[kind] for kind in kinds.kinds]
    assert found == [b'qqq",', b'qqq",', b'qq",', b"\xe6\x97", b"q\xe6", b"q\xe6", b"\\n", b"q\\n", b'"', b"q\x7fb"]
    assert len({*kinds.tokens}) == len(kinds.tokens)
    assert [kinds.tokens[id] for id in spelled("ä".encode())] == [b"\xc3", b"\xa4"]
