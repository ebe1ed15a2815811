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
MAX_LOOKS = 20_000  # parts that are looked at
KINDS = frozenset(("null", "boolean", "number", "string", "object", "array"))


class Part(NamedTuple):
    """A part of a schema, where it is, and where those are that led to it, of the same value."""

    place: str
    schema: Any
    chain: tuple[str, ...] = ()


class Path(NamedTuple):
    """What a value is within: the sets of parts, and the last reference."""

    sets: tuple[frozenset[str], ...] = ()
    reference: str = ""


def endless(schema: Any) -> str | None:
    """Where a schema needs itself again: the reference that leads back. None: something of finite length fulfils it, or
    nothing does for another reason, as far as MAX_DEPTH, MAX_CHAIN and MAX_LOOKS tell."""
    try:
        return _Search(schema).joint([Part("#", schema)], (), {}, Path()) or None
    except RecursionError:
        return None


class _Search:
    """Its functions return None where something fulfils what they are given; else the reference that leads back, or ""
    where it isn't one that hinders."""

    def __init__(self, schema: Any) -> None:
        self.schema, self.looks = schema, 0
        self.finite: set[frozenset[str]] = set()  # sets that something fulfils

    def joint(
        self, todo: list[Part], choices: tuple[list[Part], ...], parts: dict[str, dict[str, Any]], path: Path
    ) -> str | None:
        """All parts of `todo`, together with `parts`, which are read, by place, and an option of each of `choices`."""
        todo, parts = [*todo], {**parts}
        self.looks += len(parts)
        while todo:
            place, at, chain = todo.pop()
            self.looks += 1
            if self.looks > MAX_LOOKS or len(chain) > MAX_CHAIN:
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
                todo.append(Part(ref, target(self.schema, ref), chain))
            todo += _listed(at, "allOf", place, chain)
            choices += tuple(filter(None, (_listed(at, name, place, chain) for name in ("anyOf", "oneOf"))))
        if not choices:
            return self._set(parts, path)
        return _first_reason(self.joint([option], choices[1:], parts, path) for option in choices[0])

    def _set(self, parts: dict[str, dict[str, Any]], path: Path) -> str | None:
        key = frozenset(parts)
        if key in self.finite or len(path.sets) > MAX_DEPTH:
            return None
        if key in path.sets:
            return path.reference
        if any("enum" in at or "const" in at for at in parts.values()):
            return None
        kinds = KINDS.intersection(*map(_kinds, parts.values()))
        path = path._replace(sets=(*path.sets, key))
        ways = (self._object(parts, path) if kind == "object" else self._array(parts, path)
                for kind in ("object", "array") if kind in kinds)  # fmt: skip
        why = None if kinds - {"object", "array"} else _first_reason(ways)
        if why is None:
            self.finite.add(key)
        return why

    def _object(self, parts: dict[str, dict[str, Any]], path: Path) -> str | None:
        """The members that are required, and others as far as `minProperties` wants them."""
        required = {name for at in parts.values() for name in _list(at, "required") if isinstance(name, str)}
        for name in sorted(required):
            if (why := self.joint(_members(parts, name), (), {}, path)) is not None:
                return why
        lacking = max((_count(at, "minProperties") for at in parts.values()), default=0) - len(required)
        named = {name for at in parts.values() if isinstance(at.get("properties"), dict) for name in at["properties"]}
        reasons = []
        for name in [None, *sorted(named - required)] if lacking > 0 else ():
            why = self.joint(_members(parts, name), (), {}, path)
            lacking -= why is None
            if why is None and (name is None or lacking <= 0):  # of further names there are any number
                return None
            reasons += [] if why is None else [why]
        return None if lacking <= 0 else next(filter(None, reasons), "")

    def _array(self, parts: dict[str, dict[str, Any]], path: Path) -> str | None:
        """The items that `minItems` wants: behind all `prefixItems` they are alike."""
        least = max((_count(at, "minItems") for at in parts.values()), default=0)
        longest = max((len(_list(at, "prefixItems")) for at in parts.values()), default=0)
        for i in range(min(least, longest + 1)):
            if (why := self.joint(_items(parts, i), (), {}, path)) is not None:
                return why
        return None


def _first_reason(tried: Iterator[str | None]) -> str | None:
    """None where one of several ways can be gone; else a reference that hinders, if there is one."""
    reasons = []
    for why in tried:
        if why is None:
            return None
        reasons.append(why)
    return next(filter(None, reasons), "")


def _members(parts: dict[str, dict[str, Any]], name: str | None) -> list[Part]:
    """What a member must fulfil, of a name that is required or one that no part names; where patterns of names may say
    otherwise, nothing."""
    found = []
    for place, at in parts.items():
        properties = at.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(Part(f"{place}/properties/{escaped(str(name))}", properties[name]))
        elif "additionalProperties" in at and not at.get("patternProperties"):
            found.append(Part(f"{place}/additionalProperties", at["additionalProperties"]))
    return found


def _items(parts: dict[str, dict[str, Any]], i: int) -> list[Part]:
    """What the item `i` must fulfil."""
    found = []
    for place, at in parts.items():
        prefix = _list(at, "prefixItems")
        if i < len(prefix):
            found.append(Part(f"{place}/prefixItems/{i}", prefix[i]))
        elif "items" in at:
            found.append(Part(f"{place}/items", at["items"]))
    return found


def _listed(at: dict[str, Any], name: str, place: str, chain: tuple[str, ...]) -> list[Part]:
    return [Part(f"{place}/{name}/{i}", one, chain) for i, one in enumerate(_list(at, name))]


def _list(at: dict[str, Any], name: str) -> list[Any]:
    found = at.get(name)
    return found if isinstance(found, list) else []


def _count(at: dict[str, Any], name: str) -> int:
    found = at.get(name)
    return int(found) if isinstance(found, int | float) and abs(found) < 2**53 else 0


def _kinds(at: dict[str, Any]) -> frozenset[str]:
    """The kinds of values that a part allows."""
    kinds = at.get("type", [*KINDS])
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else [*KINDS]
    return frozenset("number" if kind == "integer" else kind for kind in named if isinstance(kind, str))


def target(schema: Any, ref: str) -> Any:
    """What a reference within a schema, a JSON pointer behind #, points at; None if there is nothing."""
    for part in ref.split("/")[1:]:
        name = unescaped(part)
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and len(name) < 7 and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def escaped(name: str) -> str:
    """A member's name, as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescaped(part: str) -> str:
    """The name that a part of a JSON pointer is."""
    return part.replace("~1", "/").replace("~0", "~")
