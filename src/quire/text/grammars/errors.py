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
from quire.protocol.structured_output import PARAM_NAME, Structured
from quire.text.grammars.schema_cycles import escape_pointer, resolve_pointer, unescape_pointer

MAX_POINTER_CHARS = 500  # characters
SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas")  # schemas by name
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_VALUES = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
UNIMPLEMENTED_KEYS = re.compile(r'Unimplemented keys: (\[".*?"\])')
EXPECTED_VALUE = re.compile(r"Expected .*? for '([^']+)', got (.*)")
ERROR_LINE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ANCHORED_PATTERN = re.compile(r"\^[^|]*\$|\^\([^()]*\)\$")
TAG = re.compile(r"tag_(\d+)")


class UnsupportedGrammar(InputError):
    """A form that there is no grammar of. `pointer` is the keyword of its schema that is to blame, a JSON pointer
    behind #; "" if none is."""

    def __init__(self, message: str, pointer: str) -> None:
        super().__init__(message, PARAM_NAME)
        self.pointer = pointer


def unsupported_error(structured: Structured, grammar: str, reason: str) -> UnsupportedGrammar:
    """Why there is no grammar for `structured`, of which `grammar` was made for llguidance, which says `reason`; and
    where, if it is about a part of a schema."""
    place = ""
    if structured.kind == "json":
        place = find_keyword(json.loads(structured.source), reason)
    elif structured.kind == "structural_tag" and (line := ERROR_LINE.match(reason)) is not None:
        reason = reason[line.end() :].partition("\n")[0]  # behind that it shows lines that were made here
        if (tag := _tag_of_line(grammar, int(line[1]))) is not None:
            schema = json.loads(structured.source)["structures"][tag].get("schema")
            place = f"structures[{tag}].schema{find_keyword(schema, reason)}"
    return UnsupportedGrammar(f"{structured.kind}: {one_line(reason)}{f', at {place}' if place else ''}", place)


def drop_keyword(structured: Structured, pointer: str) -> Structured | None:
    """A form without the keyword at `pointer` of its schema: of oneOf the alternatives stay, as anyOf. None if there is
    no such keyword."""
    if structured.kind != "json" or not pointer:
        return None
    schema = json.loads(structured.source)
    path, _, name = pointer.rpartition("/")
    at, key = resolve_pointer(schema, path), unescape_pointer(name)
    if not isinstance(at, dict) or key not in at:
        return None
    value = at.pop(key)
    if key == "oneOf":
        at.setdefault("anyOf", value)
    return replace(structured, source=json.dumps(schema, ensure_ascii=False))


def one_line(why: str) -> str:
    """What llguidance says, on one line."""
    return " ".join(why.replace("<non-verbose/>", "").split())[:240]


def _tag_of_line(grammar: str, line: int) -> int | None:
    """The structure that a line of a grammar of tags is about."""
    lines = grammar.split("\n")
    found = TAG.match(lines[line - 1]) if line <= len(lines) else None
    return None if found is None else int(found[1])


def find_keyword(schema: Any, reason: str) -> str:
    """Where the keyword of a schema is that a complaint names, or that has the value that it names: a JSON pointer
    behind #. "" if it names none."""
    keys = UNIMPLEMENTED_KEYS.match(reason)
    if keys is not None or reason.startswith("oneOf constraints"):
        named = ["oneOf"] if keys is None else re.findall(r'"([^"]*)"', keys[1])
        return next((place for place, key, _ in _iter_keywords(schema) if key in named), "")[:MAX_POINTER_CHARS]
    if reason.startswith("Failed to generate regex for integer range"):
        return next((place for place, _ in large_bounds(schema)), "")[:MAX_POINTER_CHARS]
    if (told := EXPECTED_VALUE.match(reason)) is not None:
        there = [(place, value) for place, key, value in _iter_keywords(schema) if key == told[1]]
        exact = [place for place, value in there if json.dumps(value, separators=(",", ":")) == told[2]]
        return next(iter([*exact, *(place for place, _ in there)]), "")[:MAX_POINTER_CHARS]
    best, longest = "", 0
    for place, key, value in _iter_keywords(schema):
        values = value if key == "type" and isinstance(value, list) else [value]
        if key in ("$ref", "format", "pattern") or (key == "type" and reason.startswith("Invalid type")):
            size = max((len(one.lstrip("#")) for one in values if isinstance(one, str) and one.lstrip("#") in reason),
                       default=0)  # fmt: skip
            best, longest = (place, size) if size > longest else (best, longest)
    return best[:MAX_POINTER_CHARS]


def large_bounds(schema: Any) -> Iterator[tuple[str, tuple[str, int]]]:
    """The places of bounds of integers that llguidance, which keeps them as floats, may not keep exactly: each with its
    keyword and value."""
    for place, key, value in _iter_keywords(schema):
        if key in BOUNDS and type(value) in (int, float) and abs(value) > 2**53 and value == int(value):
            yield place, (key, int(value))


def closed_patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """Of objects that have no other members than those of `properties` and `patternProperties`, and whose patterns are
    anchored at both ends, so that all names that match may be in `properties`: the place of the patterns, and a Lark
    grammar of the names that match and are not."""
    objects: dict[str, dict[str, Any]] = {}
    for place, key, value in _iter_keywords(schema):
        objects.setdefault(place.rpartition("/")[0], {})[key] = value
    for place, said in objects.items():
        patterns, named = said.get("patternProperties"), said.get("properties")
        if said.get("additionalProperties") is not False or not isinstance(patterns, dict) or not patterns:
            continue
        if (
            not isinstance(named, dict)
            or not named
            or not all(ANCHORED_PATTERN.fullmatch(pattern) for pattern in patterns)
        ):
            continue
        slashed = "|".join(f"({pattern[1:-1]})" for pattern in patterns).replace("/", r"\/")
        names = "|".join(map(re.escape, named)).replace("/", r"\/")
        yield f"{place}/patternProperties", f"start: NAME\nNAME: /{slashed}/ & ~/{names}/"


def _iter_keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
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
            yield f"{place}/{escape_pointer(key)}", key, value
            if key in SCHEMA_MAPS and isinstance(value, dict):
                parts += [(f"{place}/{key}/{escape_pointer(name)}", one) for name, one in value.items()]
            elif key in SCHEMA_LISTS and isinstance(value, list):
                parts += [(f"{place}/{key}/{i}", one) for i, one in enumerate(value)]
            elif key in SCHEMA_VALUES:
                parts.append((f"{place}/{key}", value))
            elif key == "$ref" and isinstance(value, str) and value.startswith("#/"):
                parts.append((value, resolve_pointer(schema, value)))
        todo += reversed(parts)
