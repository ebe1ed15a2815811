"""Detection of JSON schemas that no finite value satisfies because they refer to themselves.

What one value must satisfy is a set of schema parts: those joined by `allOf` and `$ref`, and one option of each
`anyOf`. A set requires other sets, for required members and items. No finite value satisfies a set that requires itself
again whichever options are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_DEPTH = 64  # nested values that are examined
MAX_CHAIN = 256  # references and nested parts of one value
MAX_VISITS = 20_000  # parts that are examined
JSON_TYPES = frozenset(("null", "boolean", "number", "string", "object", "array"))


class SchemaPart(NamedTuple):
    """A part of a schema, its pointer, and the pointers of the parts of the same value that led to it."""

    pointer: str
    schema: Any
    chain: tuple[str, ...] = ()


class SearchPath(NamedTuple):
    """The enclosing sets of parts, and the last reference."""

    sets: tuple[frozenset[str], ...] = ()
    reference: str = ""


def find_endless_reference(schema: Any) -> str | None:
    """Return the reference by which the schema requires itself again. None: a finite value satisfies it, or none does
    for another reason, or the limits MAX_DEPTH, MAX_CHAIN and MAX_VISITS were reached."""
    try:
        return _Search(schema).check_parts([SchemaPart("#", schema)], (), {}, SearchPath()) or None
    except RecursionError:
        return None


class _Search:
    """The search. Its methods return None if a finite value satisfies their arguments, else the reference that leads
    back, or "" if no reference is at fault."""

    def __init__(self, schema: Any) -> None:
        self.schema, self.num_visits = schema, 0
        self.satisfiable: set[frozenset[str]] = set()  # sets that a finite value satisfies

    def check_parts(
        self,
        todo: list[SchemaPart],
        choices: tuple[list[SchemaPart], ...],
        parts: dict[str, dict[str, Any]],
        path: SearchPath,
    ) -> str | None:
        """Check all parts of `todo` together with `parts`, which are resolved, by pointer, and one option of each of
        `choices`."""
        todo, parts = [*todo], {**parts}
        self.num_visits += len(parts)
        while todo:
            pointer, at, chain = todo.pop()
            self.num_visits += 1
            if self.num_visits > MAX_VISITS or len(chain) > MAX_CHAIN:
                return None
            if at is False:
                return ""
            if not isinstance(at, dict) or pointer in parts:
                continue
            parts[pointer], chain = at, (*chain, pointer)
            if isinstance(ref := at.get("$ref"), str) and (ref == "#" or ref.startswith("#/")):
                if ref in chain:
                    return f"{pointer}/$ref"
                path = path._replace(reference=f"{pointer}/$ref")
                todo.append(SchemaPart(ref, resolve_pointer(self.schema, ref), chain))
            todo += _parts_in_list(at, "allOf", pointer, chain)
            choices += tuple(filter(None, (_parts_in_list(at, name, pointer, chain) for name in ("anyOf", "oneOf"))))
        if not choices:
            return self._check_set(parts, path)
        return _first_failure(self.check_parts([option], choices[1:], parts, path) for option in choices[0])

    def _check_set(self, parts: dict[str, dict[str, Any]], path: SearchPath) -> str | None:
        key = frozenset(parts)
        if key in self.satisfiable or len(path.sets) > MAX_DEPTH:
            return None
        if key in path.sets:
            return path.reference
        if any("enum" in at or "const" in at for at in parts.values()):
            return None
        kinds = JSON_TYPES.intersection(*map(_types_at, parts.values()))
        path = path._replace(sets=(*path.sets, key))
        ways = (self._check_object(parts, path) if kind == "object" else self._check_array(parts, path)
                for kind in ("object", "array") if kind in kinds)  # fmt: skip
        why = None if kinds - {"object", "array"} else _first_failure(ways)
        if why is None:
            self.satisfiable.add(key)
        return why

    def _check_object(self, parts: dict[str, dict[str, Any]], path: SearchPath) -> str | None:
        """Check the required members, and further ones up to `minProperties`."""
        required = {name for at in parts.values() for name in _list_at(at, "required") if isinstance(name, str)}
        for name in sorted(required):
            if (why := self.check_parts(_members(parts, name), (), {}, path)) is not None:
                return why
        lacking = max((_int_at(at, "minProperties") for at in parts.values()), default=0) - len(required)
        named = {name for at in parts.values() if isinstance(at.get("properties"), dict) for name in at["properties"]}
        reasons = []
        for name in [None, *sorted(named - required)] if lacking > 0 else ():
            why = self.check_parts(_members(parts, name), (), {}, path)
            lacking -= why is None
            if why is None and (name is None or lacking <= 0):  # the number of other names is unlimited
                return None
            reasons += [] if why is None else [why]
        return None if lacking <= 0 else next(filter(None, reasons), "")

    def _check_array(self, parts: dict[str, dict[str, Any]], path: SearchPath) -> str | None:
        """Check the first `minItems` items; all items after `prefixItems` are alike."""
        least = max((_int_at(at, "minItems") for at in parts.values()), default=0)
        longest = max((len(_list_at(at, "prefixItems")) for at in parts.values()), default=0)
        for i in range(min(least, longest + 1)):
            if (why := self.check_parts(_items(parts, i), (), {}, path)) is not None:
                return why
        return None


def _first_failure(results: Iterator[str | None]) -> str | None:
    """Return None if one of the alternatives is satisfiable, else a reference at fault, if any."""
    reasons = []
    for why in results:
        if why is None:
            return None
        reasons.append(why)
    return next(filter(None, reasons), "")


def _members(parts: dict[str, dict[str, Any]], name: str | None) -> list[SchemaPart]:
    """Return what a member must satisfy: one named `name`, or for None one that no part names. Where patterns of names
    may apply, nothing is required."""
    members = []
    for pointer, at in parts.items():
        properties = at.get("properties")
        if isinstance(properties, dict) and name in properties:
            members.append(SchemaPart(f"{pointer}/properties/{escape_pointer(str(name))}", properties[name]))
        elif "additionalProperties" in at and not at.get("patternProperties"):
            members.append(SchemaPart(f"{pointer}/additionalProperties", at["additionalProperties"]))
    return members


def _items(parts: dict[str, dict[str, Any]], i: int) -> list[SchemaPart]:
    """Return what item `i` must satisfy."""
    items = []
    for pointer, at in parts.items():
        prefix = _list_at(at, "prefixItems")
        if i < len(prefix):
            items.append(SchemaPart(f"{pointer}/prefixItems/{i}", prefix[i]))
        elif "items" in at:
            items.append(SchemaPart(f"{pointer}/items", at["items"]))
    return items


def _parts_in_list(at: dict[str, Any], name: str, pointer: str, chain: tuple[str, ...]) -> list[SchemaPart]:
    return [SchemaPart(f"{pointer}/{name}/{i}", one, chain) for i, one in enumerate(_list_at(at, name))]


def _list_at(at: dict[str, Any], name: str) -> list[Any]:
    value = at.get(name)
    return value if isinstance(value, list) else []


def _int_at(at: dict[str, Any], name: str) -> int:
    value = at.get(name)
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else 0


def _types_at(at: dict[str, Any]) -> frozenset[str]:
    """Return the JSON types that a part allows."""
    kinds = at.get("type", [*JSON_TYPES])
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else [*JSON_TYPES]
    return frozenset("number" if kind == "integer" else kind for kind in named if isinstance(kind, str))


def resolve_pointer(schema: Any, ref: str) -> Any:
    """Return the target of a JSON pointer (after #) within a schema, or None."""
    for part in ref.split("/")[1:]:
        name = unescape_pointer(part)
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and len(name) < 7 and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def escape_pointer(name: str) -> str:
    """Escape a member's name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape_pointer(part: str) -> str:
    """Return the member's name of a JSON pointer's part."""
    return part.replace("~1", "/").replace("~0", "~")
