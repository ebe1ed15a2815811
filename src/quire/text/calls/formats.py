"""How models write calls of tools: one reader a format, and which format a chat template speaks of."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import StartupError
from quire.text.calls.events import CallReader, Event
from quire.text.calls.objects import MAX_NAME, CallObject, Value
from quire.text.calls.python import Literal

FENCE = "```"
MAX_FENCE = 16  # characters of the line that opens a block
WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class JsonCalls(CallReader):
    """Objects or lists of them where the output begins: {"name": ..., "arguments": ...}. Only names of tools make them
    calls, so that other JSON is text."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.object = CallObject(self)
        self.in_list, self.fenced = False, 0  # backticks that close the block of code around
        self._line = ""  # the one that opens a block of code
        if not self.marker:
            self.state = self._open

    def opened(self) -> None:
        self.in_list, self.fenced, self.state = False, 0, self._open

    def end(self) -> list[Event]:
        if self.calls and not "".join(self.raw).strip(" \t\r\n,;]"):
            self.raw = []
        return super().end()

    def _open(self, char: str) -> bool:
        """Before an object, or before the list that has it."""
        if char == "{":
            self.raw.append(char)
            self.object, self.state = CallObject(self), self._inside
        elif char.isspace() or (char == "[" and not self.in_list):
            self.raw.append(char)
            self.in_list = self.in_list or char == "["
        elif char == "`" and not (self.in_list or self.fenced):
            self.fenced, self._line, self.state = len(FENCE), "", self._in_fence
            return False
        else:
            self.give_back()
            return False
        return True

    def _in_fence(self, char: str) -> bool:
        """In the line of Markdown that opens a block of code: ```json."""
        self._line += char
        begins = FENCE.startswith(self._line[:3]) and len(self._line) <= MAX_FENCE
        if not begins or not (char.isalpha() or char in "` \n"):
            self.give_back()
            return False
        self.raw.append(char)
        if char == "\n":
            self.state = self._open
        return True

    def _inside(self, char: str) -> bool:
        found = self.object.take(char)
        if found == "bad":
            if self.object.named:
                self.state = self.closed
                self.end_call()
            else:
                self.in_list = False
                self.give_back()
            return False
        if not self.object.named:
            self.raw.append(char)
        if found == "done" and self.end_call(char):
            self.state = self.closed
        return True

    def closed(self, char: str) -> bool:
        """After an object."""
        if char == "`" and self.fenced:
            self.fenced, self.raw = self.fenced - 1, []
            return True
        if char.isspace() or char in ",;":
            self.raw.append(char)
        elif char == "]" and self.in_list:
            self.in_list, self.raw, self.state = False, [], self.closed if self.fenced else self._content
        elif char == "{":
            self.state = self._open
            return False
        else:
            self.give_back()
            return False
        return True


class OnlyCalls(JsonCalls):
    """An output that a grammar holds to a list of calls: one that was cut has no text, but a call without its name."""

    def give_back(self) -> None:
        self.raw = []
        super().give_back()


class Llama3Json(JsonCalls):
    """{"name": ..., "parameters": ...} where the output begins, several with ; between, or behind <|python_tag|>."""

    marker = "<|python_tag|>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.state = self._open

    def knows(self, name: str) -> bool:
        return name in self.names

    def _open(self, char: str) -> bool:
        if char == self.marker[0] and not "".join(self.raw).strip():
            self._blank, self.raw, self.state = self.raw, [], self._content
            return False
        return super()._open(char)


