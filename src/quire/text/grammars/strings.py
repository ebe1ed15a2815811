"""Strings within JSON output: free ones, in which most tokens leave the grammar's state unchanged, and counted ones.

Within a free string the mask is the same before and after a token of plain characters, so llguidance is not asked about
these; they are most of an output with text. Within a counted string it depends on the number of characters left
(counted_strings.py). llguidance does not report its state. It is inferred from which tokens it allows, for schemas
whose strings are analysed here.
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

PLAIN_CHARS = re.compile(r'[^"\\\x00-\x1F\x7F]+')  # characters that need no escape in a JSON string
OPEN_ESCAPE = re.compile(rb"(?<!\\)\\(\\\\)*(u[0-9A-Fa-f]{0,3})?$")  # an incomplete escape
# Characters of all counted strings of a schema, equal ones once. llguidance's lexer makes a state for each, and its
# limit applies between two masks; strings of 256 characters take a third of it.
MAX_COUNTED_CHARS = 512
MAX_DEPTH = 64  # of a schema, as far as it is examined here
UNBOUNDED = 1 << 30  # any number of characters
MAX_PROBES = 64  # tokens of several letters
TYPES_WITHOUT_STRINGS = frozenset(("null", "boolean", "integer", "number"))
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
))  # fmt: skip
KNOWN_KEYWORDS = ANNOTATIONS | frozenset((
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "enum", "const", "anyOf",
    "$ref", "$defs", "definitions",
))  # fmt: skip
"""Keywords that are analysed here; a schema with others is not."""
EXCLUSIVE_KEYWORDS = ("anyOf", "$ref", "enum", "const")
"""Keywords that must be the only constraint of a value; beside enum and const there may be a type."""
KEYWORD_TYPES = {
    "properties": dict, "$defs": dict, "definitions": dict, "anyOf": list, "minLength": int, "maxLength": int,
    "$ref": str,
}  # fmt: skip
"""The types of examined keywords. llguidance ignores keywords of other types, and definitions without a reference."""
# The targets of $ref that are examined: not examples, defaults or constants.
LOCAL_REF = re.compile(
    r"#(/(\$defs|definitions|properties)/[^/%]*|/(items|additionalProperties)(?![^/])|/(prefixItems|anyOf)/[0-9]+)*"
)
OWN_OPTIONS = frozenset(("whitespace_flexible", "lenient"))
ESCAPE_LETTERS = b"bfnrtuabcdefABCDEF"  # letters that may continue an escape
ALWAYS_ALLOWED = "true false null eE"  # letters that outputs may have though no schema contains them


class StringTokens:
    """Classes of a vocabulary's tokens. `is_plain` has for each token whether it consists of whole characters that need
    no escape. `closing_ids` are a quote and a colon, or None if strings cannot be detected. `letter_tokens` are tokens
    of letters that continue no escape, the longest first. `open_escape_ids` are tokens that end within an escape."""

    def __init__(self, vocabulary: GrammarVocabulary, eos_ids: Iterable[int]) -> None:
        self.is_plain = bytearray(map(_is_plain, vocabulary.tokens))
        for id in (*vocabulary.special_token_ids, *eos_ids):
            self.is_plain[id] = False
        self.open_escape_ids = frozenset(
            id for id, token in enumerate(vocabulary.tokens) if b"\\" in token and OPEN_ESCAPE.search(token)
        )
        quote, colon = vocabulary.token_id(b'"'), vocabulary.token_id(b":")
        self.closing_ids = None if quote is None or colon is None else [quote, colon]
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
    """Infers whether a matcher is within a string. `probe` is a token and its letters that the grammar allows only in
    free and counted strings, `letter` a token of one letter, `closing` a quote and a colon. `max_chars` is the greatest
    limit of the counted strings; `min_chars` are the minimum lengths."""

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
        """Return how many more characters are allowed in the string value at this position, or UNBOUNDED. 0: not known
        to be in one. None: UNBOUNDED, but the string may not end yet. A string is known to be a value, not a key, if it
        may end and no colon may follow."""
        if self._whole_string is not None:  # all strings may end anywhere
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
    """Return the detector for a compiled form, or None if its strings cannot be analysed."""
    if structured.kind not in ("json", "json_object") or tokens.closing_ids is None:
        return None
    schema = parse_source(structured) if structured.kind == "json" else {"type": "object"}
    counted = {(0, 0)}  # minimum and maximum lengths
    for at in _schemas(schema, 0, root=True):
        if at is None:
            return None
        counted.add((at.get("minLength", 0), at.get("maxLength", 0)))
    allowed = ALWAYS_ALLOWED + json.dumps(schema, ensure_ascii=False)
    probe = next(((id, text) for id, text in tokens.letter_tokens if text not in allowed), None)
    letter = next((id for id, text in tokens.letter_tokens if len(text) == 1), None)
    if probe is None or letter is None or sum(map(max, counted)) > MAX_COUNTED_CHARS:
        return None
    return StringDetector(
        probe, letter, tokens.closing_ids, max(most for _, most in counted), {least for least, _ in counted}
    )


def _schemas(at: Any, depth: int, root: bool = False) -> Iterator[dict[str, Any] | None]:
    """Yield a schema and all schemas within it. None is yielded for one that is not analysed: its strings must be free,
    counted or constant, and only one of these at each position."""
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
    """Return True for a schema of one type without strings."""
    return isinstance(at, dict) and isinstance(kind := at.get("type"), str) and kind in TYPES_WITHOUT_STRINGS
