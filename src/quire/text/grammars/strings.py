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

from quire.protocol.structured_output import LLGUIDANCE_OPTIONS_KEY, SCHEMA_MAP_KEYWORDS, Structured, parse_source

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.grammars.vocabulary import GrammarVocabulary

PLAIN_CHARS = re.compile(r'[^"\\\x00-\x1F\x7F]+')  # characters that stand for themselves in a JSON string
OPEN_ESCAPE = re.compile(rb"(?<!\\)\\(\\\\)*(u[0-9A-Fa-f]{0,3})?$")  # an escape that isn't whole
# characters that counted strings of a schema may have, each kind once: for each llguidance's lexer makes
MAX_COUNTED_CHARS = 512
# a state, and of these only so many before the next mask is made (strings of 256 take a third of what it is given)
MAX_DEPTH = 64  # of a schema, as far as it is looked into here
UNBOUNDED = 1 << 30  # characters: any number
MAX_PROBES = 64  # tokens of some letters that are kept
TYPES_WITHOUT_STRINGS = frozenset(("null", "boolean", "integer", "number"))  # types without strings
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
"$comment",
                     "$schema"))  # fmt: skip
KNOWN_KEYWORDS = ANNOTATIONS | frozenset((
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "enum", "const", "anyOf",
    "$ref", "$defs", "definitions",
))  # fmt: skip
"""Keywords that are understood here; of a schema with others nothing is known."""
EXCLUSIVE_KEYWORDS = ("anyOf", "$ref", "enum", "const")
"""Keywords beside which no other may say what the same value is; enum and const may have a type."""
KEYWORD_TYPES = {"properties": dict, "$defs": dict, "definitions": dict, "anyOf": list, "minLength": int,
"maxLength": int,
          "$ref": str}  # fmt: skip
"""Of keywords that are looked into here. llguidance itself looks at none that nothing refers to, or of another type."""
LOCAL_REF = re.compile(
    r"#(/(\$defs|definitions|properties)/[^/%]*|/(items|additionalProperties)(?![^/])|/(prefixItems|anyOf)/[0-9]+)*"
)  # where a $ref may lead: to what is looked through; not into an example, a default or a constant
OWN_OPTIONS = frozenset(("whitespace_flexible", "lenient"))
ESCAPE_LETTERS = b"bfnrtuabcdefABCDEF"  # what an escape may go on with
ALWAYS_ALLOWED = "true false null eE"  # what may be spoken though no schema says it


class StringTokens:
    """Of a vocabulary: `is_plain` says of each token whether it is whole characters that stand for themselves; a quote
    and a colon; tokens of letters that go on with no escape, the longest first; and those that end within an escape."""

    def __init__(self, vocabulary: GrammarVocabulary, eos_ids: Iterable[int]) -> None:
        self.is_plain = bytearray(map(_is_plain, vocabulary.tokens))
        for id in (*vocabulary.special_token_ids, *eos_ids):
            self.is_plain[id] = False
        self.open_escape_ids = frozenset(
            id for id, token in enumerate(vocabulary.tokens) if b"\\" in token and OPEN_ESCAPE.search(token)
        )
        self.closing_ids = [vocabulary.token_id(b'"'), vocabulary.token_id(b":")]
        letters = [(id, token.decode()) for id, token in enumerate(vocabulary.tokens)
                   if self.is_plain[id] and token.isalpha() and token[0] not in ESCAPE_LETTERS]  # fmt: skip
        singles = [one for one in letters if len(one[1]) == 1]
        self.letter_tokens = [*[one for one in letters if 3 <= len(one[1]) <= 6][:MAX_PROBES], *singles]


def _is_plain(token: bytes) -> bool:
    try:
        return PLAIN_CHARS.fullmatch(token.decode()) is not None
    except UnicodeDecodeError:
        return False


