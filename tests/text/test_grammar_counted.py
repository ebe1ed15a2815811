"""Strings of counted characters: their masks are those that walking through the vocabulary makes, which isn't done."""

from __future__ import annotations

import random
from typing import Any

import pytest

import quire.text.grammar_counted
from quire.bench.structured import made_up
from quire.text.grammar_counted import LEAST, RUNS, Kinds, spelled
from quire.text.grammars import CompiledGrammar, Grammars, Place
from quire.vocabulary.structured import Structured, StructuredOutputsParams

END = 0


@pytest.fixture(scope="module")
def words() -> Grammars:
    return Grammars(made_up(LEAST), LEAST, (END,))


@pytest.fixture(scope="module")
def walked() -> Grammars:
    """The same; it counts nothing."""
    found = Grammars(made_up(LEAST), LEAST, (END,))
    found._made_masker().counted = None
    return found


def form(schema: Any) -> Structured:
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True).structured()


def listed(least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string", "minLength": least, "maxLength": most}, "minItems": 3}


def counted(grammar: CompiledGrammar, text: str) -> Place:
    """A place behind `text`, which is spelled by single characters."""
    place = grammar.matcher()
    find = grammar.masker.counted.words.find  # type: ignore[union-attr]
    for each in text:
        token = find(each.encode())
        assert token is not None
        grammar.masks([place])
        assert place.accept(token) == ""
    return place


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("schema", [
    listed(0, 24), listed(20, 60), listed(8, 8), listed(0, 5), listed(0, 2 * RUNS + 2),
    {"type": "object", "properties": {"da": {"type": "string", "maxLength": 9}, "gus": {"type": "string"},
     "gusda": {"anyOf": [{"type": "string", "minLength": 4, "maxLength": 12}, {"type": "null"}]}},
     "required": ["da", "gus", "gusda"], "additionalProperties": {"type": "string", "maxLength": 15}},
])  # fmt: skip
def test_masks_are_those_of_walking_through_the_vocabulary(
    words: Grammars, walked: Grammars, schema: Any, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, other, rng, brief = words.get(form(schema)), walked.get(form(schema)), random.Random(0), 0
    for each in (grammar, other):
        monkeypatch.setattr(each.masker, "one_by_one", one_by_one)
    for walk in range(4):
        place, told = grammar.matcher(), other.matcher()
        if walk % 2:
            place.at = told.at = None
        for step in range(40):
            [mask] = grammar.masks([place])
            assert [mask] == other.masks([told])
            assert place.forced() == told.forced()
            brief += place._room > 0
            allowed = grammar.masker.allowed(mask).tolist()
            short = [token for token in allowed if 0 < grammar.masker.counted.characters[token] < 9]  # type: ignore[union-attr]
            token = rng.choice(short if short and rng.random() < 0.7 else allowed)
            if step % 9 == 5:
                place, told = place.copy(), told.copy()
            assert place.accept(token) == told.accept(token) == ""
            if token == END:
                break
    assert brief > 5


class Watched:
    """One of llguidance's matchers, and what it is asked."""

    def __init__(self, inner: Any, broken: bool = False) -> None:
        self.inner, self.broken, self.asked = inner, broken, list[str]()

    def is_error(self) -> bool:
        return self.broken or bool(self.inner.is_error())

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.inner, name)


def test_the_vocabulary_is_not_walked_through_in_a_counted_string(words: Grammars) -> None:
    grammar = words.get(form(listed(3, 40)))
    place = counted(grammar, '["a')
    watched = Watched(place.inner)
    place.inner = watched  # type: ignore[assignment]
    for token in grammar.masker.spoken.letters[:4]:
        grammar.masks([place])
        assert place.accept(token[0]) == ""
    assert watched.asked == []
    [mask] = grammar.masks([place])
    quote, _ = grammar.masker.spoken.closing
    assert quote is not None
    assert quote in grammar.masker.allowed(mask)
    assert place.accept(quote) == ""
    assert watched.asked[:2] == ["consume_tokens", "consume_token"]


@pytest.mark.parametrize("when", ["mask", "token"])
def test_where_the_short_vocabulary_fails_all_is_walked_through(
    words: Grammars, walked: Grammars, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = form(listed(3, 9))
    grammar = words.get(schema)
    place, told = counted(grammar, '["ab'), walked.get(schema).matcher()
    assert place._brief is not None
    assert place._room == 7
    for token in [*place._taken]:
        assert told.accept(token) == ""
    if when == "mask":
        place._brief = Watched(place._brief, broken=True)  # type: ignore[assignment]
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
