"""Structured output: what a request may say of the form of its output, and what the control plane must know of a
grammar that was made of it. Who makes grammars is the text plane's (quire.text.grammars).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from quire.errors import InputError

Kind = Literal["json", "regex", "grammar", "choice", "json_object", "structural_tag"]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_SOURCE = 1 << 18  # characters
MAX_CHOICES = 4096
MAX_MARKER = 16  # tokens


@dataclass(frozen=True, slots=True)
class Structured:
    """The form of an output. `source` is the JSON text of a schema, a pattern, a Lark grammar, a JSON list of choices,
    "" or the JSON of a structural tag. The grammar begins behind the token ids `after`, a marker such as </think>; with
    none at the first token of the output."""

    kind: Kind
    source: str
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "after", tuple(self.after))
        if self.kind not in KINDS:
            raise InputError(f"structured output is one of {', '.join(KINDS)}, got {str(self.kind)[:40]!r}", NAME)
        if not isinstance(self.source, str):
            raise InputError(f"the source of {self.kind} must be a string, got {type(self.source).__name__}", NAME)
        if len(self.source) > MAX_SOURCE:
            raise InputError(
                f"{self.kind} has {len(self.source)} characters; at most {MAX_SOURCE} are compiled to a grammar", NAME
            )
        if not all(type(token) is int and token >= 0 for token in self.after) or len(self.after) > MAX_MARKER:
            raise InputError(f"after must hold at most {MAX_MARKER} token ids, got {str(self.after)[:60]}", NAME)


NAME = "structured_outputs"
OPTIONS = "x-guidance"  # a member of schemas, in which llguidance looks for options


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
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(f"give exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}", NAME)
        kind: Any = given[0]
        found = Structured(kind, source_of(kind, getattr(self, kind)))
        return compact(found) if self.disable_any_whitespace else found


def source_of(kind: Kind, value: Any, name: str = NAME) -> str:
    """The source that `value` is for a kind. InputError, for the parameter `name`, if it is of another type."""
    if kind == "json_object":
        if value is not True:
            raise InputError(f"{name}: json_object must be true, got {str(value)[:40]}", name)
        return ""
    if kind in ("json", "structural_tag"):
        if isinstance(value, str):
            return value
        if isinstance(value, Mapping) or (isinstance(value, bool) and kind == "json"):
            return _dumped(kind, value, name)
        raise InputError(f"{name}: {kind} must be an object or its JSON, got {type(value).__name__}", name)
    if kind == "choice":
        return _choices(value, name)
    if not isinstance(value, str):
        raise InputError(f"{name}: {kind} must be a string, got {type(value).__name__}", name)
    return value


def compact(asked: Structured) -> Structured:
    """The same JSON without space between its parts. InputError for what isn't JSON."""
    if asked.kind == "json_object":
        asked = Structured("json", '{"type": "object"}', asked.after)
    return _with_option(asked, "whitespace_flexible", False)


def lenient(asked: Structured) -> Structured:
    """The same schema, whose keywords needn't all be enforced: those that can't be are passed over."""
    return _with_option(asked, "lenient", True)


def _with_option(asked: Structured, name: str, value: bool) -> Structured:
    """The same schema, with an option of llguidance's for it."""
    if asked.kind != "json":
        raise InputError(f"{asked.kind} isn't a JSON schema: it has no such option", NAME)
    try:
        schema = json.loads(asked.source)
    except (ValueError, RecursionError) as error:
        raise InputError(f"json is no JSON: {str(error)[:120]}", NAME) from error
    if not isinstance(schema, dict):
        return asked
    options = schema.get(OPTIONS)
    options = {**(options if isinstance(options, dict) else {}), name: value}
    return Structured("json", json.dumps({**schema, OPTIONS: options}, ensure_ascii=False), asked.after)


def _dumped(kind: str, value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: {kind} is no JSON: {str(error)[:120]}", name) from error


def _choices(value: Any, name: str) -> str:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{name}: choice must be a list of strings, got {type(value).__name__}", name)
    if not 0 < len(value) <= MAX_CHOICES:
        raise InputError(f"{name}: choice must have 1 to {MAX_CHOICES} entries, got {len(value)}", name)
    for i, each in enumerate(value):
        if not isinstance(each, str) or not each:
            raise InputError(f"{name}: choice[{i}] must be a string of at least one character", name)
    return json.dumps(list(value), ensure_ascii=False)


class Matcher(Protocol):
    """One sequence's place in a grammar. Not thread-safe: whoever plans and takes in steps drives it."""

    def accept(self, token: int) -> str:
        """Go on behind `token`. "": fine; else why it can't follow, or why the grammar can't go on."""
        ...

    def forced(self) -> tuple[int, ...]:
        """Tokens that must follow, in order, an end token among them; the mask leaves only the first. They are not
        accepted yet."""
        ...

    def copy(self) -> Matcher:
        """The same place, to go on from by itself."""
        ...


class Grammar(Protocol):
    """A compiled grammar, for any number of sequences."""

    def matcher(self) -> Matcher:
        """At its beginning."""
        ...

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes]:
        """What may follow for each, of this or another grammar of the same vocabulary: a bit a token, 32 to a
        little-endian word, lowest bit first."""
        ...
