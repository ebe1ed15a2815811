"""Grammars by themselves: what compiles, what doesn't and where it says so, walks through random ones, what is held."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_service
import json_schema_suite
import jsonschema
import pytest
from fuzzed_forms import patterns, schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import InputError
from quire.protocol.structured_output import (
    MAX_CHOICES,
    MAX_SOURCE_CHARS,
    Structured,
    StructuredOutputsParams,
    close_objects,
)
from quire.text.grammars.compiler import MAX_CACHED, GrammarCompiler, GrammarMatcher
from quire.text.grammars.errors import find_keyword
from quire.text.grammars.schema_cycles import find_endless_reference

VOCAB, END = echo_service.VOCAB, 0
FORMATS = jsonschema.FormatChecker()
NO_MORE = {"additionalProperties": False}


def form(**given: Any) -> Structured:
    return StructuredOutputsParams(**given).structured()


def test_as_many_choices_as_may_be_are_compiled(grammars: GrammarCompiler) -> None:
    choice = [f"{i} {i * i}" for i in range(MAX_CHOICES)]
    assert grammars.get(form(choice=choice))
    with pytest.raises(InputError, match=f"choice must have 1 to {MAX_CHOICES} entries, got {MAX_CHOICES + 1}"):
        form(choice=[*choice, "x"])


def allowed(grammars: GrammarCompiler, place: GrammarMatcher) -> list[int]:
    [mask] = (
        grammars._get_backend().compute_masks([place.matcher]) if place.cached_mask() is None else [place.cached_mask()]
    )
    return grammars._get_backend().allowed_tokens(mask).tolist()


def walk(grammars: GrammarCompiler, asked: Structured, rng: random.Random, most: int = 600) -> str | None:
    """A text of the form, every token drawn from all that may follow; None if it isn't done after `most` of them. Ends
    are drawn where they may be, so that most texts are short."""
    place = grammars.get(asked).new_matcher()
    texts: list[bytes] = []
    while len(texts) < most:
        tokens_now = allowed(grammars, place)
        assert tokens_now, "nothing may follow"
        assert max(tokens_now) < VOCAB
        short = [token for token in tokens_now if len(echo_service.tokenizer().token_bytes(token)) < 2]
        ends = END in tokens_now and rng.random() < 0.5
        token = END if ends else rng.choice(rng.choice((tokens_now, short or tokens_now)))
        assert place.accept(token) == ""
        if token == END:
            return b"".join(texts).decode()
        texts.append(echo_service.tokenizer().token_bytes(token))
    return None


# Keywords: what is enforced, and what is refused by name. A schema, what fulfils it, and what doesn't.
ENFORCED: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [1, "a", None], []),
    ({}, [1, [2], {"a": None}], []),
    ({"type": "string"}, ["", "a\n"], [1]),
    ({"type": ["integer", "null"]}, [3, None], ["a"]),
    ({"type": "boolean"}, [True], [0]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, "b"]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-f]+$"}, ["abc"], ["abg", ""]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-2-9"]),
    ({"type": "integer", "minimum": 3, "maximum": 11}, [3, 11], [2, 12]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1]),
    ({"type": "integer", "maximum": 2**63 - 1}, [2**63 - 1], [2**63]),
    ({"type": "integer", "minimum": -(2**53)}, [-(2**53)], [-(2**53) - 1]),
    ({"type": "string", "minLength": 1.0}, ["a"], [""]),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^[ab]$": {"type": "null"}},
      "additionalProperties": False}, [{"b": None}], [{"a": 1}, {"b": 1}, {"c": None}]),
    ({"type": "integer", "multipleOf": 5}, [15], [16]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}, [[None]], [[], [None] * 3]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1]], [[1, 2], [2]]),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, [{"a": None}], [{}, {"a": 1}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "a"}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
     [{"x1": None}], [{"x1": 1}, {"y": None}]),
    ({"anyOf": [{"type": "null"}, {"type": "string"}]}, [None, "a"], [1]),
    ({"oneOf": [{"type": "null"}, {"type": "string"}]}, [None, "a"], [1]),
    ({"allOf": [{"minimum": 2}, {"type": "integer", "maximum": 4}]}, [3], [1, 5]),
    ({"$defs": {"a": {"type": "null"}}, "items": {"$ref": "#/$defs/a"}, "type": "array"}, [[None]], [[1]]),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
     [{"next": {"next": {}}}], [{"next": 1}]),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}},
     [{"x": None}], [{"x": 1}]),
    ({"type": "object", "properties": {"propertyNames": {"const": {"propertyNames": {"type": "string"}}}}},
     [{"propertyNames": {"propertyNames": {"type": "string"}}}], [{"propertyNames": {}}]),
    ({"type": "string", "format": "path", "maxLength": 1}, ["a"], ["ab", 1]),
    ({"anyOf": [{"type": "string", "format": "password"}, {"type": "null", "format": "binary"}]}, ["a", None], [1]),
    ({"properties": {"format": {"const": "path"}}, "type": "object"}, [{"format": "path"}], [{"format": "a"}]),
    ({"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}]}],
      "$defs": {"a": {"type": "array", "items": {"type": "object", "propertyNames": {"type": "string"}}}}},
     [[{"a": 1}]], [[1]]),
]  # fmt: skip
BAD = {"not": {}}
REFUSED: list[tuple[Any, str, str]] = [
    ({"not": {"type": "null"}}, "not", "#/not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "contains", "#/contains"),
    ({"type": "object", "properties": {"a": {"propertyNames": {"pattern": "a"}}}}, "propertyNames",
     "#/properties/a/propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", "#/dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas", "#/dependentSchemas"),
    ({"if": {}, "then": {}}, "if", "#/if"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", "#/unevaluatedProperties"),
    ({"items": {"$dynamicRef": "#a"}}, "dynamicRef", "#/items/$dynamicRef"),
    ({"type": "colour"}, "colour", "#/type"),
    ({"items": {"type": "string", "format": "iban"}}, "iban", "#/items/format"),
    ({"$ref": "https://example.com/x.json"}, "example.com", "#/$ref"),
    ({"$ref": "#/$defs/none"}, "none", "#/$ref"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "patternProperties": {"^[ab]$": {}},
      "additionalProperties": False}, "patternProperties are in properties", "#/patternProperties"),
    ({"type": "integer", "maximum": 2**53 + 1}, "9007199254740993", "#/maximum"),
    ({"items": {"type": "integer", "exclusiveMaximum": 2**53 + 1}}, "9007199254740993", "#/items/exclusiveMaximum"),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "18446744073709551615", "#/maximum"),
    ({"type": "integer", "minimum": -(2**63)}, "integer range", "#/minimum"),
    ({"properties": {"a": {"enum": [BAD]}, "b": BAD}}, "", "#/properties/b/not"),
    ({"properties": {"a": {"const": BAD, "default": BAD, "examples": [BAD]}, "b": BAD}}, "", "#/properties/b/not"),
    ({"properties": {"not": {"type": "null"}, "b": BAD}}, "", "#/properties/b/not"),
    ({"properties": {"properties": BAD}}, "", "#/properties/properties/not"),
    ({"$defs": {"unused": BAD, "used": BAD}, "items": {"$ref": "#/$defs/used"}}, "", "#/$defs/used/not"),
    ({"definitions": {"a": {"items": BAD}}, "$ref": "#/definitions/a"}, "", "#/definitions/a/items/not"),
    ({"$ref": "#/allOf/0", "allOf": [{"anyOf": [{"type": "null"}, BAD]}]}, "", "#/allOf/0/anyOf/1/not"),
    ({"properties": {"a/b~c": BAD}}, "", "#/properties/a~1b~0c/not"),
    ({"prefixItems": [{}, BAD]}, "", "#/prefixItems/1/not"),
    ({"patternProperties": {"^x": BAD}}, "", "#/patternProperties/^x/not"),
    ({"additionalProperties": BAD}, "", "#/additionalProperties/not"),
    ({"properties": {"a": {"minLength": 1}, "b": {"minLength": -1}}}, "", "#/properties/b/minLength"),
    ({"properties": {"a": {"type": "null"}, "b": {"type": ["null", "colour"]}}}, "", "#/properties/b/type"),
    ({"properties": {"a": {"format": "date"}, "b": {"format": "iban"}}}, "", "#/properties/b/format"),
    ({"properties": {"a": {"type": "string", "pattern": "a"}, "b": {"type": "string", "pattern": "(?=a)b"}}}, "",
     "#/properties/b/pattern"),
    ({"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/ab"}}, "$defs": {"a": {}}}, "",
     "#/properties/b/$ref"),
]  # fmt: skip


def accepted(grammars: GrammarCompiler, asked: Structured, text: str) -> bool:
    place = grammars.get(asked).new_matcher()
    tokens = [*echo_service.tokenizer().encode(text, add_special_tokens=False), END]
    return all(place.accept(token) == "" for token in tokens)


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED)
def test_keywords_that_are_enforced(grammars: GrammarCompiler, schema: Any, good: list[Any], bad: list[Any]) -> None:
    """Texts of what fulfils a schema are of its form, others aren't; jsonschema says the same of both."""
    for value, fulfils in [(one, True) for one in good] + [(one, False) for one in bad]:
        assert jsonschema.Draft202012Validator(schema, format_checker=FORMATS).is_valid(value) == fulfils
        assert accepted(grammars, form(json=schema), json.dumps(value)) == fulfils, value


