"""Free strings: tokens that leave a grammar where it is aren't told to it, and nothing else is skipped."""

from __future__ import annotations

import random
import re
from typing import Any

import echo_service
import pytest
from grammar_walks import FREE, Watched, form, grammars_of, listed, place_of, side_by_side, spoken

import quire.text.grammars.counted_strings
from quire.bench.structured import made_up
from quire.text.grammars import counted_strings, strings
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from quire.text.grammars.counted_strings import MAX_RUN, MIN_VOCAB, TokenClasses, byte_tokens
from quire.text.grammars.strings import MAX_COUNTED_CHARS, StringDetector, make_string_detector

SIZE = 3000


@pytest.fixture(scope="module")
def words() -> GrammarCompiler:
    return grammars_of(made_up(SIZE), SIZE)


@pytest.fixture(scope="module")
def walked() -> GrammarCompiler:
    """The same; nothing is known of their strings."""
    return grammars_of(made_up(SIZE), SIZE)


@pytest.mark.parametrize("schema", [
    listed({}),
    listed(),
    listed(minLength=9),
    listed({"anyOf": [FREE, {"type": "null"}]}),
    {"type": "object", "properties": {"da": FREE, "gus": {"enum": ["one", "two words", 3]}, "n": {"type": "integer"}},
     "required": ["da", "gus", "n"], "additionalProperties": {"type": "string", "maxLength": 12}},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 30}, FREE], "minItems": 4,
     "items": {"$ref": "#/$defs/part"}, "$defs": {"part": {"type": ["string", "number", "boolean"]}}},
    listed({"type": "object", "properties": {"k": FREE, "kk": {"type": "string", "minLength": 3, "maxLength": 256}},
            "required": ["k", "kk"], "additionalProperties": FREE}),
])  # fmt: skip
def test_what_may_follow_is_what_it_is_where_every_token_is_told(
    words: GrammarCompiler, walked: GrammarCompiler, schema: Any
) -> None:
    grammar, other, rng, skipped = words.get(form(schema)), walked.get(form(schema)), random.Random(0), 0
    other.shared.strings = None
    plain = grammar.backend.is_plain
    for walk in range(12):
        pair = place_of(grammar, walk % 2 == 0), place_of(other, walk % 2 == 0)
        for place, told in side_by_side(grammar, other, pair, rng, 60, lambda token: bool(plain[token])):
            pair = place, told
        skipped += len(pair[1]._tokens) - len(pair[0]._tokens)
    assert skipped > 20


def told_of(schema: Any, begin: str, text: str) -> int:
    """How many of the characters of `text`, each a token, a grammar is told of behind those of `begin`."""
    tokenizer = echo_service.tokenizer()
    grammar = grammars_of(tokenizer, echo_service.VOCAB).get(form(schema, compact=True))
    place = grammar.new_matcher()
    for token in tokenizer.encode(begin, add_special_tokens=False):
        grammar.compute_masks([place])
        assert place.accept(token) == ""
    place.matcher = watched = Watched(place.matcher)  # type: ignore[assignment]
    for each in text:
        grammar.compute_masks([place])
        [token] = tokenizer.encode(each, add_special_tokens=False)
        assert place.accept(token) == ""
    return watched.asked.count("consume_token")


@pytest.mark.parametrize(("schema", "begin", "told"), [
    (listed(), '["', 0),
    (listed(), '["a\\', 1),
    (listed(maxLength=200), '["', 9),
    (listed(minLength=5), '["', 5),
    ({"type": "object"}, '{"', 9),  # a key
    ({"type": "object", "additionalProperties": {"type": "string", "minLength": 5}}, '{"', 9),
    ({"type": "object"}, '{"k":"', 0),
    ({"properties": {"k": {"maxLength": 9}}}, '{"k":"', 9),
    ({"properties": {"k": {"maxLength": 9}}, "additionalProperties": True}, '{"m":"', 0),
    ({"enum": ["some text"]}, '"', 9),
    (listed({**FREE, "pattern": "^[a-z ]*$"}), '["', 9),
    ({"$ref": "#/examples/0", "examples": [{"type": "string", "pattern": "^[a-z ]*$"}]}, '"', 9),
    ({"$ref": "#/$defs/a%2Ftitle", "$defs": {"a": {"title": {"type": "string", "pattern": "^[a-z ]*$"}}}}, '"', 9),
    ({"$ref": "#/$defs/a/items", "$defs": {"a": {"items": FREE}}}, '"', 0),
])  # fmt: skip
def test_a_grammar_is_told_of_what_moves_it(schema: Any, begin: str, told: int) -> None:
    assert told_of(schema, begin, "next part" if begin.endswith("\\") else "some text") == told


