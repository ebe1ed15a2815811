"""Random schemas and patterns, as hypothesis draws them, of keywords that are enforced and texts that are short."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Schemas = st.SearchStrategy[Any]
names = st.text('abcde_ é"\\', min_size=1, max_size=8)
leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "string", "format": "date"}]),
    st.tuples(st.integers(-500, 500), st.integers(0, 500)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
    ),
    st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(
        lambda t: {"type": "number", "exclusiveMinimum": t[0], "exclusiveMaximum": sum(t)}
    ),
    st.integers(2, 9).map(lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 99}),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda t: {"type": "string", "minLength": t[0], "maxLength": sum(t)}
    ),
    st.lists(st.one_of(st.integers(-9, 99), names, st.none()), min_size=1, max_size=4, unique_by=json.dumps).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["^[a-z]{1,4}$", "^(ab|cd)*$", r"^\d{2}-\d{2}$"]).map(lambda p: {"type": "string", "pattern": p}),
)


def objects(parts: Schemas) -> Schemas:
    def made(properties: dict[str, Any], required: int) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": sorted(properties)[:required],
                "additionalProperties": False}  # fmt: skip

    return st.builds(made, st.dictionaries(names, parts, max_size=4), st.integers(0, 4))


def arrays(parts: Schemas) -> Schemas:
    """Of one kind of items, or of two with their places."""

    def made(one: Any, low: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": one, "minItems": low, "maxItems": low + more}

    def placed(first: Any, then: Any) -> dict[str, Any]:
        return {"type": "array", "prefixItems": [first, then], "items": False, "minItems": 2}

    return st.one_of(st.builds(made, parts, st.integers(0, 2), st.integers(0, 2)), st.builds(placed, parts, parts))


def references(parts: Schemas) -> Schemas:
    """A part by its name, twice."""

    def made(part: Any) -> dict[str, Any]:
        named = {"$ref": "#/$defs/part"}
        return {"$defs": {"part": part}, "type": "object", "properties": {"one": named, "other": named},
                "required": ["one"], "additionalProperties": False}  # fmt: skip

    return parts.map(made)


tree = st.recursive(
    leaves,
    lambda parts: st.one_of(
        objects(parts), arrays(parts), st.lists(parts, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    ),
    max_leaves=8,
)
schemas = st.one_of(tree, tree, tree, references(tree))
atoms = st.sampled_from(["a", "[b-d]", "[0-9_]", "é", "(xy|z)", ".", "[^a]", r"\.", " "])
patterns = st.recursive(
    atoms,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.builds(
            lambda one, low, more: f"(?:{one}){{{low},{low + more}}}", parts, st.integers(0, 3), st.integers(0, 3)
        ),
        st.lists(parts, min_size=2, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
    ),
    max_leaves=6,
)


def drawn(strategy: Schemas, number: int, which: int) -> list[Any]:
    """So many of them, no two alike; `which` says which ones, with one version of hypothesis always the same."""
    found: dict[str, Any] = {}

    @seed(which)
    @settings(max_examples=4 * number, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def collect(one: Any) -> None:
        found[json.dumps(one)] = one

    collect()
    assert len(found) >= number, f"{len(found)} of {number}"
    return list(found.values())[-number:]  # the first ones are simple
