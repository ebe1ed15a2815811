"""Schemas that nothing finite fulfils are told from those that something does."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from quire.errors import InputError
from quire.text.grammar_endless import endless
from quire.text.grammars import Grammars
from quire.vocabulary.structured import StructuredOutputsParams

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
def test_what_nothing_fulfils(grammars: Grammars, schema: Any, place: str | None) -> None:
    found = endless(schema)
    assert found == (place or found)
    at = schema
    for part in found.split("/")[1:]:
        at = at[int(part) if isinstance(at, list) else part.replace("~1", "/").replace("~0", "~")]
    assert at.startswith("#"), "the place is one of the schema"
    with pytest.raises(InputError, match="refers to itself for ever, at #/"):
        grammars.get(StructuredOutputsParams(json=schema).structured())


@pytest.mark.parametrize("schema", FINITE)
def test_what_something_fulfils(schema: Any) -> None:
    assert endless(schema) is None


def some_schema(rng: random.Random, depth: int = 0, refers: bool = False) -> Any:
    """A schema that refers to itself here and there, but never at once: jsonschema follows that for ever."""
    if depth > 2 or (refers and rng.random() < 0.4):
        refs = [SELF, SELF, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] if refers else []
        return rng.choice([{"type": "null"}, {}, *refs])
    found: dict[str, Any] = {}
    if rng.random() < 0.8:
        found["type"] = rng.choice(["object", "array", "object", "array", ["array", "null"]])
    for key, share, make in (
        ("properties", 0.5, lambda: {name: some_schema(rng, depth + 1, True) for name in rng.sample("abc", 2)}),
        ("required", 0.4, lambda: rng.sample("abc", rng.randrange(1, 3))),
        ("additionalProperties", 0.4, lambda: rng.choice([False, some_schema(rng, depth + 1, True)])),
        ("minProperties", 0.3, lambda: rng.randrange(1, 3)),
        ("items", 0.5, lambda: some_schema(rng, depth + 1, True)),
        ("prefixItems", 0.4, lambda: [some_schema(rng, depth + 1, True) for _ in range(rng.randrange(1, 3))]),
        ("minItems", 0.5, lambda: rng.randrange(1, 3)),
        ("anyOf", 0.2, lambda: [some_schema(rng, depth + 1) for _ in range(2)]),
        ("allOf", 0.2, lambda: [some_schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]),
    ):
        if rng.random() < share:
            found[key] = make()
    return found


def values(rng: random.Random, depth: int) -> list[Any]:
    """Small ones."""
    if depth == 0:
        return [None, 1, [], {}]
    parts = values(rng, depth - 1)
    lists = [[rng.choice(parts) for _ in range(rng.randrange(1, 3))] for _ in range(12)]
    objects = [{name: rng.choice(parts) for name in rng.sample("abcd", rng.randrange(1, 4))} for _ in range(12)]
    return [*parts, *lists, *objects]


def test_what_is_called_endless_is_fulfilled_by_nothing_small() -> None:
    """As jsonschema says, of random schemas and values."""
    count = 0
    for seed in range(2000):
        rng = random.Random(seed)
        schema = {**some_schema(rng), "$defs": {"a": some_schema(rng, 1), "b": some_schema(rng, 1)}}
        if endless(schema) is None:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for value in values(rng, 2):
            assert not validator.is_valid(value), (seed, schema, value)
        count += 1
    assert count > 50


def test_much_is_looked_at_no_further_than_to_a_bound() -> None:
    """Sets of options grow by powers; depths are cut."""
    options = [{"anyOf": [{**ARRAY, "minItems": 1, "items": SELF}] * 8} for _ in range(12)]
    endless({"allOf": options})
    deep: Any = {"type": "null"}
    for _ in range(450):
        deep = {"anyOf": [deep]}
    assert endless(deep) is None
    for _ in range(450):
        deep = {**OBJECT, "required": ["a"], "properties": {"a": deep}}
    assert endless(deep) is None
