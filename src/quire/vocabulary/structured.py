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


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output by vLLM's names: exactly one of these. `json` is a schema, as an object or as its text;
    `grammar` is in Lark's notation; `structural_tag` an object or its text."""

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def structured(self) -> Structured:
        """What the engine is asked for. InputError unless exactly one form is given, and of its type."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(f"give exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}", NAME)
        kind: Any = given[0]
        return Structured(kind, source_of(kind, getattr(self, kind)))


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

    def accept(self, tokens: Sequence[int]) -> str:
        """Go on behind `tokens`. "": fine; else why they can't follow, or why the grammar grew too complex."""
        ...

    def forced(self) -> tuple[int, ...]:
        """Tokens that follow whatever is drawn. They are not accepted yet."""
        ...

    @property
    def ended(self) -> bool:
        """The grammar is complete, and nothing may follow."""
        ...

    @property
    def free(self) -> bool:
        """Everything may follow: the grammar has not begun."""
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