@pytest.mark.parametrize("schema", [
    {"pattern": "a"}, {"format": "date"}, {"allOf": [FREE, FREE]}, {"oneOf": [FREE, {"type": "null"}]},
    {"patternProperties": {"a": FREE}}, {"anyOf": [FREE, {"const": "a"}]}, {"anyOf": [FREE, FREE]},
    {"anyOf": [FREE, {"type": "null"}], "maxLength": 3}, {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": FREE}},
    {"type": "string", "enum": ["a"], "maxLength": 3}, {"maxLength": MAX_COUNTED_CHARS + 1},
    {"x-guidance": {"whitespace_pattern": "x"}}, {"items": {"x-guidance": {}}},
    {"$ref": "#/default"}, {"$ref": "#/enum/0"}, {"$ref": "#/properties/a/const/b"}, {"$ref": "#/$defs/a/title"},
    {"$ref": "#/$defs/a%2Ftitle"}, {"$ref": "other"}, {"maxLength": -1}, {"minLength": True},
])  # fmt: skip
def test_schemas_of_whose_strings_nothing_is_known(words: GrammarCompiler, schema: Any) -> None:
    tokens = words._get_backend().string_tokens
    assert isinstance(
        make_string_detector(form({"items": {"anyOf": [FREE, {"type": "null"}]}}), tokens), StringDetector
    )
    for within in (schema, {"properties": {"a": schema}}, {"$defs": {"a": {"items": schema}}}):
        assert make_string_detector(form(within), tokens) is None


@pytest.mark.parametrize("odd", [
    {"minLength": None}, {"minLength": "x"}, {"maxLength": []}, {"properties": None}, {"properties": [FREE]},
    {"anyOf": 5}, {"anyOf": None}, {"$defs": 1}, {"items": 5},
])  # fmt: skip
def test_what_is_no_schema_where_nothing_refers_to_it_is_no_error(words: GrammarCompiler, odd: Any) -> None:
    grammar = words.get(form({"type": "string", "$defs": {"a": odd}}))
    assert grammar.shared.strings is None
    assert grammar.compute_masks([grammar.new_matcher()])


@pytest.mark.parametrize("size", [SIZE, MIN_VOCAB])
@pytest.mark.parametrize("plain", [r'[^"]+', r'[^"\\\x00-\x1F]+'])
def test_nothing_is_known_where_llguidance_has_other_strings(
    size: int, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (strings, counted_strings):
        monkeypatch.setattr(module, "PLAIN_CHARS", re.compile(plain))
    assert known(size) is None


def known(size: int) -> StringDetector | None:
    return make_string_detector(form(FREE), grammars_of(made_up(size), size)._get_backend().string_tokens)


def test_nothing_is_known_where_llguidance_counts_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(known(MIN_VOCAB), StringDetector)
    monkeypatch.setattr(counted_strings.CountedStrings, "mask", lambda *_: b"")
    assert known(MIN_VOCAB) is None


# Strings of counted characters


@pytest.fixture(scope="module")
def many() -> GrammarCompiler:
    return grammars_of(made_up(MIN_VOCAB), MIN_VOCAB)


@pytest.fixture(scope="module")
def uncounted() -> GrammarCompiler:
    """The same; it counts nothing."""
    found = grammars_of(made_up(MIN_VOCAB), MIN_VOCAB)
    found._get_backend().counted_strings = None
    return found


def behind(grammar: CompiledGrammar, text: str) -> GrammarMatcher:
    place = grammar.new_matcher()
    assert spoken(grammar, place, text) == ""
    return place


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("schema", [
    listed(maxLength=24), listed(minLength=20, maxLength=60), listed(minLength=8, maxLength=8), listed(maxLength=5),
    listed(maxLength=2 * MAX_RUN + 2),
    {"type": "object", "properties": {"da": {"type": "string", "maxLength": 9}, "gus": {"type": "string"},
     "gusda": {"anyOf": [{"type": "string", "minLength": 4, "maxLength": 12}, {"type": "null"}]}},
     "required": ["da", "gus", "gusda"], "additionalProperties": {"type": "string", "maxLength": 15}},
])  # fmt: skip
def test_masks_are_those_of_walking_through_the_vocabulary(
    many: GrammarCompiler, uncounted: GrammarCompiler, schema: Any, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rng, brief = form(schema, compact=True), random.Random(0), 0
    grammar, other = many.get(asked), uncounted.get(asked)
    characters = grammar.backend.counted_strings.token_chars
    for each in (grammar, other):
        monkeypatch.setattr(each.backend, "is_serial", one_by_one)
    for walk in range(4):
        pair = place_of(grammar, walk % 2 == 0), place_of(other, walk % 2 == 0)
        for place, _ in side_by_side(grammar, other, pair, rng, 40, lambda token: 0 < characters[token] < 9):
            brief += place._chars_left > 0
    assert brief > 5


@pytest.mark.parametrize("when", ["mask", "token"])
def test_where_the_short_vocabulary_fails_all_is_walked_through(
    many: GrammarCompiler, uncounted: GrammarCompiler, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = form(listed(minLength=3, maxLength=9), compact=True)
    grammar = many.get(schema)
    place, told = behind(grammar, '["ab'), uncounted.get(schema).new_matcher()
    assert place._chars_left == 7
    for token in [*place._tokens]:
        assert told.accept(token) == ""
    if when == "mask":
        place._counted_matcher = Watched(place._counted_matcher, "it is too complex")  # type: ignore[assignment]
        place.mask = None
    else:
        monkeypatch.setattr(quire.text.grammars.counted_strings.CountedStrings, "feed_chars", lambda *_: False)
        token = grammar.backend.string_tokens.letter_tokens[0][0]
        assert place.accept(token) == told.accept(token) == ""
    assert grammar.compute_masks([place]) == uncounted.get(schema).compute_masks([told])
    assert place._chars_left == 0


def test_what_begins_with_as_many_characters_and_goes_on_alike_is_of_a_kind() -> None:
    texts = [b'abc",', 'äöü",'.encode(), b'ab",', b"\xe6\x97", b"a\xe6", b"b\xe6", b"\\n", b"a\\n", b'"', b"a\x7fb"]
    kinds = TokenClasses(texts)
    found = [kinds.tokens[kind] for kind in kinds.class_ids]
    assert found == [b'qqq",', b'qqq",', b'qq",', b"\xe6\x97", b"q\xe6", b"q\xe6", b"\\n", b"q\\n", b'"', b"q\x7fb"]
    assert len({*kinds.tokens}) == len(kinds.tokens)
    assert [kinds.tokens[id] for id in byte_tokens("ä".encode())] == [b"\xc3", b"\xa4"]
