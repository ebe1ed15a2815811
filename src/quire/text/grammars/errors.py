"""Errors about unsupported grammars: llguidance's messages, with the position in the client's schema and without parts
of the grammar that was generated from it.
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

MAX_POINTER_CHARS = 500
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
    """An output form without a grammar. `pointer` is the JSON pointer (after #) of the schema keyword at fault, or
    ""."""

    def __init__(self, message: str, pointer: str) -> None:
        super().__init__(message, PARAM_NAME)
        self.pointer = pointer


def unsupported_error(structured: Structured, grammar: str, reason: str) -> UnsupportedGrammar:
    """Return the error for `structured`, whose `grammar` llguidance rejected for `reason`, with the position if the
    fault is in a part of a schema."""
    pointer = ""
    if structured.kind == "json":
        pointer = find_keyword(json.loads(structured.source), reason)
    elif structured.kind == "structural_tag" and (line := ERROR_LINE.match(reason)) is not None:
        reason = reason[line.end() :].partition("\n")[0]  # llguidance appends lines of the generated grammar
        if (tag := _tag_of_line(grammar, int(line[1]))) is not None:
            schema = json.loads(structured.source)["structures"][tag].get("schema")
            pointer = f"structures[{tag}].schema{find_keyword(schema, reason)}"
    return UnsupportedGrammar(f"{structured.kind}: {one_line(reason)}{f', at {pointer}' if pointer else ''}", pointer)


def drop_keyword(structured: Structured, pointer: str) -> Structured | None:
    """Return the form without the keyword at `pointer` of its schema, or None if there is no such keyword. The
    alternatives of oneOf are kept as anyOf."""
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
    """Return llguidance's message on one line."""
    return " ".join(why.replace("<non-verbose/>", "").split())[:240]


def _tag_of_line(grammar: str, line: int) -> int | None:
    """Return the index of the structure that a line of a structural tag grammar belongs to, or None."""
    lines = grammar.split("\n")
    match = TAG.match(lines[line - 1]) if line <= len(lines) else None
    return None if match is None else int(match[1])


def find_keyword(schema: Any, reason: str) -> str:
    """Return the JSON pointer (after #) of the schema keyword that `reason` names, or whose value it names; "" if there
    is none."""
    keys = UNIMPLEMENTED_KEYS.match(reason)
    if keys is not None or reason.startswith("oneOf constraints"):
        named = ["oneOf"] if keys is None else re.findall(r'"([^"]*)"', keys[1])
        return next((pointer for pointer, key, _ in _iter_keywords(schema) if key in named), "")[:MAX_POINTER_CHARS]
    if reason.startswith("Failed to generate regex for integer range"):
        return next((pointer for pointer, _ in large_bounds(schema)), "")[:MAX_POINTER_CHARS]
    if (match := EXPECTED_VALUE.match(reason)) is not None:
        candidates = [(pointer, value) for pointer, key, value in _iter_keywords(schema) if key == match[1]]
        exact = [pointer for pointer, value in candidates if json.dumps(value, separators=(",", ":")) == match[2]]
        return next(iter([*exact, *(pointer for pointer, _ in candidates)]), "")[:MAX_POINTER_CHARS]
    best, longest = "", 0
    for pointer, key, value in _iter_keywords(schema):
        values = value if key == "type" and isinstance(value, list) else [value]
        if key in ("$ref", "format", "pattern") or (key == "type" and reason.startswith("Invalid type")):
            size = max((len(one.lstrip("#")) for one in values if isinstance(one, str) and one.lstrip("#") in reason),
                       default=0)  # fmt: skip
            best, longest = (pointer, size) if size > longest else (best, longest)
    return best[:MAX_POINTER_CHARS]


def large_bounds(schema: Any) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the integer bounds that llguidance, which stores them as floats, may not represent exactly: each one's
    pointer, keyword and value."""
    for pointer, key, value in _iter_keywords(schema):
        if key in BOUNDS and type(value) in (int, float) and abs(value) > 2**53 and value == int(value):
            yield pointer, (key, int(value))


def closed_patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the patternProperties of objects that have `properties` and allow no other members, if all patterns are
    anchored at both ends: the pointer, and a Lark grammar of the names that match a pattern and are not in
    `properties`. It may be empty."""
    objects: dict[str, dict[str, Any]] = {}
    for pointer, key, value in _iter_keywords(schema):
        objects.setdefault(pointer.rpartition("/")[0], {})[key] = value
    for pointer, keywords in objects.items():
        patterns, named = keywords.get("patternProperties"), keywords.get("properties")
        if keywords.get("additionalProperties") is not False or not isinstance(patterns, dict) or not patterns:
            continue
        if (
            not isinstance(named, dict)
            or not named
            or not all(ANCHORED_PATTERN.fullmatch(pattern) for pattern in patterns)
        ):
            continue
        slashed = "|".join(f"({pattern[1:-1]})" for pattern in patterns).replace("/", r"\/")
        names = "|".join(map(re.escape, named)).replace("/", r"\/")
        yield f"{pointer}/patternProperties", f"start: NAME\nNAME: /{slashed}/ & ~/{names}/"


def _iter_keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the pointer, name and value of each effective keyword. The targets of references are included under their
    own pointers; unreferenced definitions and values such as those of `enum` are not."""
    todo, seen = [("#", schema)], set[int]()
    while todo:
        pointer, at = todo.pop()
        if not isinstance(at, dict) or id(at) in seen:
            continue
        seen.add(id(at))
        parts: list[tuple[str, Any]] = []
        for key, value in at.items():
            yield f"{pointer}/{escape_pointer(key)}", key, value
            if key in SCHEMA_MAPS and isinstance(value, dict):
                parts += [(f"{pointer}/{key}/{escape_pointer(name)}", one) for name, one in value.items()]
            elif key in SCHEMA_LISTS and isinstance(value, list):
                parts += [(f"{pointer}/{key}/{i}", one) for i, one in enumerate(value)]
            elif key in SCHEMA_VALUES:
                parts.append((f"{pointer}/{key}", value))
            elif key == "$ref" and isinstance(value, str) and value.startswith("#/"):
                parts.append((value, resolve_pointer(schema, value)))
        todo += reversed(parts)
