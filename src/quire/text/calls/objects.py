"""A call written as a JSON object: {"name": ..., "arguments": {...}}, in any order, with other members beside."""

from __future__ import annotations

import json
from typing import Literal, Protocol

MAX_NAME = 256  # characters of a tool's name, escapes counted
OUTSIDE = frozenset('{}[],:"+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')
ARGUMENTS = ("arguments", "parameters")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
ESCAPED = frozenset((*ESCAPES, "u"))
Outcome = Literal["more", "done", "bad", "before"]


class Sink(Protocol):
    """Who reads calls."""

    def knows(self, name: str) -> bool:
        """Whether a name is one to call."""
        ...

    def begin_call(self, name: str) -> None:
        """A call begins."""
        ...

    def argue(self, text: str) -> None:
        """More of its arguments."""
        ...


class Value:
    """Any JSON value, by its brackets and quotes: `take` says "more", "done" at its last character, "before" when it
    ended before this one, or "bad" for what no JSON has there. Whether it is JSON within, nobody asks."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._begun = False

    def written(self, char: str) -> str:
        """The next character as JSON has it, where a model writes a line break into a string as it is, or a backslash
        before what needs none."""
        if not self._in_string or (self._escaped and char in ESCAPED):
            return char
        return ("\\" if self._escaped else "") + (json.dumps(char)[1:-1] if char < " " else char)

    def take(self, char: str) -> Outcome:
        """The next character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return "more" if self._depth else "done"
            return "more"
        if not self._depth and self._begun and (char in ",]}" or char.isspace()):
            return "before"  # a number or a word has no end of its own
        if char not in OUTSIDE:
            return "bad"
        self._begun = True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return "done" if self._depth == 0 else "bad" if self._depth < 0 else "more"
        return "more"


class Unquoted:
    """A JSON string, decoded as it comes: some models write arguments as the text of their JSON."""

    def __init__(self) -> None:
        self._escape = ""
        self._high = ""  # the first half of a surrogate pair

    def take(self, char: str) -> tuple[str, bool]:
        """The text that a character after the opening quote adds, and whether it is the closing quote."""
        if self._escape:
            return self._escaped(char), False
        if char == "\\":
            self._escape = char
            return "", False
        before, self._high = "\ufffd" if self._high else "", ""
        return (before, True) if char == '"' else (before + char, False)

    def _escaped(self, char: str) -> str:
        self._escape += char
        if self._escape[1] != "u":
            self._escape = ""
            before, self._high = "\ufffd" if self._high else "", ""
            return before + ESCAPES.get(char, "\\" + char)
        if len(self._escape) < 6:
            return ""
        digits, self._escape = self._escape[2:], ""
        try:
            code = int(digits, 16)
        except ValueError:
            return "\ufffd"
        return self._joined(code)

    def _joined(self, code: int) -> str:
        high, self._high = self._high, ""
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return "\ufffd" if high else ""
        if 0xDC00 <= code < 0xE000:
            return chr(0x10000 + ((ord(high) - 0xD800) << 10) + code - 0xDC00) if high else "\ufffd"
        return ("\ufffd" if high else "") + chr(code)


class CallObject:
    """Reads one object, after its opening brace. The call begins once its name is known; arguments that come before
    are kept until then. Without arguments, or with null, they are {}."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.named = False
        self._argued = False  # a member with arguments was read
        self._early: list[str] = []
        self._word = ""  # of a key, or of a value that is a name
        self._key = ""
        self._value = Value()
        self._text: Unquoted | None = None
        self._function: CallObject | None = None
        self._scalar: list[str] | None = None  # arguments that are no object: null, if nothing else
        self._state = self._at_key

    def take(self, char: str) -> Outcome:
        """The next character: "done" at the closing brace, "bad" if this is no call (any more)."""
        return self._state(char)

    def _at_key(self, char: str) -> Outcome:
        if char.isspace() or char == ",":
            return "more"
        if char == "}":
            return self._closed()
        self._word = ""
        self._state = self._in_key
        return "more" if char == '"' else "bad"

    def _in_key(self, char: str) -> Outcome:
        if char == '"':
            self._key, self._state = self._word, self._at_colon
        else:
            self._word += char
        return "more" if len(self._word) <= MAX_NAME else "bad"

    def _at_colon(self, char: str) -> Outcome:
        if char == ":":
            self._state = self._at_value
            return "more"
        return "more" if char.isspace() else "bad"

    def _at_value(self, char: str) -> Outcome:
        if char.isspace():
            return "more"
        if self._key == "name" and not self.named:
            self._word, self._state = "", self._in_name
            return "more" if char == '"' else "bad"
        self._value = Value()
        if self._key == "function" and char == "{" and not self.named:
            self._function, self._state = CallObject(self._sink), self._in_function
            return "more"
        if self._key not in ARGUMENTS or self._argued:
            self._state = self._in_other
            return self._in_other(char)
        self._argued = True
        if char == '"':
            self._text, self._state = Unquoted(), self._in_text
            return "more"
        self._scalar = None if char in "{[" else []
        self._state = self._in_arguments
        return self._in_arguments(char)

    def _in_function(self, char: str) -> Outcome:
        """In a call as OpenAI has it: {"type": "function", "function": {"name": ..., "arguments": ...}}."""
        assert self._function is not None, "it is read"
        found = self._function.take(char)
        self.named = self._function.named
        if found == "done":
            self._argued, self._state = True, self._after
            return "more"
        return found

    def _in_name(self, char: str) -> Outcome:
        if char != '"' or (len(self._word) - len(self._word.rstrip("\\"))) % 2:
            self._word += char
            return "more" if len(self._word) <= MAX_NAME else "bad"
        try:
            name = json.loads(f'"{self._word}"')
        except ValueError:
            return "bad"
        if not name or not self._sink.knows(name):
            return "bad"
        self.named = True
        self._sink.begin_call(name)
        if self._early:
            self._sink.argue("".join(self._early))
        self._state = self._after
        return "more"

    def _in_other(self, char: str) -> Outcome:
        found = self._value.take(char)
        if found == "bad":
            return "bad"
        if found != "more":
            self._state = self._after
        return self._after(char) if found == "before" else "more"

    def _in_text(self, char: str) -> Outcome:
        assert self._text is not None, "a string is read"
        text, last = self._text.take(char)
        for one in text:  # of a value inside the string
            self._argue(self._value.written(one))
            self._value.take(one)
        if last:
            self._state = self._after
        return "more"

    def _in_arguments(self, char: str) -> Outcome:
        written = self._value.written(char)
        found = self._value.take(char)
        if found == "bad":
            return "bad"
        if found in ("more", "done"):
            if self._scalar is None:
                self._argue(written)
            else:
                self._scalar.append(char)
        if found != "more":
            self._state = self._after
            word = "".join(self._scalar or ())
            if word:
                self._argue("{}" if word == "null" else word)
        return self._after(char) if found == "before" else "more"

    def _argue(self, text: str) -> None:
        if not text:
            return
        if self.named:
            self._sink.argue(text)
        else:
            self._early.append(text)

    def _after(self, char: str) -> Outcome:
        if char == ",":
            self._state = self._at_key
            return "more"
        if char == "}":
            return self._closed()
        return "more" if char.isspace() else "bad"

    def _closed(self) -> Outcome:
        if not self.named:
            return "bad"
        if not self._argued:
            self._sink.argue("{}")
        return "done"
