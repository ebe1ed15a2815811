"""Tool call formats: one parser per format, and the choice of the format from a chat template."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import StartupError
from quire.text.harmony import HarmonyToolParser
from quire.text.tool_parsers.base import ParsedEvent, ToolCallParser
from quire.text.tool_parsers.call_objects import MAX_NAME, CallObjectParser, JsonValueReader
from quire.text.tool_parsers.python_literals import PythonLiteralReader

CODE_FENCE = "```"
MAX_FENCE_CHARS = 16  # characters of the line that opens a block
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class JsonToolParser(ToolCallParser):
    """{"name": ..., "arguments": ...} or a list of these at the start of the output. Only objects with the name of a
    tool are calls; other JSON is text."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.call_object = CallObjectParser(self)
        self.in_list, self.fence_left = False, 0  # backticks of the closing code fence that are still to come
        self._line = ""  # the line that opens a code block
        if not self.marker:
            self.state = self._before_object

    def on_marker(self) -> None:
        self.in_list, self.fence_left, self.state = False, 0, self._before_object

    def finish(self) -> list[ParsedEvent]:
        if self.num_calls and not "".join(self.pending).strip(" \t\r\n,;]"):
            self.pending = []
        return super().finish()

    def _before_object(self, char: str) -> bool:
        """Expect an object, or the list that holds it."""
        if char == "{":
            self.pending.append(char)
            self.call_object, self.state = CallObjectParser(self), self._in_object
        elif char.isspace() or (char == "[" and not self.in_list):
            self.pending.append(char)
            self.in_list = self.in_list or char == "["
        elif char == "`" and not (self.in_list or self.fence_left):
            self.fence_left, self._line, self.state = len(CODE_FENCE), "", self._in_fence
            return False
        else:
            return self.flush_as_text()
        return True

    def _in_fence(self, char: str) -> bool:
        """Parse the Markdown line that opens a code block: ```json."""
        self._line += char
        begins = CODE_FENCE.startswith(self._line[:3]) and len(self._line) <= MAX_FENCE_CHARS
        if not begins or not (char.isalpha() or char in "` \n"):
            return self.flush_as_text()
        self.pending.append(char)
        if char == "\n":
            self.state = self._before_object
        return True

    def _in_object(self, char: str) -> bool:
        status = self.call_object.consume(char)
        if status == "bad":
            if not self.call_object.has_name:
                self.in_list = False
                return self.flush_as_text()
            self.state = self.after_object
            self.end_call()
            return False
        if not self.call_object.has_name:
            self.pending.append(char)
        if status == "done" and self.end_call(char):
            self.state = self.after_object
        return True

    def after_object(self, char: str) -> bool:
        """Expect a separator, another object, or the end of the list or code block."""
        if char == "`" and self.fence_left:
            self.fence_left, self.pending = self.fence_left - 1, []
            return True
        if char.isspace() or char in ",;":
            self.pending.append(char)
        elif char == "]" and self.in_list:
            self.in_list, self.pending = False, []
            self.state = self.after_object if self.fence_left else self._in_content
        elif char == "{":
            self.state = self._before_object
            return False
        else:
            return self.flush_as_text()
        return True


class RequiredToolParser(JsonToolParser):
    """Parser of an output that a grammar restricts to a list of calls. Of a truncated output nothing becomes text,
    except a call without its name."""

    def flush_as_text(self) -> bool:
        self.pending = []
        return super().flush_as_text()


class Llama3JsonToolParser(JsonToolParser):
    """{"name": ..., "parameters": ...} at the start of the output or after <|python_tag|>, separated by semicolons."""

    marker = "<|python_tag|>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.state = self._before_object

    def _before_object(self, char: str) -> bool:
        return not self.is_marker_start(char) and super()._before_object(char)