@pytest.mark.parametrize(
    ("white", "allowed_"),
    [("", True), (" ", True), ("\n", True), ("\r\n", True), ("\n" + "\t " * 10, True),
     ("  ", False), ("\t", False), ("\n\n", False), ("\n" + " " * 21, False)],
)  # fmt: skip
def test_white_space_is_bounded(grammars: GrammarCompiler, white: str, allowed_: bool) -> None:
    schema = {"type": "array", "items": {"type": "null"}}
    assert accepted(grammars, form(json=schema), f"[{white}null]") == allowed_
    assert accepted(grammars, form(json=schema, disable_any_whitespace=True), f"[{white}null]") == (not white)


def test_members_come_in_the_order_of_properties(grammars: GrammarCompiler) -> None:
    """Others come after them, and only where the schema says so: objects are closed by default."""
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    closed = form(json=schema)
    for asked in (closed, form(json=json.dumps(schema)), form(json={**schema, "additionalProperties": True})):
        opened = "true" in asked.source
        for text, fine in (('{"a":1,"b":2,"c":3}', opened), ('{"b":2,"c":3}', opened), ('{"a":1,"b":2}', True),
                           ('{"b":2,"a":1}', False), ('{"c":3,"a":1}', False)):  # fmt: skip
            assert accepted(grammars, asked, text) == fine, text


