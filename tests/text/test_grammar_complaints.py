"""Places in complaints about forms: they are in what was asked for, and what they point at is what is complained of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import InputError
from quire.text.grammar_complaints import keyword
from quire.text.grammars import Grammars
from quire.vocabulary.structured import StructuredOutputsParams

BAD = {"not": {}}
PLACES: list[tuple[Any, str]] = [
    ({"properties": {"a": {"enum": [BAD]}, "b": BAD}}, "#/properties/b/not"),
    ({"properties": {"a": {"const": BAD, "default": BAD, "examples": [BAD]}, "b": BAD}}, "#/properties/b/not"),
    ({"properties": {"not": {"type": "null"}, "b": BAD}}, "#/properties/b/not"),
    ({"properties": {"properties": BAD}}, "#/properties/properties/not"),
    ({"$defs": {"unused": BAD, "used": BAD}, "items": {"$ref": "#/$defs/used"}}, "#/$defs/used/not"),
    ({"definitions": {"a": {"items": BAD}}, "$ref": "#/definitions/a"}, "#/definitions/a/items/not"),
    ({"$ref": "#/allOf/0", "allOf": [{"anyOf": [{"type": "null"}, BAD]}]}, "#/allOf/0/anyOf/1/not"),
    ({"properties": {"a/b~c": BAD}}, "#/properties/a~1b~0c/not"),
    ({"prefixItems": [{}, BAD]}, "#/prefixItems/1/not"),
    ({"patternProperties": {"^x": BAD}}, "#/patternProperties/^x/not"),
    ({"additionalProperties": BAD}, "#/additionalProperties/not"),
    ({"properties": {"a": {"minLength": 1}, "b": {"minLength": -1}}}, "#/properties/b/minLength"),
    ({"properties": {"a": {"type": "null"}, "b": {"type": ["null", "colour"]}}}, "#/properties/b/type"),
    ({"properties": {"a": {"format": "date"}, "b": {"format": "iban"}}}, "#/properties/b/format"),
    ({"properties": {"a": {"type": "string", "pattern": "a"}, "b": {"type": "string", "pattern": "(?=a)b"}}},
     "#/properties/b/pattern"),
    ({"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/ab"}}, "$defs": {"a": {}}},
     "#/properties/b/$ref"),
]  # fmt: skip


def refused(grammars: Grammars, **asked: Any) -> str:
    with pytest.raises(InputError) as error:
        grammars.get(StructuredOutputsParams(**asked).structured())
    return str(error.value)


@pytest.mark.parametrize(("schema", "place"), PLACES)
def test_places_in_a_schema(grammars: Grammars, schema: Any, place: str) -> None:
    assert refused(grammars, json=schema).endswith(f", at {place}")


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
def test_places_in_tags(grammars: Grammars, schema: Any, said: str, before: Any) -> None:
    """Which of them; nothing of the grammar that is made of them here."""
    structures = [{"begin": "<f=\n\u2028>", "schema": one, "end": "</f>"} for one in (before, {}, schema)]
    why = refused(grammars, structural_tag={"structures": structures, "triggers": ["<f="]})
    assert why.endswith(said)
    assert "%json" not in why
    assert "tag_" not in why.removeprefix("structural_tag")


def test_a_users_own_grammar_is_quoted(grammars: Grammars) -> None:
    assert "start: %json" in refused(grammars, grammar=f"start: %json {json.dumps(BAD)}")


def test_parts_that_many_references_lead_to_are_looked_at_once() -> None:
    refs = [{"$ref": f"#/allOf/{'0' * (i % 6)}{i}"} for i in range(3000)]
    assert keyword({"allOf": refs, "items": BAD}, 'Unimplemented keys: ["not"]') == "#/items/not"