class Hermes(JsonCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

    marker = "<tool_call>"
    closing = "</tool_call>"

    def end(self) -> list[Event]:
        if self.state == self.closed:
            self.raw = []
        return super().end()

    def closed(self, char: str) -> bool:
        """Expects the closing marker; another opening one may stand in its place, and a list may have more."""
        at = len(self.raw)
        if not at and (char.isspace() or (char == "`" and self.fenced)):
            self.fenced -= char == "`"
            return True
        if not at and self.in_list and char in ",]":
            self.in_list = char == ","
            self.state = self._open if self.in_list else self.closed
            return True
        if char == self.closing[at]:
            self.raw.append(char)
            if at + 1 == len(self.closing):
                self.raw, self.state = [], self._content
            return True
        said, self.raw, self.state = self.raw, [], self._content
        for one in said:  # no more than the marker has
            self.steps += 1
            self._content(one)
        return False


class Mistral(JsonCalls):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or since its tokenizers of version 11
    [TOOL_CALLS]name[ARGS]{...} once a call, where [ARGS] may be left out by what decodes."""

    marker = "[TOOL_CALLS]"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._head: list[str] = []
        self._value = Value()

    def _open(self, char: str) -> bool:
        if char not in "[{`" and not char.isspace() and not (self.in_list or self.fenced):
            self._head, self.state = [], self._in_head
            return False
        return super()._open(char)

    def _in_head(self, char: str) -> bool:
        if char == "{":
            name = self._named("".join(self._head))
            if name:
                self.begin_call(name)
                self._value, self.state = Value(), self._in_arguments
                return False
        elif char in WORD or char in "[]" or char.isspace():
            self.raw.append(char)
            self._head.append(char)
            if len(self._head) <= MAX_NAME:
                return True
        self.give_back()
        return False

    @staticmethod
    def _named(head: str) -> str:
        """The name in `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`; "" for anything else."""
        name, bracket, rest = head.partition("[")
        name = name.strip()
        whole = (
            not bracket or rest.strip() == "ARGS]" or (rest.startswith("CALL_ID]") and rest.rstrip()[-6:] == "[ARGS]")
        )
        return name if whole and name and all(char in WORD for char in name) else ""

    def _in_arguments(self, char: str) -> bool:
        written = self._value.written(char)
        found = self._value.take(char)
        if found == "bad":
            self.state = self._content
            self.end_call()
            return False
        self.argue(written)
        if found == "done":
            self.state = self._content
            self.end_call(char)
        return True


class Pythonic(CallReader):
    """[name(key=value, ...), ...] where the output begins, or between Llama 4's markers. Arguments become JSON."""

    marker = "<|python_start|>"
    closing = "<|python_end|>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.state = self._open
        self._word: list[str] = []
        self._keys = 0
        self._value = Literal()

    def end(self) -> list[Event]:
        if self.state == self._closed:
            self.raw = []
        return super().end()

    def knows(self, name: str) -> bool:
        return name in self.names

    def opened(self) -> None:
        self.state = self._open

    def _open(self, char: str) -> bool:
        if char == self.marker[0] and not "".join(self.raw).strip():
            self._blank, self.raw, self.state = self.raw, [], self._content
            return False
        if char == "[":
            self.raw.append(char)
            self._word, self.state = [], self._in_name
        elif char.isspace():
            self.raw.append(char)
        else:
            self.give_back()
            return False
        return True

    def _in_name(self, char: str) -> bool:
        if char in WORD and len(self._word) < MAX_NAME:
            self._word.append(char)
        elif char == "(" and self.knows("".join(self._word)):
            self.begin_call("".join(self._word))
            self._keys, self._word, self.state = 0, [], self._in_key
            return True
        elif not (char.isspace() and not self._word):
            self.give_back()
            return False
        self.raw.append(char)
        return True

    def _in_key(self, char: str) -> bool:
        if char in WORD and len(self._word) < MAX_NAME:
            self._word.append(char)
        elif char == "=" and self._word:
            self.argue(f'{", " if self._keys else "{"}"{"".join(self._word)}": ')
            self._keys += 1
            self._word, self._value, self.state = [], Literal(), self._in_value
        elif char == ")" and not self._word:
            return self._close_call()
        elif not (char.isspace() and not self._word):
            return self._broken()
        return True

    def _in_value(self, char: str) -> bool:
        found = self._value.take(char)
        if found == "bad":
            return self._broken()
        if self._value.json:
            self.argue("".join(self._value.json))
            self._value.json.clear()
        if found != "more":
            self.state = self._after_value
        return found != "before"

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self.state = self._in_key
        elif char == ")":
            return self._close_call()
        elif not char.isspace():
            return self._broken()
        return True

    def _close_call(self) -> bool:
        self.argue("}" if self._keys else "{}")
        self.state = self._after_call
        self.end_call(")")
        return True

    def _broken(self) -> bool:
        """The call ends where it is no call any more; what follows is text."""
        self.state = self._content
        if self.reading:
            self.end_call()
        return False

    def _after_call(self, char: str) -> bool:
        if char == ",":
            self.raw, self._word, self.state = [char], [], self._in_name
        elif char == "]":
            self.raw, self.state = [], self._closed
        elif not char.isspace():
            return self._broken()
        return True

    def _closed(self, char: str) -> bool:
        """After the list: the closing marker, where there is one."""
        at = len(self.raw)
        if char == self.closing[at]:
            self.raw.append(char)
            if at + 1 == len(self.closing):
                self.raw, self.state = [], self._content
            return True
        said, self.raw, self.state = self.raw, [], self._content
        for one in said:
            self.steps += 1
            self._content(one)
        return False


FORMATS: dict[str, type[CallReader]] = {
    "hermes": Hermes, "json": JsonCalls, "llama3_json": Llama3Json, "mistral": Mistral, "pythonic": Pythonic,
}  # fmt: skip
ALIASES = {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen": "hermes", "qwen3": "hermes"}
SPECIAL = (Llama3Json, Mistral, Pythonic)  # whose markers are special tokens, which texts are without
# What a template says of the format, in the order in which it is asked.
SIGNS = (
    ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_start|>", "pythonic"),
    ("func_name1(params_name1=", "pythonic"), ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)  # fmt: skip


def format_named(name: str) -> str:
    """The format that --tool-call-parser names. StartupError if there is none."""
    found = ALIASES.get(name, name)
    if found not in FORMATS:
        known = ", ".join(sorted({*FORMATS, *ALIASES}))
        raise StartupError(f"--tool-call-parser is {name[:60]!r}", f"It is one of {known}")
    return found


def format_of(template: str) -> str:
    """The format that a chat template teaches: JSON alone where it teaches none."""
    return next((name for sign, name in SIGNS if sign in template), "json")