GBNF = {  # a grammar in GBNF, texts of it, and others
    'root ::= "a" | "b"': (["a", "b"], ["c", "ab"]),
    'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+  # digits\n': (["1", "12+3"], ["+", "1+"]),
    'root  ::= item{2,3}\nitem ::= "- " [^\\r\\n]+ "\\n"': (["- x\n- y\n"], ["- x\n"]),
}


@pytest.mark.parametrize("source", GBNF)
def test_grammars_in_gbnf(grammars: GrammarCompiler, source: str) -> None:
    """As vLLM's and llama.cpp's documentation has them."""
    right, wrong = GBNF[source]
    for texts, fine in ((right, True), (wrong, False)):
        for text in texts:
            assert accepted(grammars, form(grammar=source), text) == fine, text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('root ::= "a"\nb ::= [a', r"in line 2: 'b ::= \[a'"),
        ('start ::= "a"', "No 'root' rule found"),
        ("root ::= " + "(" * 100_000, "GBNF"),
        ("\n".join(f'r{i} ::= "a"' for i in range(600)), "600 rules in GBNF .* at most 512"),
    ],
)
def test_what_is_wrong_in_gbnf_is_named(grammars: GrammarCompiler, source: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        grammars.get(form(grammar=source))
    assert "Lark" in str(error.value)


def refused(grammars: GrammarCompiler, **asked: Any) -> str:
    with pytest.raises(InputError) as error:
        grammars.get(form(**asked))
    return str(error.value)


@pytest.mark.parametrize(("schema", "said", "place"), REFUSED)
def test_keywords_that_are_refused(grammars: GrammarCompiler, schema: Any, said: str, place: str) -> None:
    why = refused(grammars, json=schema)
    assert said in why
    assert why.endswith(f", at {place}")


SOAK = pytest.mark.soak, pytest.mark.timeout(0)


@pytest.mark.parametrize(
    ("kind", "strategy", "count", "least"),
    [
        pytest.param("json", schemas, 30, 0, id="schema"),
        pytest.param("regex", patterns, 30, 0, id="pattern"),
        pytest.param("json", schemas, 500, 351, marks=SOAK, id="many schemas"),
        pytest.param("regex", patterns, 200, 151, marks=SOAK, id="many patterns"),
    ],
)
def test_what_is_drawn_is_of_the_form(
    grammars: GrammarCompiler, kind: str, strategy: Any, count: int, least: int
) -> None:
    """Most walks come to an end, and each that does fulfils what was asked."""
    done = []

    @given(strategy, st.integers(0, 99))
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    def many(one: Any, seed: int) -> None:
        text = walk(grammars, form(**{kind: one}), random.Random(seed))
        if text is None:
            return
        if kind == "json":
            jsonschema.validate(json.loads(text), one)  # a grammar knows no leap years
        else:
            assert re.fullmatch(one, text), (one, text)
        done.append(text)

    many()
    assert len(done) >= least


def test_no_end_token_is_text() -> None:
    """Not one either that the tokenizer spells a text with."""
    one, other = (echo_service.tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "xz")
    grammars = GrammarCompiler(echo_service.tokenizer(), VOCAB, (END, one))
    place = grammars.get(form(regex="[xz]{2}")).new_matcher()
    assert allowed(grammars, place) == [other]
    assert place.copy().accept(other) == ""
    assert "ends the output before" in place.accept(one)


@pytest.mark.parametrize("text", ["<|end|>", "a <|im_end|> b", "<|im_start|><|end|>"])
def test_the_name_of_a_special_token_can_be_said(grammars: GrammarCompiler, text: str) -> None:
    assert walk(grammars, form(choice=[text]), random.Random(0)) == text


def test_few_are_held(grammars: GrammarCompiler) -> None:
    """By digest, and HELD at most; several threads get the same one."""
    first = grammars.get(form(regex="a+"))
    assert grammars.get(form(regex="a+")).shared is first.shared
    for i in range(MAX_CACHED):
        grammars.get(form(regex=f"a{{{i}}}b"))
    assert len(grammars._cache) == MAX_CACHED
    assert not grammars.is_cached(form(regex="a+"))
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(grammars.get, [form(json={"type": "null"})] * 4))) == 4


