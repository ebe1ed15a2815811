"""Whether anything of finite length fulfils a JSON schema that refers to itself.

What one value must fulfil is a set of a schema's parts: those that `allOf` and `$ref` bring together, and one option of
each `anyOf`. A set needs others, of members and items that must be there. Nothing finite fulfils one that needs itself
again, whichever options are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_DEPTH = 64  # values within each other, as far as they are looked into
MAX_CHAIN = 256  # references, and parts in parts, that a value goes through
MAX_VISITS = 20_000  # parts that are looked at
JSON_TYPES = frozenset(("null", "boolean", "number", "string", "object", "array"))


class SchemaPart(NamedTuple):
    """A part of a schema, where it is, and where those are that led to it, of the same value."""

    pointer: str
    schema: Any
    chain: tuple[str, ...] = ()


class SearchPath(NamedTuple):
    """What a value is within: the sets of parts, and the last reference."""

    sets: tuple[frozenset[str], ...] = ()
    reference: str = ""


def find_endless_reference(schema: Any) -> str | None:
    """Where a schema needs itself again: the reference that leads back. None: something of finite length fulfils it, or
    nothing does for another reason, as far as MAX_DEPTH, MAX_CHAIN and MAX_LOOKS tell."""
    try:
        return _Search(schema).check_parts([SchemaPart("#", schema)], (), {}, SearchPath()) or None
    except RecursionError:
        return None


class _Search:
    """Its functions return None where something fulfils what they are given; else the reference that leads back, or ""
    where it isn't one that hinders."""

    def __init__(self, schema: Any) -> None:
        self.schema, self.num_visits = schema, 0
        self.satisfiable: set[frozenset[str]] = set()  # sets that something fulfils

    def check_parts(
        self,
        todo: list[SchemaPart],
        choices: tuple[list[SchemaPart], ...],
        parts: dict[str, dict[str, Any]],
        path: SearchPath,
    ) -> str | None:
        """All parts of `todo`, together with `parts`, which are read, by place, and an option of each of `choices`."""
        todo, parts = [*todo], {**parts}
        self.num_visits += len(parts)
        while todo:
            place, at, chain = todo.pop()
            self.num_visits += 1
            if self.num_visits > MAX_VISITS or len(chain) > MAX_CHAIN:
                return None
            if at is False:
                return ""
            if not isinstance(at, dict) or place in parts:
                continue
            parts[place], chain = at, (*chain, place)
            if isinstance(ref := at.get("$ref"), str) and (ref == "#" or ref.startswith("#/")):
                if ref in chain:
                    return f"{place}/$ref"
                path = path._replace(reference=f"{place}/$ref")
                todo.append(SchemaPart(ref, resolve_pointer(self.schema, ref), chain))
            todo += _parts_in_list(at, "allOf", place, chain)
            choices += tuple(filter(None, (_parts_in_list(at, name, place, chain) for name in ("anyOf", "oneOf"))))
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
        """The members that are required, and others as far as `minProperties` wants them."""
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
            if why is None and (name is None or lacking <= 0):  # of further names there are any number
                return None
            reasons += [] if why is None else [why]
        return None if lacking <= 0 else next(filter(None, reasons), "")

    def _check_array(self, parts: dict[str, dict[str, Any]], path: SearchPath) -> str | None:
        """The items that `minItems` wants: behind all `prefixItems` they are alike."""
        least = max((_int_at(at, "minItems") for at in parts.values()), default=0)
        longest = max((len(_list_at(at, "prefixItems")) for at in parts.values()), default=0)
        for i in range(min(least, longest + 1)):
            if (why := self.check_parts(_items(parts, i), (), {}, path)) is not None:
                return why
        return None


def _first_failure(results: Iterator[str | None]) -> str | None:
    """None where one of several ways can be gone; else a reference that hinders, if there is one."""
    reasons = []
    for why in results:
        if why is None:
            return None
        reasons.append(why)
    return next(filter(None, reasons), "")


def _members(parts: dict[str, dict[str, Any]], name: str | None) -> list[SchemaPart]:
    """What a member must fulfil, of a name that is required or one that no part names; where patterns of names may say
    otherwise, nothing."""
    found = []
    for place, at in parts.items():
        properties = at.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(SchemaPart(f"{place}/properties/{escape_pointer(str(name))}", properties[name]))
        elif "additionalProperties" in at and not at.get("patternProperties"):
            found.append(SchemaPart(f"{place}/additionalProperties", at["additionalProperties"]))
    return found


def _items(parts: dict[str, dict[str, Any]], i: int) -> list[SchemaPart]:
    """What the item `i` must fulfil."""
    found = []
    for place, at in parts.items():
        prefix = _list_at(at, "prefixItems")
        if i < len(prefix):
            found.append(SchemaPart(f"{place}/prefixItems/{i}", prefix[i]))
        elif "items" in at:
            found.append(SchemaPart(f"{place}/items", at["items"]))
    return found


def _parts_in_list(at: dict[str, Any], name: str, pointer: str, chain: tuple[str, ...]) -> list[SchemaPart]:
    return [SchemaPart(f"{pointer}/{name}/{i}", one, chain) for i, one in enumerate(_list_at(at, name))]


def _list_at(at: dict[str, Any], name: str) -> list[Any]:
    found = at.get(name)
    return found if isinstance(found, list) else []


def _int_at(at: dict[str, Any], name: str) -> int:
    found = at.get(name)
    return int(found) if isinstance(found, int | float) and abs(found) < 2**53 else 0


def _types_at(at: dict[str, Any]) -> frozenset[str]:
    """The kinds of values that a part allows."""
    kinds = at.get("type", [*JSON_TYPES])
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else [*JSON_TYPES]
    return frozenset("number" if kind == "integer" else kind for kind in named if isinstance(kind, str))


def resolve_pointer(schema: Any, ref: str) -> Any:
    """What a reference within a schema, a JSON pointer behind #, points at; None if there is nothing."""
    for part in ref.split("/")[1:]:
        name = unescape_pointer(part)
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and len(name) < 7 and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def escape_pointer(name: str) -> str:
    """A member's name, as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape_pointer(part: str) -> str:
    """The name that a part of a JSON pointer is."""
    return part.replace("~1", "/").replace("~0", "~")
