"""Incremental conversion of Python literals to JSON. Nothing is evaluated."""

from __future__ import annotations

import json
import re

from quire.text.tool_parsers.call_objects import ConsumeResult

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MAX_WORD = 64  # characters of a number
MAX_DEPTH = 64
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": "",
           "'": "'", '"': '"', "\\": "\\"}  # fmt: skip
DIGITS = {"x": 2, "u": 4, "U": 8}
CLOSERS = {"[": "]", "{": "}"}


class PythonLiteralReader:
    """Reads one value: strings, numbers, True, False, None, lists and dicts with string keys. `consume` returns the
    same results as JsonValueReader.consume; `json_pieces` collects the JSON text."""

    def __init__(self) -> None:
        self.json_pieces: list[str] = []
        self._stack: list[str] = []  # closing brackets of the open lists and dicts
        self._quote = ""
        self._escape = ""
        self._word = ""
        self._expect = "value"  # or "key", "colon", "next"
        self._comma = False  # a comma is due before the next element

    def consume(self, char: str) -> ConsumeResult:
        """Consume the next character. "before": the value ended before it."""
        if self._quote:
            return self._in_string(char)
        if self._word:
            return self._in_word(char)
        return self._outside_value(char)

    def _outside_value(self, char: str) -> ConsumeResult:
        if char.isspace():
            return "more"
        if self._expect == "colon":
            self._expect = "value"
            self.json_pieces.append(": ")
            return "more" if char == ":" else "bad"
        if self._stack and char == self._stack[-1] and (self._expect == "next" or not self._is_value_due()):
            self._stack.pop()
            self._expect, self._comma = "value", False
            self.json_pieces.append(char)
            return self._end_value("done")
        if self._expect == "next":
            self._expect, self._comma = ("key" if self._stack[-1] == "}" else "value"), True
            return "more" if char == "," else "bad"
        return self._begin(char)

    def _is_value_due(self) -> bool:
        """Return True if a value must follow, as after a key. None has to after a comma, which may be trailing."""
        return self._expect == "value" and self._stack[-1] == "}"

    def _begin(self, char: str) -> ConsumeResult:
        key = self._expect == "key"
        if self._comma:
            self.json_pieces.append(", ")
            self._comma = False
        if char in "'\"":
            self._quote = char
            self.json_pieces.append('"')
            return "more"
        if key:
            return "bad"
        if char in CLOSERS and len(self._stack) < MAX_DEPTH:
            self._stack.append(CLOSERS[char])
            self._expect = "key" if char == "{" else "value"
            self.json_pieces.append(char)
            return "more"
        self._word = char
        return "more" if char.isalnum() or char == "-" else "bad"

    def _end_value(self, outcome: ConsumeResult) -> ConsumeResult:
        """End a value, and with it the literal if it is the outermost."""
        if not self._stack:
            return outcome
        self._expect = "colon" if self._expect == "key" else "next"
        return "more"

    def _in_string(self, char: str) -> ConsumeResult:
        if self._escape:
            return self._consume_escape(char)
        if char == "\\":
            self._escape = char
        elif char == self._quote:
            self._quote = ""
            self.json_pieces.append('"')
            return self._end_value("done")
        else:
            self._write(char)
        return "more"

    def _consume_escape(self, char: str) -> ConsumeResult:
        self._escape += char
        kind = self._escape[1]
        if kind in DIGITS and len(self._escape) < 2 + DIGITS[kind]:
            return "more"
        escape, self._escape = self._escape, ""
        if kind not in DIGITS:
            self._write(ESCAPES.get(char, "\\" + char))
            return "more"
        try:
            self._write(chr(int(escape[2:], 16)))
        except (ValueError, OverflowError):
            return "bad"
        return "more"

    def _write(self, text: str) -> None:
        lone = any("\ud800" <= char <= "\udfff" for char in text)
        self.json_pieces.append(json.dumps(text, ensure_ascii=lone)[1:-1])

    def _in_word(self, char: str) -> ConsumeResult:
        if char.isalnum() or char in "+-._":
            self._word += char
            return "more" if len(self._word) <= MAX_WORD else "bad"
        word, self._word = self._word, ""
        if word not in WORDS and not NUMBER.fullmatch(word):
            return "bad"
        self.json_pieces.append(WORDS.get(word, word))
        outcome = self._end_value("before")
        return outcome if outcome == "before" else self._outside_value(char)