def test_one_source_of_two_kinds_is_two_grammars(grammars: GrammarCompiler) -> None:
    places = [grammars.get(Structured(kind, '["a"]')).new_matcher() for kind in ("regex", "choice")]
    letter = echo_service.tokenizer().encode("a", add_special_tokens=False)[0]
    quote = echo_service.tokenizer().encode('"', add_special_tokens=False)[0]
    assert [allowed(grammars, place) for place in places] == [[quote, letter], [letter]]


def test_sizes_are_bounded() -> None:
    with pytest.raises(InputError, match=f"at most {MAX_SOURCE_CHARS}"):
        form(grammar="a" * (MAX_SOURCE_CHARS + 1))
    with pytest.raises(InputError, match="at most 16 token ids"):
        Structured("regex", "a", after=tuple(range(17)))
    with pytest.raises(InputError, match="exactly one of"):
        form()
    with pytest.raises(InputError, match="exactly one of"):
        form(regex="a", json_object=True)


@pytest.mark.parametrize("asked", [{"regex": "\ud800"}, {"grammar": "\ud800"}, {"choice": ["\ud800"]}])
def test_half_a_surrogate_pair_is_no_text(grammars: GrammarCompiler, asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="half of a surrogate pair"):
        grammars.get(form(**asked))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(grammars: GrammarCompiler, number: str) -> None:
    with pytest.raises(InputError, match="json is no JSON: it has the number"):
        grammars.get(form(json=f'{{"maximum": {number}}}'))
    with pytest.raises(InputError, match="json is no JSON"):
        form(json={"maximum": float(number)})
    with pytest.raises(InputError, match="it has the number"):
        form(json=f'{{"maximum": {number}}}', disable_any_whitespace=True)


def test_references_that_fan_out_are_looked_through_once(grammars: GrammarCompiler) -> None:
    """2**60 ways through the same 60 definitions, none of them endless; and a chain that is."""
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    schema = {"$defs": {**defs, "d60": {"type": "null"}}, "$ref": "#/$defs/d0"}
    assert find_endless_reference(schema) is None
    defs["d60"] = {"$ref": "#/$defs/d3"}
    with pytest.raises(InputError, match="refers to itself for ever"):
        grammars.get(form(json={"$defs": defs, "$ref": "#/$defs/d0"}))


