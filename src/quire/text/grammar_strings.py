"""Free strings: places in a JSON text where most tokens leave a grammar where it is.

Within a string of any characters what may follow is the same before and behind a token of such characters, so nobody
need ask llguidance about these, which are most of an output that has text in it. llguidance doesn't say where it is; it
is told by what may follow there, for schemas whose strings are looked through here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quire.vocabulary.structured import NAMING, OPTIONS, Structured, read_json

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.grammar_tokens import Vocabulary

PLAIN = re.compile(r'[^"\\\x00-\x1F\x7F]+')  # characters that stand for themselves in a JSON string
LONGEST = 256  # characters that a counted string may have beside free ones
MAX_DEPTH = 64  # of a schema, as far as it is looked into here
PROBES = 64  # tokens of some letters that are kept
SINGLE = frozenset(("null", "boolean", "integer", "number"))  # types without strings
REMARKS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
                     "$schema"))  # fmt: skip
KNOWN = REMARKS | frozenset((
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "enum", "const", "anyOf",
    "$ref", "$defs", "definitions",
))  # fmt: skip
"""Keywords that are understood here; of a schema with others nothing is known."""
ALONE = ("anyOf", "$ref", "enum", "const")
"""Keywords beside which no other may say what the same value is; enum and const may have a type."""
OWN_OPTIONS = frozenset(("whitespace_flexible", "lenient"))
ALWAYS = "true false null eE"  # what may be spoken though no schema says it


class Tokens:
    """Of a vocabulary: `plain` says of each token whether it is whole characters that stand for themselves; a quote and
    a colon; and tokens of letters, the longest first."""

    def __init__(self, words: Vocabulary, ends: Iterable[int]) -> None:
        self.plain = bytearray(map(_is_plain, words.tokens))
        for id in (*words.special_token_ids, *ends):
            self.plain[id] = False
        self.closing = [words.find(b'"'), words.find(b":")]
        letters = [(id, token.decode()) for id, token in enumerate(words.tokens) if self.plain[id] and token.isalpha()]
        singles = [one for one in letters if len(one[1]) == 1]
        self.letters = [*[one for one in letters if 3 <= len(one[1]) <= 6][:PROBES], *singles]


def _is_plain(token: bytes) -> bool:
    try:
        return PLAIN.fullmatch(token.decode()) is not None
    except UnicodeDecodeError:
        return False


class Strings:
    """Where a grammar is in a free string. `byte` and `bit` are those of a token in a mask that may be spoken nowhere
    but in free and counted strings."""

    __slots__ = ("bit", "byte", "closing", "run")

    def __init__(self, probe: int, closing: list[int], run: int) -> None:
        self.byte, self.bit, self.closing = probe // 8, 1 << probe % 8, closing
        self.run = [probe] * run  # longer than a counted string

    def around(self, inner: LLMatcher, mask: bytes) -> bool | None:
        """Whether the place that `mask` is of is within a free string, and of a value: it may end here, and no colon
        follows then. None: it may not end yet."""
        if not mask[self.byte] & self.bit:
            return False
        closing = inner.validate_tokens(self.closing)
        if closing != 1:
            return False if closing else None
        return inner.validate_tokens(self.run) == len(self.run)


def strings_of(asked: Structured, tokens: Tokens) -> Strings | None:
    """None: nothing is known of the strings of this form. One that was compiled."""
    if asked.kind not in ("json", "json_object") or None in tokens.closing:
        return None
    schema = read_json(asked) if asked.kind == "json" else {"type": "object"}
    lengths = [0]
    for at in _schemas(schema, 0, root=True):
        if at is None:
            return None
        lengths.append(at.get("maxLength", 0))
    said = ALWAYS + json.dumps(schema, ensure_ascii=False)
    probe = next(((id, text) for id, text in tokens.letters if text not in said), None)
    if probe is None or max(lengths) > LONGEST:
        return None
    return Strings(probe[0], tokens.closing, int(max(lengths)) // len(probe[1]) + 1)


def _schemas(at: Any, depth: int, root: bool = False) -> Iterator[dict[str, Any] | None]:
    """A schema and all within it. None: one of which it isn't known that its strings are free, counted or given, and
    one of these alone at each place."""
    if isinstance(at, bool):
        return
    if not isinstance(at, dict) or depth > MAX_DEPTH or not _understood(at, root):
        yield None
        return
    yield at
    for name, value in at.items():
        if name in NAMING:
            parts = list(value.values())
        elif name in ("items", "prefixItems", "anyOf", "additionalProperties"):
            parts = value if isinstance(value, list) else [value]
        else:
            continue
        for part in parts:
            yield from _schemas(part, depth + 1)


def _understood(at: dict[str, Any], root: bool) -> bool:
    options = at.get(OPTIONS, {}) if root else {}
    if not (isinstance(options, dict) and OWN_OPTIONS.issuperset(options)):
        return False
    names = at.keys() - REMARKS - {"$defs", "definitions"} - ({OPTIONS} if root else set())
    if not KNOWN.issuperset(names):
        return False
    if not names.isdisjoint(ALONE):
        if len(names - {"type"}) != 1 or ("type" in names and not names.isdisjoint(("anyOf", "$ref"))):
            return False
        return "anyOf" not in names or sum(not _single(one) for one in at["anyOf"]) <= 1
    return True


def _single(at: Any) -> bool:
    """A schema of one type that has no strings."""
    return isinstance(at, dict) and isinstance(kind := at.get("type"), str) and kind in SINGLE
