"""What llguidance says of a form that it makes no grammar of, for who asked for it: without what was made of the form
here, and with the place in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quire.errors import InputError
from quire.text.grammar_endless import escaped, target, unescaped
from quire.vocabulary.structured import NAME, Structured

MAX_PLACE = 500  # characters
NAMED = ("properties", "patternProperties", "dependentSchemas")  # schemas by name
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
KEYS = re.compile(r'Unimplemented keys: (\[".*?"\])')
VALUE = re.compile(r"Expected .*? for '([^']+)', got (.*)")
LINE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ANCHORED = re.compile(r"\^[^|]*\$|\^\([^()]*\)\$")
TAG = re.compile(r"tag_(\d+)")


class NoGrammar(InputError):
    """A form that there is no grammar of. `place` is the keyword of its schema that is to blame, a JSON pointer behind
    #; "" if none is."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message, NAME)
        self.place = place


def complaint(asked: Structured, grammar: str, why: str) -> NoGrammar:
    """Why there is no grammar for `asked`, of which `grammar` was made for llguidance, which says `why`; and where, if
    it is about a part of a schema."""
    place = ""
    if asked.kind == "json":
        place = keyword(json.loads(asked.source), why)
    elif asked.kind == "structural_tag" and (line := LINE.match(why)) is not None:
        why = why[line.end() :].partition("\n")[0]  # behind that it shows lines that were made here
        if (tag := _tag(grammar, int(line[1]))) is not None:
            schema = json.loads(asked.source)["structures"][tag].get("schema")
            place = f"structures[{tag}].schema{keyword(schema, why)}"
    return NoGrammar(f"{asked.kind}: {short(why)}{f', at {place}' if place else ''}", place)


def without(asked: Structured, place: str) -> Structured | None:
    """A form without the keyword at `place` of its schema: of oneOf the alternatives stay, as anyOf. None if there is
    no such keyword."""
    if asked.kind != "json" or not place:
        return None
    schema = json.loads(asked.source)
    path, _, name = place.rpartition("/")
    at, key = target(schema, path), unescaped(name)
    if not isinstance(at, dict) or key not in at:
        return None
    value = at.pop(key)
    if key == "oneOf":
        at.setdefault("anyOf", value)
    return replace(asked, source=json.dumps(schema, ensure_ascii=False))


def short(why: str) -> str:
    """What llguidance says, on one line."""
    return " ".join(why.replace("<non-verbose/>", "").split())[:240]


def _tag(grammar: str, line: int) -> int | None:
    """The structure that a line of a grammar of tags is about."""
    lines = grammar.split("\n")
    found = TAG.match(lines[line - 1]) if line <= len(lines) else None
    return None if found is None else int(found[1])


def keyword(schema: Any, why: str) -> str:
    """Where the keyword of a schema is that a complaint names, or that has the value that it names: a JSON pointer
    behind #. "" if it names none."""
    keys = KEYS.match(why)
    if keys is not None or why.startswith("oneOf constraints"):
        named = ["oneOf"] if keys is None else re.findall(r'"([^"]*)"', keys[1])
        return next((place for place, key, _ in _keywords(schema) if key in named), "")[:MAX_PLACE]
    if why.startswith("Failed to generate regex for integer range"):
        return next((place for place, _ in large_bounds(schema)), "")[:MAX_PLACE]
    if (told := VALUE.match(why)) is not None:
        there = [(place, value) for place, key, value in _keywords(schema) if key == told[1]]
        exact = [place for place, value in there if json.dumps(value, separators=(",", ":")) == told[2]]
        return next(iter([*exact, *(place for place, _ in there)]), "")[:MAX_PLACE]
    best, longest = "", 0
    for place, key, value in _keywords(schema):
        values = value if key == "type" and isinstance(value, list) else [value]
        if key in ("$ref", "format", "pattern") or (key == "type" and why.startswith("Invalid type")):
            size = max((len(one.lstrip("#")) for one in values if isinstance(one, str) and one.lstrip("#") in why),
                       default=0)  # fmt: skip
            best, longest = (place, size) if size > longest else (best, longest)
    return best[:MAX_PLACE]


def large_bounds(schema: Any) -> Iterator[tuple[str, tuple[str, int]]]:
    """The places of bounds of integers that llguidance, which keeps them as floats, may not keep exactly: each with its
    keyword and value."""
    for place, key, value in _keywords(schema):
        if key in BOUNDS and type(value) in (int, float) and abs(value) > 2**53 and value == int(value):
            yield place, (key, int(value))


def closed_patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """Of objects that have no other members than those of `properties` and `patternProperties`, and whose patterns are
    anchored at both ends, so that all names that match may be in `properties`: the place of the patterns, and a Lark
    grammar of the names that match and are not."""
    objects: dict[str, dict[str, Any]] = {}
    for place, key, value in _keywords(schema):
        objects.setdefault(place.rpartition("/")[0], {})[key] = value
    for place, said in objects.items():
        patterns, named = said.get("patternProperties"), said.get("properties")
        if said.get("additionalProperties") is not False or not isinstance(patterns, dict) or not patterns:
            continue
        if not isinstance(named, dict) or not named or not all(ANCHORED.fullmatch(pattern) for pattern in patterns):
            continue
        slashed = "|".join(f"({pattern[1:-1]})" for pattern in patterns).replace("/", r"\/")
        names = "|".join(map(re.escape, named)).replace("/", r"\/")
        yield f"{place}/patternProperties", f"start: NAME\nNAME: /{slashed}/ & ~/{names}/"


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """The place, name and value of each keyword that counts: also of what references lead to, at its own place, but not
    of definitions that nothing leads to; values such as those of `enum` have none."""
    todo, seen = [("#", schema)], set[int]()
    while todo:
        place, at = todo.pop()
        if not isinstance(at, dict) or id(at) in seen:
            continue
        seen.add(id(at))
        parts: list[tuple[str, Any]] = []
        for key, value in at.items():
            yield f"{place}/{escaped(key)}", key, value
            if key in NAMED and isinstance(value, dict):
                parts += [(f"{place}/{key}/{escaped(name)}", one) for name, one in value.items()]
            elif key in LISTED and isinstance(value, list):
                parts += [(f"{place}/{key}/{i}", one) for i, one in enumerate(value)]
            elif key in SINGLE:
                parts.append((f"{place}/{key}", value))
            elif key == "$ref" and isinstance(value, str) and value.startswith("#/"):
                parts.append((value, target(schema, value)))
        todo += reversed(parts)
