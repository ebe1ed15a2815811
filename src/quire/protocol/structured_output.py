"""Structured output: how a request gives the form of its output, and the interfaces of grammars. Grammars are compiled
by quire.text.grammars.compiler.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, get_args

from quire.errors import InputError

StructuredKind = Literal["json", "regex", "grammar", "choice", "json_object", "structural_tag"]
STRUCTURED_KINDS: tuple[str, ...] = get_args(StructuredKind)
MAX_SOURCE_CHARS = 1 << 18
MAX_CHOICES = 1999  # with the choice itself within the 2,000 parser items of text/grammars/compiler.py
ANY_OUTPUT: Final = "any"  # any text after the reasoning; only the server's reasoning parsers use this kind
MAX_MARKER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Structured:
    """The form of an output. `source` is, by `kind`: the JSON text of a schema, a regular expression, a Lark grammar, a
    JSON list of choices, "" (json_object), or the JSON of a structural tag. The grammar begins after the token ids
    `after`, a marker such as </think>; without a marker, at the first token. Reasoning comes before the marker: it
    begins with the tokens `opening`, and the marker is forced after at most `budget` more tokens."""

    kind: StructuredKind | Literal["any"]
    source: str
    after: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("after", "opening"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.kind not in (*STRUCTURED_KINDS, ANY_OUTPUT):
            raise InputError(
                f"structured output is one of {', '.join(STRUCTURED_KINDS)}, got {str(self.kind)[:40]!r}", PARAM_NAME
            )
        if not isinstance(self.source, str):
            raise InputError(
                f"the source of {self.kind} must be a string, got {type(self.source).__name__}", PARAM_NAME
            )
        if len(self.source) > MAX_SOURCE_CHARS:
            raise InputError(
                f"{self.kind} has {len(self.source)} characters; at most {MAX_SOURCE_CHARS} are compiled to a grammar",
                PARAM_NAME,
            )
        for name in ("after", "opening"):
            tokens = getattr(self, name)
            if not all(type(token) is int and token >= 0 for token in tokens) or len(tokens) > MAX_MARKER_TOKENS:
                raise InputError(
                    f"{name} must hold at most {MAX_MARKER_TOKENS} token ids, got {str(tokens)[:60]}", PARAM_NAME
                )
        if self.budget is not None and not (type(self.budget) is int and 0 <= self.budget < 2**31):
            raise InputError(f"budget must be from 0 to {2**31 - 1}, got {str(self.budget)[:40]}", PARAM_NAME)
        if not self.after and (self.opening or self.budget is not None or self.kind == ANY_OUTPUT):
            raise InputError("without the marker that ends them, after, there are no thoughts", PARAM_NAME)


PARAM_NAME = "structured_outputs"
LLGUIDANCE_OPTIONS_KEY = "x-guidance"  # the member of schemas with options of llguidance


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output with vLLM's names; give exactly one form. `json` is a schema, as an object or as text;
    `grammar` is in Lark's notation or in GBNF; `structural_tag` is an object or text. `disable_any_whitespace` forbids
    whitespace between the parts of a JSON text."""

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def structured(self) -> Structured:
        """Return the form. Raise InputError unless exactly one is given, with the right type."""
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(
                f"give exactly one of {', '.join(STRUCTURED_KINDS)}; got {', '.join(given) or 'none'}", PARAM_NAME
            )
        kind: Any = given[0]
        spec = Structured(kind, to_source(kind, getattr(self, kind)))
        return without_whitespace(spec) if self.disable_any_whitespace else spec


SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON Schema whose value maps names to schemas."""
SCHEMA_VALUE_KEYWORDS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
"""Keywords of JSON Schema whose value is a schema or a list of schemas."""
EXTRA_PROPERTY_KEYWORDS = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
COMPOSITION_KEYWORDS = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"))
MAX_CLOSING_PASSES = 16  # one for each reference in a chain of references of parts


def to_source(kind: StructuredKind, value: Any, name: str = PARAM_NAME) -> str:
    """Return the source text of `value` for a kind; the objects of a schema are closed (`close_objects`). Raise
    InputError, about the parameter `name`, for a wrong type."""
    if kind == "json_object":
        if value is not True:
            raise InputError(f"{name}: json_object must be true, got {str(value)[:40]}", name)
        return ""
    if kind == "json":
        value = close_objects(_parse_schema(value))
    if kind in ("json", "structural_tag"):
        if isinstance(value, str):
            return value
        if isinstance(value, Mapping) or (isinstance(value, bool) and kind == "json"):
            return _dump_json(kind, value, name)
        raise InputError(f"{name}: {kind} must be an object or its JSON, got {type(value).__name__}", name)
    if kind == "choice":
        return _dump_choices(value, name)
    if not isinstance(value, str):
        raise InputError(f"{name}: {kind} must be a string, got {type(value).__name__}", name)
    return value


def _parse_schema(schema: Any) -> Any:
    """Return a schema given as JSON as a value. Text that is not a schema is returned unchanged: compiling it raises
    the error."""
    if not isinstance(schema, str):
        return schema
    try:
        value = json.loads(schema, parse_float=_parse_finite_float, parse_constant=_parse_finite_float)
    except (ValueError, RecursionError):
        return schema
    return value if isinstance(value, Mapping | bool) else schema


def without_whitespace(spec: Structured) -> Structured:
    """Return the spec without whitespace between the parts of the JSON. Raise InputError for other kinds."""
    if spec.kind == "json_object":
        spec = replace(spec, kind="json", source='{"type": "object"}')
    return _with_option(spec, "whitespace_flexible", False)


def with_lenient(spec: Structured) -> Structured:
    """Return the spec with unsupported keywords of the schema ignored instead of rejected."""
    return _with_option(spec, "lenient", True)


def close_objects(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` for objects with `properties` that say nothing of other
    members, as vLLM's grammars have it: a small model would add members until it is cut. An object that is composed of
    parts stays open, and so do its parts: closed ones would exclude the members of one another."""
    open_refs: set[str] = set()
    try:
        for _ in range(MAX_CLOSING_PASSES):
            known = len(open_refs)
            closed = _close_objects(schema, False, open_refs)
            if len(open_refs) == known:
                return closed
    except RecursionError as error:
        raise InputError("json: the schema is nested too deep to be read", PARAM_NAME) from error
    return schema