@pytest.mark.parametrize(
    ("schema", "closed_"),
    [
        ({"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}, **NO_MORE}),
        ({"properties": {"a": {}}, "additionalProperties": True}, None),
        ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, None),
        ({"type": "object"}, None),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, None),
        ({"$defs": {"A": {"properties": {}}}, "allOf": [{"$ref": "#/$defs/A"}] * 2}, None),
        ({"$defs": {"A": {"properties": {}}, "B": {"$ref": "#/$defs/A"}}, "allOf": [{"$ref": "#/$defs/B"}, {}]}, None),
        ({"$defs": {"B": {"$ref": "#/$defs/A"}, "A": {"properties": {}}}, "allOf": [{"$ref": "#/$defs/B"}, {}]}, None),
        (
            {"$defs": {"A": {"properties": {}}}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "title": "X"}}},
            {
                "$defs": {"A": {"properties": {}, **NO_MORE}},
                "properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "title": "X"}},
                **NO_MORE,
            },
        ),
        (
            {"properties": {"allOf": {"default": {"allOf": 1}}}},
            {"properties": {"allOf": {"default": {"allOf": 1}}}, **NO_MORE},
        ),
        (
            {"properties": {"a": {"properties": {}}, "b": {"allOf": [{"properties": {}}, {"properties": {}}]}}},
            {
                "properties": {
                    "a": {"properties": {}, **NO_MORE},
                    "b": {"allOf": [{"properties": {}}, {"properties": {}}]},
                },
                **NO_MORE,
            },
        ),
        ({"$defs": {"A": {"properties": {}}}}, {"$defs": {"A": {"properties": {}, **NO_MORE}}}),
        ({"items": {"anyOf": [{"properties": {}}, {}]}}, {"items": {"anyOf": [{"properties": {}, **NO_MORE}, {}]}}),
        ({"enum": [{"properties": {}}]}, None),
        ({"additionalProperties": {"properties": {}}}, {"additionalProperties": {"properties": {}, **NO_MORE}}),
        (True, None),
    ],
)
def test_objects_are_closed_where_nothing_is_said_of_other_members(schema: Any, closed_: Any) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == (schema if closed_ is None else closed_)
    assert json.dumps(schema) == before


def test_nested_definitions_are_read_once() -> None:
    schema: Any = {"properties": {}}
    for _ in range(60):
        schema = {"$defs": {"a": schema}, "allOf": [{"$ref": "#/$defs/a"}, {}]}
    assert close_objects(schema) == schema


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: Any = {}
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(InputError, match="nested too deep"):
        close_objects(schema)


def test_thoughts_are_opened_and_bounded(grammars: GrammarCompiler) -> None:
    """Before the marker: the opening tokens, at most so many more, the marker; behind it the form, or anything."""
    for kind, source in (("regex", "ab"), ("any", "")):
        place = grammars.get(Structured(kind, source, after=(30, 31), opening=(7, 8), budget=2)).new_matcher()
        for token in (7, 8):
            assert allowed(grammars, place) == [token]
            assert place.accept(token) == ""
        for token in (30, 9):  # a part of the marker is none
            assert place.forced_tokens() == ()
            free = allowed(grammars, place)
            assert END not in free
            assert len(free) == VOCAB - 1
            place.accept(token)
        copied = place.copy()
        assert place.forced_tokens() == (30, 31)
        place.accept(30)
        place.accept(31)
        assert (END in allowed(grammars, place)) == (kind == "any")
        assert len(allowed(grammars, place)) == (VOCAB if kind == "any" else 1)
        assert copied.forced_tokens() == (30, 31)
    early = grammars.get(Structured("choice", '["yes"]', after=(7, 8), budget=9)).new_matcher()
    for token in (9, 7, 7, 9, 8, 7, 8):
        assert early.forced_tokens() == ()
        assert allowed(grammars, early) == [token for token in range(VOCAB) if token != END]
        early.accept(token)
    assert allowed(grammars, early) == [early.forced_tokens()[0]]
    assert echo_service.tokenizer().decode(list(early.forced_tokens())).startswith("y")
    none = grammars.get(Structured("any", "", after=(30,), budget=0)).new_matcher()
    assert none.forced_tokens() == (30,)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"kind": "any", "source": ""}, "without the marker"),
        ({"kind": "regex", "source": "a", "budget": 3}, "without the marker"),
        ({"kind": "regex", "source": "a", "after": (1,), "budget": -1}, "budget must be from 0"),
        ({"kind": "regex", "source": "a", "after": (1,), "opening": (-1,)}, "opening must hold at most"),
    ],
)
def test_thoughts_that_cannot_be(form: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Structured(**form)


# Complaints


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (BAD, 'structural_tag: Unimplemented keys: ["not"], at structures[2].schema#/not'),
        ({"properties": {"a": BAD}}, "at structures[2].schema#/properties/a/not"),
        (
            {"type": "string", "minLength": 4, "maxLength": 2},
            "(4) is greater than maxLength (2), at structures[2].schema",
        ),
        ({"$ref": "#"}, "structures[2].schema refers to itself for ever, at structures[2].schema#/$ref"),
        ([], "structures[2].schema must be an object"),
    ],
)
@pytest.mark.parametrize("before", [{"enum": [1]}, {"enum": ["x" * 9000 + "\n\u2028"]}])
def test_places_in_tags(grammars: GrammarCompiler, schema: Any, said: str, before: Any) -> None:
    """Which of them; nothing of the grammar that is made of them here."""
    structures = [{"begin": "<f=\n\u2028>", "schema": one, "end": "</f>"} for one in (before, {}, schema)]
    why = refused(grammars, structural_tag={"structures": structures, "triggers": ["<f="]})
    assert why.endswith(said)
    assert "%json" not in why
    assert "tag_" not in why.removeprefix("structural_tag")


