"""Strings within a JSON text: free ones, in which most tokens leave a grammar where it is, and counted ones.

Within a string of any characters what may follow is the same before and behind a token of such characters, so nobody
need ask llguidance about these, which are most of an output that has text in it. Within one of counted characters it
depends on how many are left (grammar_counted.py). llguidance doesn't say where it is; it is told by what may follow
there, for schemas whose strings are looked through here.
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
OPEN = re.compile(rb"(?<!\\)\\(\\\\)*(u[0-9A-Fa-f]{0,3})?$")  # an escape that isn't whole
LONGEST = 512  # characters that counted strings of a schema may have, each kind once: for each llguidance's lexer makes
# a state, and of these only so many before the next mask is made (strings of 256 take a third of what it is given)
MAX_DEPTH = 64  # of a schema, as far as it is looked into here
FREE = 1 << 30  # characters: any number
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
SHAPES = {"properties": dict, "$defs": dict, "definitions": dict, "anyOf": list, "minLength": int, "maxLength": int,
          "$ref": str}  # fmt: skip
"""Of keywords that are looked into here. llguidance itself looks at none that nothing refers to, or of another type."""
INSIDE = re.compile(
    r"#(/(\$defs|definitions|properties)/[^/%]*|/(items|additionalProperties)(?![^/])|/(prefixItems|anyOf)/[0-9]+)*"
)  # where a $ref may lead: to what is looked through; not into an example, a default or a constant
OWN_OPTIONS = frozenset(("whitespace_flexible", "lenient"))
ESCAPED = b"bfnrtuabcdefABCDEF"  # what an escape may go on with
ALWAYS = "true false null eE"  # what may be spoken though no schema says it


class Tokens:
    """Of a vocabulary: `plain` says of each token whether it is whole characters that stand for themselves; a quote and
    a colon; tokens of letters that go on with no escape, the longest first; and those that end within an escape."""

    def __init__(self, words: Vocabulary, ends: Iterable[int]) -> None:
        self.plain = bytearray(map(_is_plain, words.tokens))
        for id in (*words.special_token_ids, *ends):
            self.plain[id] = False
        self.escaping = frozenset(id for id, token in enumerate(words.tokens) if b"\\" in token and OPEN.search(token))
        self.closing = [words.find(b'"'), words.find(b":")]
        letters = [(id, token.decode()) for id, token in enumerate(words.tokens)
                   if self.plain[id] and token.isalpha() and token[0] not in ESCAPED]  # fmt: skip
        singles = [one for one in letters if len(one[1]) == 1]
        self.letters = [*[one for one in letters if 3 <= len(one[1]) <= 6][:PROBES], *singles]


def _is_plain(token: bytes) -> bool:
    try:
        return PLAIN.fullmatch(token.decode()) is not None
    except UnicodeDecodeError:
        return False


class Strings:
    """Where a grammar is in a string. `probe` is a token, and its letters, that may be spoken nowhere but in free and
    counted strings, `letter` a token of one letter, `closing` a quote and a colon; of counted strings none has more
    than `most` characters, and those in `least` are how many some must have."""

    __slots__ = ("_closing", "_ends", "_probe", "_run", "_whole", "most")

    def __init__(self, probe: tuple[int, str], letter: int, closing: list[int], most: int, least: set[int]) -> None:
        token, text = probe
        self._probe, self._closing, self.most = [token], closing, most
        self._run = [letter] * (most + 1)
        self._whole = None if any(least) else [token, *closing]
        self._ends = [[token, *[letter] * (count - len(text)), *closing] for count in sorted(least)]

    def room(self, inner: LLMatcher) -> int | None:
        """How many characters more there may be in a string here that is a value; FREE: any number. 0: it isn't known
        to be one. None: any number, but it may not end yet. A value's string may end, and no colon follows then."""
        if self._whole is not None:  # any may end anywhere
            if inner.validate_tokens(self._whole) != 2:
                return 0
            return FREE if not self.most or (room := inner.validate_tokens(self._run)) > self.most else room
        if not inner.validate_tokens(self._probe):
            return 0
        closing = inner.validate_tokens(self._closing)
        if closing != 1 and (closing or not any(inner.validate_tokens(end) == len(end) - 1 for end in self._ends)):
            return 0
        room = inner.validate_tokens(self._run)
        return room if room <= self.most else FREE if closing else None


def strings_of(asked: Structured, tokens: Tokens) -> Strings | None:
    """None: nothing is known of the strings of this form. One that was compiled."""
    if asked.kind not in ("json", "json_object") or None in tokens.closing:
        return None
    schema = read_json(asked) if asked.kind == "json" else {"type": "object"}
    counted = {(0, 0)}  # least and most characters
    for at in _schemas(schema, 0, root=True):
        if at is None:
            return None
        counted.add((at.get("minLength", 0), at.get("maxLength", 0)))
    said = ALWAYS + json.dumps(schema, ensure_ascii=False)
    probe = next(((id, text) for id, text in tokens.letters if text not in said), None)
    letter = next((id for id, text in tokens.letters if len(text) == 1), None)
    if probe is None or letter is None or sum(map(max, counted)) > LONGEST:
        return None
    return Strings(probe, letter, tokens.closing, max(most for _, most in counted), {least for least, _ in counted})


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
    if not KNOWN.issuperset(names) or not all(type(at[name]) is SHAPES[name] for name in SHAPES.keys() & at.keys()):
        return False
    if at.get("minLength", 0) < 0 or at.get("maxLength", 0) < 0 or not INSIDE.fullmatch(at.get("$ref", "#")):
        return False
    if not names.isdisjoint(ALONE):
        if len(names - {"type"}) != 1 or ("type" in names and not names.isdisjoint(("anyOf", "$ref"))):
            return False
        return "anyOf" not in names or sum(not _single(one) for one in at["anyOf"]) <= 1
    return True


def _single(at: Any) -> bool:
    """A schema of one type that has no strings."""
    return isinstance(at, dict) and isinstance(kind := at.get("type"), str) and kind in SINGLE