def _close_objects(schema: Any, is_part: bool, open_refs: set[str]) -> Any:
    """Return the schema with its objects closed, but for the parts of composed objects. References of parts are added
    to `open_refs`."""
    if isinstance(schema, list):
        return [_close_objects(item, is_part, open_refs) for item in schema]
    if not isinstance(schema, dict):
        return schema
    combined = schema.get("allOf")
    composes = "properties" in schema and not COMPOSITION_KEYWORDS.isdisjoint(schema)
    in_parts = is_part or composes
    in_combined = in_parts or (isinstance(combined, list) and len(combined) > 1)
    if in_parts and isinstance(schema.get("$ref"), str):
        open_refs.add(schema["$ref"])

    closed = dict(schema)
    parts = {"items": False, "prefixItems": False, "additionalProperties": False, "anyOf": in_parts, "oneOf": in_parts,
             "allOf": in_combined}  # fmt: skip
    for name in parts.keys() & schema.keys():
        closed[name] = _close_objects(schema[name], parts[name], open_refs)
    for name in SCHEMA_MAP_KEYWORDS:
        if isinstance(subschemas := schema.get(name), dict):
            closed[name] = {
                key: _close_objects(subschema, f"#/{name}/{key}" in open_refs, open_refs)
                for key, subschema in subschemas.items()
            }
    if "properties" in closed and EXTRA_PROPERTY_KEYWORDS.isdisjoint(closed) and not in_parts:
        closed["additionalProperties"] = False
    return closed


def map_subschemas(
    schema: dict[str, Any], change: Callable[[Any], Any], keywords: Collection[str] = SCHEMA_VALUE_KEYWORDS
) -> dict[str, Any]:
    """Return the schema with `change` applied to the values of `keywords`, which are schemas or lists of schemas, and
    to the schemas in the values of SCHEMA_MAP_KEYWORDS."""
    changed = {name: change(value) if name in keywords else value for name, value in schema.items()}
    for name in SCHEMA_MAP_KEYWORDS:
        if isinstance(subschemas := changed.get(name), dict):
            changed[name] = {key: change(subschema) for key, subschema in subschemas.items()}
    return changed


def _with_option(spec: Structured, name: str, value: bool) -> Structured:
    """Return the spec with an option of llguidance set in its schema."""
    if spec.kind != "json":
        raise InputError(f"{spec.kind} isn't a JSON schema: it has no such option", PARAM_NAME)
    schema = parse_source(spec)
    if not isinstance(schema, dict):
        return spec
    options = schema.get(LLGUIDANCE_OPTIONS_KEY)
    options = {**(options if isinstance(options, dict) else {}), name: value}
    return replace(spec, source=json.dumps({**schema, LLGUIDANCE_OPTIONS_KEY: options}, ensure_ascii=False))


def parse_source(spec: Structured) -> Any:
    """Return the value of a JSON source. Raise InputError for invalid JSON, and for NaN and infinite numbers
    (1e999)."""
    try:
        return json.loads(spec.source, parse_float=_parse_finite_float, parse_constant=_parse_finite_float)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{spec.kind} is no JSON: {str(error)[:120]}", PARAM_NAME) from error


def _parse_finite_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"it has the number {text[:40]}")
    return number


def _dump_json(kind: str, value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: {kind} is no JSON: {str(error)[:120]}", name) from error


def _dump_choices(value: Any, name: str) -> str:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{name}: choice must be a list of strings, got {type(value).__name__}", name)
    if not 0 < len(value) <= MAX_CHOICES:
        raise InputError(f"{name}: choice must have 1 to {MAX_CHOICES} entries, got {len(value)}", name)
    for i, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise InputError(f"{name}: choice[{i}] must be a string of at least one character", name)
    return json.dumps(list(value), ensure_ascii=False)


class GrammarMatcher(Protocol):
    """The state of a sequence in its grammar. Not thread-safe: only the engine's thread uses it."""

    def accept(self, token: int) -> str:
        """Advance by `token`. Return "", or the reason why it is not allowed or the grammar can't continue."""
        ...

    def forced_tokens(self) -> tuple[int, ...]:
        """Return the tokens that must follow, in order; they may end with an end token. The matcher does not
        advance."""
        ...

    def is_unconstrained(self) -> bool:
        """Return True if any tokens may follow from here on: the matcher is not needed any more."""
        ...

    def copy(self) -> GrammarMatcher:
        """Return an independent copy."""
        ...


class Grammar(Protocol):
    """A compiled grammar, for any number of sequences."""

    def new_matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of the grammar."""
        ...

    def compute_masks(self, matchers: Sequence[GrammarMatcher]) -> list[bytes]:
        """Return the allowed next tokens of each matcher, which may be of another grammar of the same vocabulary: one
        bit for each token, 32 in a little-endian word, lowest bit first."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars; thread-safe."""

    def get_cached(self, spec: Structured) -> Grammar | None:
        """Return the grammar if it is compiled already, else None."""
        ...

    def get(self, spec: Structured) -> Grammar:
        """Return the grammar, compiling it if needed, which may take long. Raise InputError if it can't be compiled."""
        ...
