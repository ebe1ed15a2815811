"""Separation of a model's reasoning from its answer by markers. A state machine over characters: linear in the text,
and independent of how the text is split.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from quire.errors import StartupError
from quire.text.harmony import ANALYSIS, FINAL, HarmonyParser

ReasoningStart = Literal["open", "closed", "maybe"]


class ReasoningFormat(NamedTuple):
    """Reasoning is between `begin` and `end`. `begin_optional`: the output may lack `begin`, since the prompt ends with
    it or the model omits it."""

    begin: str
    end: str
    begin_optional: bool = False


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begin_optional=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "harmony": ReasoningFormat(ANALYSIS, FINAL),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
REASONING_ALIASES = {
    "openai_gptoss": "harmony",
    "qwen3": "think",
    "glm45": "think",
    "deepseek_v3": "think",
    "minimax_m2": "deepseek_r1",
}
TEMPLATE_SIGNS = (
    (ANALYSIS, "harmony"),
    ("[THINK]", "mistral"), ("<seed:think>", "seed_oss"), ("Here is my thought process:", "granite"),
    ("</think>", "think"), ("<think>", "think"),
)  # fmt: skip
OFF = "off"


def reasoning_format_named(name: str) -> str:
    """Return the format that --reasoning-parser names, or "off". Raise StartupError if it is unknown."""
    format = REASONING_ALIASES.get(name, name)
    if format not in REASONING_FORMATS and format != OFF:
        known = ", ".join(sorted({*REASONING_FORMATS, *REASONING_ALIASES, OFF}))
        raise StartupError(f"--reasoning-parser is {name[:60]!r}", f"It is one of {known}")
    return format


def detect_reasoning_format(template: str) -> str:
    """Return the format whose markers a chat template contains; "off" if there are none."""
    return next((name for sign, name in TEMPLATE_SIGNS if sign in template), OFF)


def reasoning_start(format: ReasoningFormat, prompt: str, continued: str | None = None) -> ReasoningStart:
    """Return whether an output begins within reasoning ("open"), after it ("closed"), or shows it itself ("maybe"),
    from the end of the prompt. `continued` is the message that the output continues, if any."""
    end = prompt[-256:].rstrip()
    if end.endswith(format.begin):
        return "open"
    if continued is not None:
        return "open" if continued.rfind(format.begin) > continued.rfind(format.end) else "closed"
    if end.endswith(format.end):
        return "closed"
    return "open" if format.begin_optional else "maybe"


def new_parser(format: ReasoningFormat, start: ReasoningStart) -> ReasoningParser | HarmonyParser:
    """Return a parser of one output that begins as `start` says."""
    return HarmonyParser() if format.begin == ANALYSIS else ReasoningParser(format, start)


class ReasoningParser:
    """Parses one output, which begins "open" (within reasoning), "closed" (after it) or "maybe" (with `begin`, or
    without reasoning). White space around reasoning is dropped."""

    def __init__(self, format: ReasoningFormat, start: ReasoningStart) -> None:
        self.format, self.start = format, start
        self.phase: Literal["before", "inside", "after", "over"] = "over" if start == "closed" else "before"
        self.steps = 0
        self.begin_seen = False  # `begin` was read
        self._matched = 0  # characters of the marker read so far
        self._pending_space: list[str] = []  # white space that is kept if more reasoning follows
        self._has_reasoning = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        assert all(marker[0] not in marker[1:] for marker in (format.begin, format.end)), (
            "the first character of a marker occurs in it again"
        )

    @property
    def in_reasoning(self) -> bool:
        """True if the end of the reasoning is still to come."""
        return self.phase == "inside" or (self.phase == "before" and self.start == "open")

    @property
    def in_marker(self) -> bool:
        """True if the last characters may be a part of a marker."""
        return self._matched > 0

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that `text` adds. `last`: the output has ended."""
        for i, char in enumerate(text):
            while self.phase != "over":
                self.steps += 1
                if self._consume(char):
                    break
            else:
                self._content.append(text[i:])
                break
        if last:
            self._reasoning += self._reject_marker()
        texts = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return texts

    def _consume(self, char: str) -> bool:
        """Consume a character in the present phase. Return False if the phase changed and must consume it instead."""
        if self.phase == "after":
            if not char.isspace():
                self.phase = "over"
            return self.phase == "after"
        marker = self.format.begin if self.phase == "before" else self.format.end
        if char == marker[self._matched]:
            self._matched += 1
            if self._matched == len(marker):
                self._matched, self._pending_space, self.begin_seen = 0, [], True
                self.phase = "inside" if self.phase == "before" else "after"
            return True
        if self.phase == "before" and not self._matched and char.isspace():
            self._pending_space.append(char)
            return True
        if self.phase == "before" or self._matched:
            read = self._reject_marker()
            self.phase = "inside" if self.in_reasoning else "over"
            for one in read:  # the other marker may begin with these characters
                self.steps += 1
                while not self._consume(one):
                    self.steps += 1
            return False
        self._add_reasoning(char)
        return True

    def _reject_marker(self) -> str:
        """Emit a partial marker as text. Return it instead if the other marker may begin with it."""
        read = (self.format.begin if self.phase == "before" else self.format.end)[: self._matched]
        self._matched = 0
        if self.phase == "before" and self.start == "open":
            return read
        if self.phase == "inside":
            for char in read:
                self._add_reasoning(char)
        elif self.phase == "before":
            self._content += [*self._pending_space, read]
            self._pending_space = []
        return ""

    def _add_reasoning(self, char: str) -> None:
        if char.isspace():
            self._pending_space.append(char)
            return
        if self._has_reasoning:
            self._reasoning += self._pending_space
        self._reasoning.append(char)
        self._has_reasoning, self._pending_space = True, []
