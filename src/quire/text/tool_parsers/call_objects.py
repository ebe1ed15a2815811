"""Incremental parser of a call that is written as a JSON object: {"name": ..., "arguments": {...}}, in any order and
with other members.
"""

from __future__ import annotations

import json
from typing import Literal

from quire.text.tool_parsers.base import ToolCallParser

MAX_NAME = 256  # characters of a tool's name, escapes counted
CHARS_OUTSIDE_STRINGS = frozenset('{}[],:"+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')
ARGUMENT_KEYS = ("arguments", "parameters")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
ESCAPE_CHARS = frozenset((*ESCAPES, "u"))
ConsumeResult = Literal["more", "done", "bad", "before"]


class JsonValueReader:
    """Finds the end of a JSON value by its brackets and quotes. `consume` returns "more", "done" at the last character,
    "before" if the value ended before this character, or "bad" for a character that JSON does not allow there. The
    contents are not validated."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._after_backslash = self._has_begun = False

    def escape_char(self, char: str) -> str:
        """Return the next character as valid JSON: models write raw line breaks into strings, and backslashes before
        characters that need none."""
        if not self._in_string or (self._after_backslash and char in ESCAPE_CHARS):
            return char
        return ("\\" if self._after_backslash else "") + (json.dumps(char)[1:-1] if char < " " else char)

    def consume(self, char: str) -> ConsumeResult:
        """Consume the next character."""
        if self._in_string:
            if self._after_backslash:
                self._after_backslash = False
            elif char == "\\":
                self._after_backslash = True
            elif char == '"':
                self._in_string = False
                return "more" if self._depth else "done"
            return "more"
        if not self._depth and self._has_begun and (char in ",]}" or char.isspace()):
            return "before"  # numbers and words have no closing character
        if char not in CHARS_OUTSIDE_STRINGS:
            return "bad"
        self._has_begun = True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return "done" if self._depth == 0 else "bad" if self._depth < 0 else "more"
        return "more"


class JsonStringDecoder:
    """Decodes a JSON string incrementally: some models write the arguments as a string that holds JSON."""

    def __init__(self) -> None:
        self._escape = ""
        self._high_surrogate = ""  # the first half of a surrogate pair

    def consume(self, char: str) -> tuple[str, bool]:
        """Return the text that a character after the opening quote adds, and True if it is the closing quote."""
        if self._escape:
            return self._consume_escape(char), False
        if char == "\\":
            self._escape = char
            return "", False
        before, self._high_surrogate = "\ufffd" if self._high_surrogate else "", ""
        return (before, True) if char == '"' else (before + char, False)

    def _consume_escape(self, char: str) -> str:
        self._escape += char
        if self._escape[1] != "u":
            self._escape = ""
            before, self._high_surrogate = "\ufffd" if self._high_surrogate else "", ""
            return before + ESCAPES.get(char, "\\" + char)
        if len(self._escape) < 6:
            return ""
        digits, self._escape = self._escape[2:], ""
        try:
            code = int(digits, 16)
        except ValueError:
            return "\ufffd"
        return self._decode_unit(code)

    def _decode_unit(self, code: int) -> str:
        high, self._high_surrogate = self._high_surrogate, ""
        if 0xD800 <= code < 0xDC00:
            self._high_surrogate = chr(code)
            return "\ufffd" if high else ""
        if 0xDC00 <= code < 0xE000:
            return chr(0x10000 + ((ord(high) - 0xD800) << 10) + code - 0xDC00) if high else "\ufffd"
        return ("\ufffd" if high else "") + chr(code)


class CallObjectParser:
    """Parses one object, from after its opening brace. The call begins once its name is known; arguments before it are
    buffered. Missing or null arguments become {}."""

    def __init__(self, sink: ToolCallParser) -> None:
        self._sink = sink
        self.has_name = False
        self._has_arguments = False  # a member with arguments was read
        self._early_arguments: list[str] = []
        self._word = ""  # of a key, or of a value that is a name
        self._key = ""
        self._value = JsonValueReader()
        self._text: JsonStringDecoder | None = None
        self._function: CallObjectParser | None = None
        self._scalar: list[str] | None = None  # arguments that are neither object nor list, such as null
        self._state = self._at_key

    def consume(self, char: str) -> ConsumeResult:
        """Consume the next character. Return "done" at the closing brace, "bad" if the text is not a call."""
        return self._state(char)

    def _at_key(self, char: str) -> ConsumeResult:
        if char.isspace() or char == ",":
            return "more"
        if char == "}":
            return self._close()
        self._word = ""
        self._state = self._in_key
        return "more" if char == '"' else "bad"

    def _in_key(self, char: str) -> ConsumeResult:
        if char == '"':
            self._key, self._state = self._word, self._at_colon
        else:
            self._word += char
        return "more" if len(self._word) <= MAX_NAME else "bad"

    def _at_colon(self, char: str) -> ConsumeResult:
        if char == ":":
            self._state = self._at_value
            return "more"
        return "more" if char.isspace() else "bad"

    def _at_value(self, char: str) -> ConsumeResult:
        if char.isspace():
            return "more"
        if self._key == "name" and not self.has_name:
            self._word, self._state = "", self._in_name
            return "more" if char == '"' else "bad"
        self._value = JsonValueReader()
        if self._key == "function" and char == "{" and not self.has_name:
            self._function, self._state = CallObjectParser(self._sink), self._in_function
            return "more"
        if self._key not in ARGUMENT_KEYS or self._has_arguments:
            self._state = self._in_other
            return self._in_other(char)
        self._has_arguments = True
        if char == '"':
            self._text, self._state = JsonStringDecoder(), self._in_text
            return "more"
        self._scalar = None if char in "{[" else []
        self._state = self._in_arguments
        return self._in_arguments(char)

    def _in_function(self, char: str) -> ConsumeResult:
        """Parse a call in OpenAI's form: {"type": "function", "function": {"name": ..., "arguments": ...}}."""
        assert self._function is not None, "_in_function without a nested parser"
        status = self._function.consume(char)
        self.has_name = self._function.has_name
        if status == "done":
            self._has_arguments, self._state = True, self._after_value
            return "more"
        return status

    def _in_name(self, char: str) -> ConsumeResult:
        if char != '"' or (len(self._word) - len(self._word.rstrip("\\"))) % 2:
            self._word += char
            return "more" if len(self._word) <= MAX_NAME else "bad"
        try:
            name = json.loads(f'"{self._word}"')
        except ValueError:
            return "bad"
        if not name or not self._sink.is_tool(name):
            return "bad"
        self.has_name = True
        self._sink.begin_call(name)
        if self._early_arguments:
            self._sink.add_arguments("".join(self._early_arguments))
        self._state = self._after_value
        return "more"

    def _in_other(self, char: str) -> ConsumeResult:
        status = self._value.consume(char)
        if status == "bad":
            return "bad"
        if status != "more":
            self._state = self._after_value
        return self._after_value(char) if status == "before" else "more"

    def _in_text(self, char: str) -> ConsumeResult:
        assert self._text is not None, "_in_text without a string decoder"
        text, last = self._text.consume(char)
        for one in text:  # of a value inside the string
            self._add_arguments(self._value.escape_char(one))
            self._value.consume(one)
        if last:
            self._state = self._after_value
        return "more"

    def _in_arguments(self, char: str) -> ConsumeResult:
        written = self._value.escape_char(char)
        status = self._value.consume(char)
        if status == "bad":
            return "bad"
        if status in ("more", "done"):
            if self._scalar is None:
                self._add_arguments(written)
            else:
                self._scalar.append(char)
        if status != "more":
            self._state = self._after_value
            word = "".join(self._scalar or ())
            if word:
                self._add_arguments("{}" if word == "null" else word)
        return self._after_value(char) if status == "before" else "more"

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        if self.has_name:
            self._sink.add_arguments(text)
        else:
            self._early_arguments.append(text)

    def _after_value(self, char: str) -> ConsumeResult:
        if char == ",":
            self._state = self._at_key
            return "more"
        if char == "}":
            return self._close()
        return "more" if char.isspace() else "bad"

    def _close(self) -> ConsumeResult:
        if not self.has_name:
            return "bad"
        if not self._has_arguments:
            self._sink.add_arguments("{}")
        return "done"