class StringDetector:
    """Where a grammar is in a string. `probe` is a token, and its letters, that may be spoken nowhere but in free and
    counted strings, `letter` a token of one letter, `closing` a quote and a colon; of counted strings none has more
    than `max_chars` characters, and those in `min_chars` are how many some must have."""

    __slots__ = ("_closing", "_ends", "_probe", "_run", "_whole_string", "max_chars")

    def __init__(
        self, probe: tuple[int, str], letter: int, closing: list[int], max_chars: int, min_chars: set[int]
    ) -> None:
        token, text = probe
        self._probe, self._closing, self.max_chars = [token], closing, max_chars
        self._run = [letter] * (max_chars + 1)
        self._whole_string = None if any(min_chars) else [token, *closing]
        self._ends = [[token, *[letter] * (count - len(text)), *closing] for count in sorted(min_chars)]

    def chars_left(self, matcher: LLMatcher) -> int | None:
        """How many characters more there may be in a string here that is a value; FREE: any number. 0: it isn't known
        to be one. None: any number, but it may not end yet. A value's string may end, and no colon follows then."""
        if self._whole_string is not None:  # any may end anywhere
            if matcher.validate_tokens(self._whole_string) != 2:
                return 0
            return (
                UNBOUNDED
                if not self.max_chars or (room := matcher.validate_tokens(self._run)) > self.max_chars
                else room
            )
        if not matcher.validate_tokens(self._probe):
            return 0
        closing = matcher.validate_tokens(self._closing)
        if closing != 1 and (closing or not any(matcher.validate_tokens(end) == len(end) - 1 for end in self._ends)):
            return 0
        room = matcher.validate_tokens(self._run)
        return room if room <= self.max_chars else UNBOUNDED if closing else None


def make_string_detector(structured: Structured, tokens: StringTokens) -> StringDetector | None:
    """None: nothing is known of the strings of this form. One that was compiled."""
    if structured.kind not in ("json", "json_object") or None in tokens.closing_ids:
        return None
    schema = parse_source(structured) if structured.kind == "json" else {"type": "object"}
    counted = {(0, 0)}  # least and most characters
    for at in _schemas(schema, 0, root=True):
        if at is None:
            return None
        counted.add((at.get("minLength", 0), at.get("maxLength", 0)))
    said = ALWAYS_ALLOWED + json.dumps(schema, ensure_ascii=False)
    probe = next(((id, text) for id, text in tokens.letter_tokens if text not in said), None)
    letter = next((id for id, text in tokens.letter_tokens if len(text) == 1), None)
    if probe is None or letter is None or sum(map(max, counted)) > MAX_COUNTED_CHARS:
        return None
    return StringDetector(
        probe, letter, tokens.closing_ids, max(most for _, most in counted), {least for least, _ in counted}
    )


def _schemas(at: Any, depth: int, root: bool = False) -> Iterator[dict[str, Any] | None]:
    """A schema and all within it. None: one of which it isn't known that its strings are free, counted or given, and
    one of these alone at each place."""
    if isinstance(at, bool):
        return
    if not isinstance(at, dict) or depth > MAX_DEPTH or not _is_understood(at, root):
        yield None
        return
    yield at
    for name, value in at.items():
        if name in SCHEMA_MAP_KEYWORDS:
            parts = list(value.values())
        elif name in ("items", "prefixItems", "anyOf", "additionalProperties"):
            parts = value if isinstance(value, list) else [value]
        else:
            continue
        for part in parts:
            yield from _schemas(part, depth + 1)


def _is_understood(at: dict[str, Any], root: bool) -> bool:
    options = at.get(LLGUIDANCE_OPTIONS_KEY, {}) if root else {}
    if not (isinstance(options, dict) and OWN_OPTIONS.issuperset(options)):
        return False
    names = at.keys() - ANNOTATIONS - {"$defs", "definitions"} - ({LLGUIDANCE_OPTIONS_KEY} if root else set())
    if not KNOWN_KEYWORDS.issuperset(names) or not all(
        type(at[name]) is KEYWORD_TYPES[name] for name in KEYWORD_TYPES.keys() & at.keys()
    ):
        return False
    if at.get("minLength", 0) < 0 or at.get("maxLength", 0) < 0 or not LOCAL_REF.fullmatch(at.get("$ref", "#")):
        return False
    if not names.isdisjoint(EXCLUSIVE_KEYWORDS):
        if len(names - {"type"}) != 1 or ("type" in names and not names.isdisjoint(("anyOf", "$ref"))):
            return False
        return "anyOf" not in names or sum(not _has_no_strings(one) for one in at["anyOf"]) <= 1
    return True


def _has_no_strings(at: Any) -> bool:
    """A schema of one type that has no strings."""
    return isinstance(at, dict) and isinstance(kind := at.get("type"), str) and kind in TYPES_WITHOUT_STRINGS
