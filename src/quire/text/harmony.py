"""The harmony format, in which gpt-oss writes its turn as messages of channels: reasoning in `analysis`, the answer in
`final`, and tool calls and texts before them in `commentary`.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

A message with a recipient (`to=`) is a call; the recipient may come before the channel, too.
"""

from __future__ import annotations

import re
from typing import Literal

from quire.text.tool_parsers.base import ParsedEvent, ToolCallParser
from quire.text.tool_parsers.call_objects import MAX_NAME, JsonValueReader

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
"""What begins the reasoning, and what ends it and begins the answer."""
CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
ENDS = ("<|end|>", "<|return|>", CALL)
TAGS = (CHANNEL, MESSAGE, "<|start|>", "<|constrain|>", *ENDS)
MAX_HEAD = 4 * MAX_NAME  # characters of a message's head
RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
Kind = Literal["reasoning", "content", "call"]


class HarmonyParser:
    """Parses one output into reasoning and content, as a ReasoningParser does. A call becomes content that
    HarmonyToolParser reads. Text outside of messages is content: an output that a grammar restricts has none. Messages
    of one kind are separated by a line break."""

    def __init__(self) -> None:
        self.phase: Literal["before", "inside", "over"] = "before"
        self.begin_seen = False  # the text of a message of the analysis has begun
        self.steps = 0
        self._tag = ""  # the beginning of a tag that has been read so far
        self._head: str | None = ""  # of a message, until its text begins; the prompt ends with <|start|>assistant
        self._is_first = True  # no tag and no text was read
        self._kind: Kind | None = None  # of the message whose text is read; None: between messages
        self._out: dict[Kind, list[str]] = {"reasoning": [], "content": []}
        self._separated: set[Kind] = set()  # kinds of which another message has ended

    @property
    def in_reasoning(self) -> bool:
        """True within a message of the analysis."""
        return self.phase == "inside"

    @property
    def in_marker(self) -> bool:
        """True if the last characters may be a part of a marker: of a tag, or of a message's head."""
        return bool(self._tag) or self._head is not None

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that `text` adds. `last`: the output has ended."""
        if self._kind is not None and self._head is None and not self._tag and "<" not in text:
            self._emit(self._kind, text)
            text = ""
        for char in text:
            self.steps += 1
            self._take(char)
        if last:
            rest, self._tag = self._tag, ""
            self._add(rest)
            self._flush_head()
        reasoning, content = ("".join(self._out[kind]) for kind in ("reasoning", "content"))
        self._out = {"reasoning": [], "content": []}
        return reasoning, content

    def _take(self, char: str) -> None:
        tag = self._tag + char
        if tag in TAGS:
            self._tag = ""
            self._on_tag(tag)
        elif any(one.startswith(tag) for one in TAGS):
            self._tag = tag
        elif self._tag:
            self._tag = ""
            self._add(tag[:-1])
            self._take(char)
        else:
            self._add(char)

    def _add(self, text: str) -> None:
        """Add text that is no tag: to the head, or to the message."""
        if not text:
            return
        if self._head is not None:
            self._head += text
            begun = self._head.lstrip()
            plain = self._is_first and not begun.startswith("to="[: len(begun)])
            if plain or len(self._head) > MAX_HEAD:
                self._flush_head()
        elif self._kind is not None:
            self._emit(self._kind, text)
        elif not text.isspace():
            self._begin("content")
            self._emit("content", text)

    def _flush_head(self) -> None:
        """Emit a head as content: no message follows it."""
        head, self._head = self._head, None
        if head and self._is_first:
            self._begin("content")
            self._emit("content", head)

    def _on_tag(self, tag: str) -> None:
        self._is_first = False
        if tag == MESSAGE and self._head is not None:
            self._begin_message(self._head)
        elif tag in ENDS:
            self._end_message()
        elif tag == "<|start|>":
            self._end_message()
            self._head = ""
        elif tag == CHANNEL and self._head is None:  # the message before has no end
            self._end_message()
            self._head = " "
        elif self._head is not None:
            self._head += " "

    def _begin_message(self, head: str) -> None:
        self._head, recipient = None, RECIPIENT.search(head)
        if recipient is not None:
            self._begin("call")
            self._emit("content", f"{CHANNEL}commentary to={recipient[1]}{MESSAGE}")
        else:
            self._begin("reasoning" if "analysis" in head.split() else "content")

    def _begin(self, kind: Kind) -> None:
        self._kind, self._head = kind, None
        if kind in self._separated:
            self._emit(kind, "\n")
            self._separated.discard(kind)
        self.phase = "inside" if kind == "reasoning" else "over"
        self.begin_seen = self.begin_seen or kind == "reasoning"

    def _end_message(self) -> None:
        if self._kind == "call":
            self._emit("content", CALL)
        elif self._kind is not None:
            self._separated.add(self._kind)
        if self._kind == "reasoning":
            self.phase, self.begin_seen = "before", False
        self._kind = self._head = None

    def _emit(self, kind: Kind, text: str) -> None:
        self._out["reasoning" if kind == "reasoning" else "content"].append(text)


class HarmonyToolParser(ToolCallParser):
    """<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>: gpt-oss. The last tag may be
    missing, since it ends the output."""

    marker, closing = CHANNEL, CALL
    takes_any_name = True

    def on_marker(self) -> None:
        self._head, self.state = "", self._in_head

    def finish(self) -> list[ParsedEvent]:
        if self.state == self._after_call:
            self.pending = []
        return super().finish()

    def _in_head(self, char: str) -> bool:
        self._head += char
        if self._head.endswith(MESSAGE):
            recipient = RECIPIENT.search(self._head.removesuffix(MESSAGE).replace("<|constrain|>", " "))
            name = "" if recipient is None else recipient[1].removeprefix("functions.")
            if 0 < len(name) <= MAX_NAME:
                self.begin_call(name)
                self._value, self._has_begun, self.state = JsonValueReader(), False, self._in_arguments
                return True
        self.pending.append(char)
        if self._head.endswith(MESSAGE) or len(self._head) > MAX_HEAD:
            self.flush_as_text()
        return True

    def _in_arguments(self, char: str) -> bool:
        if not self._has_begun and char.isspace():
            return True
        self._has_begun = True
        written = self._value.escape_char(char)
        status = self._value.consume(char)
        if status in ("bad", "before"):
            self.state = self._in_content
            self.end_call()
            return False
        self.add_arguments(written)
        if status == "done" and self.end_call(char):
            self.state = self._after_call
        return True

    def _after_call(self, char: str) -> bool:
        if not self.pending and char.isspace():
            return True
        return self.take_closing(char, self.closing)