class HermesToolParser(JsonToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and Qwen 3."""

    marker, closing = "<tool_call>", "</tool_call>"
    takes_any_name = True

    def finish(self) -> list[ParsedEvent]:
        if self.state == self.after_object:
            self.pending = []
        return super().finish()

    def after_object(self, char: str) -> bool:
        """Expect the closing marker. Another opening marker may replace it, and a list may continue."""
        at = len(self.pending)
        if not at and (char.isspace() or (char == "`" and self.fence_left)):
            self.fence_left -= char == "`"
            return True
        if not at and self.in_list and char in ",]":
            self.in_list = char == ","
            self.state = self._before_object if self.in_list else self.after_object
            return True
        return self.take_closing(char, self.closing)


class MistralToolParser(JsonToolParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, since version 11 of its tokenizers,
    [TOOL_CALLS]name[ARGS]{...} for each call. Detokenization may drop [ARGS]."""

    marker = "[TOOL_CALLS]"
    takes_any_name = True

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._head: list[str] = []
        self._value = JsonValueReader()

    def _before_object(self, char: str) -> bool:
        if char not in "[{`" and not char.isspace() and not (self.in_list or self.fence_left):
            self._head, self.state = [], self._in_head
            return False
        return super()._before_object(char)

    def _in_head(self, char: str) -> bool:
        if char == "{":
            name = self._name_in_head("".join(self._head))
            if name:
                self.begin_call(name)
                self._value, self.state = JsonValueReader(), self._in_arguments
                return False
        elif char in NAME_CHARS or char in "[]" or char.isspace():
            self.pending.append(char)
            self._head.append(char)
            if len(self._head) <= MAX_NAME:
                return True
        return self.flush_as_text()

    @staticmethod
    def _name_in_head(head: str) -> str:
        """Return the name in `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`, or "" for other text."""
        name, bracket, rest = head.partition("[")
        name = name.strip()
        whole = (
            not bracket or rest.strip() == "ARGS]" or (rest.startswith("CALL_ID]") and rest.rstrip()[-6:] == "[ARGS]")
        )
        return name if whole and name and all(char in NAME_CHARS for char in name) else ""

    def _in_arguments(self, char: str) -> bool:
        written = self._value.escape_char(char)
        status = self._value.consume(char)
        if status == "bad":
            self.state = self._in_content
            self.end_call()
            return False
        self.add_arguments(written)
        if status == "done":
            self.state = self._in_content
            self.end_call(char)
        return True


class PythonicToolParser(ToolCallParser):
    """[name(key=value, ...), ...] at the start of the output or between Llama 4's markers. Arguments are converted to
    JSON."""

    marker, closing = "<|python_start|>", "<|python_end|>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.state = self._before_list
        self._word: list[str] = []
        self._num_keys = 0
        self._value = PythonLiteralReader()

    def finish(self) -> list[ParsedEvent]:
        if self.state == self._after_list:
            self.pending = []
        return super().finish()

    def on_marker(self) -> None:
        self.state = self._before_list

    def _before_list(self, char: str) -> bool:
        if self.is_marker_start(char):
            return False
        if char == "[":
            self.pending.append(char)
            self._word, self.state = [], self._in_name
        elif char.isspace():
            self.pending.append(char)
        else:
            return self.flush_as_text()
        return True

    def _in_name(self, char: str) -> bool:
        if char in NAME_CHARS and len(self._word) < MAX_NAME:
            self._word.append(char)
        elif char == "(" and self.is_tool("".join(self._word)):
            self.begin_call("".join(self._word))
            self._num_keys, self._word, self.state = 0, [], self._in_key
            return True
        elif not (char.isspace() and not self._word):
            return self.flush_as_text()
        self.pending.append(char)
        return True

    def _in_key(self, char: str) -> bool:
        if char in NAME_CHARS and len(self._word) < MAX_NAME:
            self._word.append(char)
        elif char == "=" and self._word:
            self.add_arguments(f'{", " if self._num_keys else "{"}"{"".join(self._word)}": ')
            self._num_keys += 1
            self._word, self._value, self.state = [], PythonLiteralReader(), self._in_value
        elif char == ")" and not self._word:
            return self._close_call()
        elif not (char.isspace() and not self._word):
            return self._abandon_call()
        return True

    def _in_value(self, char: str) -> bool:
        status = self._value.consume(char)
        if status == "bad":
            return self._abandon_call()
        if self._value.json_pieces:
            self.add_arguments("".join(self._value.json_pieces))
            self._value.json_pieces.clear()
        if status != "more":
            self.state = self._after_value
        return status != "before"

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self.state = self._in_key
        elif char == ")":
            return self._close_call()
        elif not char.isspace():
            return self._abandon_call()
        return True

    def _close_call(self) -> bool:
        self.add_arguments("}" if self._num_keys else "{}")
        self.state = self._after_call
        self.end_call(")")
        return True

    def _abandon_call(self) -> bool:
        """End the call where it stops being valid; what follows is text."""
        self.state = self._in_content
        if self._call_text is not None:
            self.end_call()
        return False

    def _after_call(self, char: str) -> bool:
        if char == ",":
            self.pending, self._word, self.state = [char], [], self._in_name
        elif char == "]":
            self.pending, self.state = [], self._after_list
        elif not char.isspace():
            return self._abandon_call()
        return True

    def _after_list(self, char: str) -> bool:
        return self.take_closing(char, self.closing)


TOOL_PARSERS: dict[str, type[ToolCallParser]] = {
    "harmony": HarmonyToolParser, "hermes": HermesToolParser, "json": JsonToolParser,
    "llama3_json": Llama3JsonToolParser, "mistral": MistralToolParser, "pythonic": PythonicToolParser,
}  # fmt: skip
TOOL_PARSER_ALIASES = {
    "openai": "harmony",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen": "hermes",
    "qwen3": "hermes",
}
# Their markers are special tokens, which detokenization drops.
SPECIAL_TOKEN_PARSERS = (HarmonyToolParser, Llama3JsonToolParser, MistralToolParser, PythonicToolParser)
# Texts in a chat template that identify its format; the first match wins.
TEMPLATE_SIGNS = (
    ("<|channel|>commentary", "harmony"),
    ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_start|>", "pythonic"),
    ("func_name1(params_name1=", "pythonic"), ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)  # fmt: skip


def tool_format_named(name: str) -> str:
    """Return the format that --tool-call-parser names. Raise StartupError if it is unknown."""
    format = TOOL_PARSER_ALIASES.get(name, name)
    if format not in TOOL_PARSERS:
        known = ", ".join(sorted({*TOOL_PARSERS, *TOOL_PARSER_ALIASES}))
        raise StartupError(f"--tool-call-parser is {name[:60]!r}", f"It is one of {known}")
    return format


def detect_tool_format(template: str) -> str:
    """Return the format that a chat template describes; "json" if it describes none."""
    return next((name for sign, name in TEMPLATE_SIGNS if sign in template), "json")
