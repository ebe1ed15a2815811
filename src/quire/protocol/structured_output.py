"""Structured output: what a request may say of the form of its output, and what the control plane must know of a
grammar that was made of it. Who makes grammars is the text plane's (quire.text.grammars.compiler).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from quire.errors import InputError

StructuredKind = Literal["json", "regex", "grammar", "choice", "json_object", "structural_tag"]
STRUCTURED_KINDS: tuple[str, ...] = get_args(StructuredKind)
MAX_SOURCE_CHARS = 1 << 18  # characters
MAX_CHOICES = 1999  # each is an item of a parser's row, as is what holds them: text/grammars/compiler.py allows 2,000
ANY_OUTPUT = "any"  # a kind that only readers of thoughts ask for: whatever the model says, behind them
MAX_MARKER_TOKENS = 16  # tokens


@dataclass(frozen=True, slots=True)
class Structured:
    """The form of an output. `source` is the JSON text of a schema, a pattern, a Lark grammar, a JSON list of choices,
    "" or the JSON of a structural tag. The grammar begins behind the token ids `after`, a marker such as </think>; with
    none at the first token of the output. Before it stand thoughts, which begin with the tokens `opening`, and have at
    most `budget` tokens more: then the marker follows."""

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
LLGUIDANCE_OPTIONS_KEY = "x-guidance"  # a member of schemas, in which llguidance looks for options


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output by vLLM's names: exactly one of these. `json` is a schema, as an object or as its text;
    `grammar` is in Lark's notation; `structural_tag` an object or its text. With `disable_any_whitespace` there is none
    between parts of a JSON text."""

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def structured(self) -> Structured:
        """What the engine is asked for. InputError unless exactly one form is given, and of its type."""
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(
                f"give exactly one of {', '.join(STRUCTURED_KINDS)}; got {', '.join(given) or 'none'}", PARAM_NAME
            )
        kind: Any = given[0]
        found = Structured(kind, to_source(kind, getattr(self, kind)))
        return without_whitespace(found) if self.disable_any_whitespace else found


SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON Schema whose value has schemas by name; HOLDING: is a schema, or a list of some."""
SCHEMA_VALUE_KEYWORDS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
EXTRA_PROPERTY_KEYWORDS = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
COMPOSITION_KEYWORDS = frozenset(("$ref", "anyOf", "oneOf", "if", "dependentSchemas"))


def to_source(kind: StructuredKind, value: Any, name: str = PARAM_NAME) -> str:
    """The source that `value` is for a kind. InputError, for the parameter `name`, if it is of another type."""
    if kind == "json_object":
        if value is not True:
            raise InputError(f"{name}: json_object must be true, got {str(value)[:40]}", name)
        return ""
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


def without_whitespace(spec: Structured) -> Structured:
    """The same JSON without space between its parts. InputError for what isn't JSON."""
    if spec.kind == "json_object":
        spec = replace(spec, kind="json", source='{"type": "object"}')
    return _with_option(spec, "whitespace_flexible", False)


def with_lenient(spec: Structured) -> Structured:
    """The same schema, whose keywords needn't all be enforced: those that can't be are passed over."""
    return _with_option(spec, "lenient", True)


def close_objects(schema: Any) -> Any:
    """The same schema, whose objects have no other members than `properties` names, where it says nothing of others:
    what OpenAI's `strict` has schemas say. One that composes objects of parts is left as it is: closed, each part would
    exclude what the others name."""
    try:
        return schema if _composes_objects(schema) else _close_objects(schema)
    except RecursionError as error:
        raise InputError("json: the schema is nested too deep to be read", PARAM_NAME) from error


def _composes_objects(schema: Any) -> bool:
    if isinstance(schema, dict):
        beside = "properties" in schema and not COMPOSITION_KEYWORDS.isdisjoint(schema)
        return beside or "allOf" in schema or any(map(_composes_objects, schema.values()))
    return isinstance(schema, list) and any(map(_composes_objects, schema))


def _close_objects(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close_objects(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = map_subschemas(schema, _close_objects)
    if "properties" in found and EXTRA_PROPERTY_KEYWORDS.isdisjoint(found):
        found["additionalProperties"] = False
    return found


def map_subschemas(
    schema: dict[str, Any], change: Callable[[Any], Any], keywords: Collection[str] = SCHEMA_VALUE_KEYWORDS
) -> dict[str, Any]:
    """The same schema, with what `change` makes of each value that is a schema or a list of some (`keywords`)."""
    found = {name: change(one) if name in keywords else one for name, one in schema.items()}
    for name in SCHEMA_MAP_KEYWORDS:
        if isinstance(parts := found.get(name), dict):
            found[name] = {key: change(one) for key, one in parts.items()}
    return found


def _with_option(spec: Structured, name: str, value: bool) -> Structured:
    """The same schema, with an option of llguidance's for it."""
    if spec.kind != "json":
        raise InputError(f"{spec.kind} isn't a JSON schema: it has no such option", PARAM_NAME)
    schema = parse_source(spec)
    if not isinstance(schema, dict):
        return spec
    options = schema.get(LLGUIDANCE_OPTIONS_KEY)
    options = {**(options if isinstance(options, dict) else {}), name: value}
    return replace(spec, source=json.dumps({**schema, LLGUIDANCE_OPTIONS_KEY: options}, ensure_ascii=False))


def parse_source(spec: Structured) -> Any:
    """What a source that is JSON says. InputError if it isn't, or has a number that isn't one, as NaN and 1e999."""
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
    for i, each in enumerate(value):
        if not isinstance(each, str) or not each:
            raise InputError(f"{name}: choice[{i}] must be a string of at least one character", name)
    return json.dumps(list(value), ensure_ascii=False)


class GrammarMatcher(Protocol):
    """One sequence's place in a grammar. Not thread-safe: whoever plans and takes in steps drives it."""

    def accept(self, token: int) -> str:
        """Go on behind `token`. "": fine; else why it can't follow, or why the grammar can't go on."""
        ...

    def forced_tokens(self) -> tuple[int, ...]:
        """Tokens that must follow, in order, an end token among them; the mask leaves only the first. They are not
        accepted yet."""
        ...

    def is_unconstrained(self) -> bool:
        """Anything may follow, from here to the end: nobody need ask any more."""
        ...

    def copy(self) -> GrammarMatcher:
        """The same place, to go on from by itself."""
        ...


class Grammar(Protocol):
    """A compiled grammar, for any number of sequences."""

    def new_matcher(self) -> GrammarMatcher:
        """At its beginning."""
        ...

    def compute_masks(self, matchers: Sequence[GrammarMatcher]) -> list[bytes]:
        """What may follow for each, of this or another grammar of the same vocabulary: a bit a token, 32 to a
        little-endian word, lowest bit first."""
        ...


class GrammarCompiler(Protocol):
    """Makes grammars of forms of outputs; for any thread."""

    def get_cached(self, spec: Structured) -> Grammar | None:
        """The grammar, if it costs nothing to get it."""
        ...

    def get(self, spec: Structured) -> Grammar:
        """The grammar. InputError if it can't be had; it may take long to make."""
        ...