def test_a_users_own_grammar_is_quoted(grammars: GrammarCompiler) -> None:
    assert "start: %json" in refused(grammars, grammar=f"start: %json {json.dumps(BAD)}")


def test_parts_that_many_references_lead_to_are_looked_at_once() -> None:
    refs = [{"$ref": f"#/allOf/{'0' * (i % 6)}{i}"} for i in range(3000)]
    assert find_keyword({"allOf": refs, "items": BAD}, 'Unimplemented keys: ["not"]') == "#/items/not"


# Schemas that nothing finite fulfils


SELF = {"$ref": "#"}
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}


def defs(schema: dict[str, Any], **named: Any) -> dict[str, Any]:
    return {"$defs": named, **schema}


ENDLESS: list[tuple[Any, str]] = [
    (SELF, "#/$ref"),
    ({"allOf": [SELF]}, "#/allOf/0/$ref"),
    ({"type": "array", "minItems": 1, "items": SELF}, "#/items/$ref"),
    ({"type": "array", "minItems": 1, "prefixItems": [SELF]}, "#/prefixItems/0/$ref"),
    ({"type": "array", "minItems": 2, "prefixItems": [{}, SELF]}, "#/prefixItems/1/$ref"),
    ({"type": "array", "minItems": 2, "prefixItems": [{}], "items": SELF}, "#/items/$ref"),
    ({**OBJECT, "minProperties": 1, "additionalProperties": SELF}, "#/additionalProperties/$ref"),
    ({**OBJECT, "required": ["a"], "additionalProperties": SELF}, "#/additionalProperties/$ref"),
    ({**OBJECT, "required": ["a/~"], "properties": {"a/~": SELF}}, "#/properties/a~1~0/$ref"),
    ({**OBJECT, "minProperties": 2, "properties": {"a": {}, "b": SELF}, "additionalProperties": SELF}, None),
    ({**OBJECT, "minProperties": 1, "properties": {"a": SELF}, "additionalProperties": False}, "#/properties/a/$ref"),
    ({**OBJECT, "minProperties": 2, "required": ["a"], "properties": {"a": {}}, "additionalProperties": SELF}, None),
    ({"allOf": [OBJECT, {"required": ["a"], "properties": {"a": SELF}}]}, "#/allOf/1/properties/a/$ref"),
    ({"allOf": [{"minItems": 1}, {"items": SELF}], "type": "array"}, "#/allOf/1/items/$ref"),
    ({"anyOf": [{"$ref": "#"}, {**ARRAY, "minItems": 1, "items": SELF}]}, None),
    (defs({"$ref": "#/$defs/a"}, a={**OBJECT, "required": ["b"], "properties": {"b": {"$ref": "#/$defs/b"}}},
          b={**ARRAY, "minItems": 1, "items": {"$ref": "#/$defs/a"}}), "#/$defs/a/properties/b/$ref"),
    (defs({"$ref": "#/$defs/a"}, a={"$ref": "#/$defs/b"}, b={"anyOf": [{"$ref": "#/$defs/a"}]}), None),
    ({"allOf": [{**OBJECT, "required": ["a"], "properties": {"a": {"$ref": "#/allOf/0"}}}]}, None),
    ({**OBJECT, "required": ["a"], "properties": {"a": {"anyOf": [SELF, {**ARRAY, "minItems": 1, "items": SELF}]}}},
     None),
]  # fmt: skip
FINITE: list[Any] = [
    {"type": "array", "prefixItems": [SELF]},
    {"type": "array", "minItems": 1, "prefixItems": [{}, SELF]},
    {"type": "array", "minItems": 1, "prefixItems": [{}], "items": SELF},
    {"type": "array", "minItems": 1, "prefixItems": [{"anyOf": [{"type": "null"}, SELF]}]},
    {"minItems": 1, "items": SELF},  # a number fulfils it
    {"required": ["a"], "properties": {"a": SELF}},
    {"type": ["array", "string"], "minItems": 1, "items": SELF},
    {**OBJECT, "additionalProperties": SELF},
    {**OBJECT, "minProperties": 1, "properties": {"a": {}}, "additionalProperties": SELF},
    {**OBJECT, "minProperties": 1, "required": ["a"], "properties": {"a": {}}, "additionalProperties": SELF},
    {**OBJECT, "minProperties": 5, "properties": {"a": SELF}},
    {**OBJECT, "minProperties": 1, "patternProperties": {"^b": {}}, "additionalProperties": SELF},
    {**OBJECT, "required": ["b"], "patternProperties": {"^b": {}}, "additionalProperties": SELF},
    {**OBJECT, "required": ["a"], "properties": {"a": {"allOf": [{"type": "null"}]}}},
    {"anyOf": [{"type": "string"}, SELF]},
    defs({"$ref": "#/$defs/a"}, a={**OBJECT, "properties": {"b": {"$ref": "#/$defs/a"}}}),
    defs({"type": "null"}, a={"$ref": "#/$defs/a"}),
    {"$ref": "#there", "$defs": {"a": {"$anchor": "there"}}},
    {"$ref": "#/allOf/0", "allOf": [{"type": "null"}]},
    {"const": {"$ref": "#"}},
    {"allOf": [{"type": "string"}, {"type": "null"}]},  # nothing fulfils it, and not for its references
    True, False, {},
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place"), ENDLESS)
def test_what_nothing_fulfils(grammars: GrammarCompiler, schema: Any, place: str | None) -> None:
    found = find_endless_reference(schema)
    assert found == (place or found)
    at = schema
    for part in found.split("/")[1:]:
        at = at[int(part) if isinstance(at, list) else part.replace("~1", "/").replace("~0", "~")]
    assert at.startswith("#"), "the place is one of the schema"
    with pytest.raises(InputError, match="refers to itself for ever, at #/"):
        grammars.get(form(json=schema))


@pytest.mark.parametrize("schema", FINITE)
def test_what_something_fulfils(schema: Any) -> None:
    assert find_endless_reference(schema) is None


def test_much_is_looked_at_no_further_than_to_a_bound() -> None:
    """Sets of options grow by powers; depths are cut."""
    options = [{"anyOf": [{**ARRAY, "minItems": 1, "items": SELF}] * 8} for _ in range(12)]
    find_endless_reference({"allOf": options})
    deep: Any = {"type": "null"}
    for _ in range(450):
        deep = {"anyOf": [deep]}
    assert find_endless_reference(deep) is None
    for _ in range(450):
        deep = {**OBJECT, "required": ["a"], "properties": {"a": deep}}
    assert find_endless_reference(deep) is None


# JSON Schema's own test suite (json_schema_suite.py): what is accepted lets nothing through that it shouldn't


SUITE = Path(__file__).parents[2] / ".venv" / "json-schema" / "tests"
# Its schemas don't say their draft, so what stands beside a $ref counts, as it does in 2020-12.
WIDE = {"draft7": ["ref: $ref prevents a sibling $id from changing the base uri: $ref resolves to "
                   "/definitions/base_foo, data does not validate: too wide"]}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("draft", ["draft4", "draft7", "draft2019-09", "draft2020-12"])
def test_the_suite(draft: str) -> None:
    found = json_schema_suite.counted(SUITE / draft)
    assert found["schemas"]["accepted"] >= 100
    assert [one for one in found["wrong"] if one.endswith("too wide")] == WIDE.get(draft, [])
    assert found["tests"]["too narrow"] <= 0.05 * sum(found["tests"].values()), found["wrong"]
    assert all(one["why"] for one in found["refused"])
