"""What a model thinks before it answers, told from the answer by markers. A state machine over characters: the same
parts wherever the text is cut, in a number of steps linear in it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from quire.errors import StartupError

ReasoningStart = Literal["open", "closed", "maybe"]


class ReasoningFormat(NamedTuple):
    """Thoughts stand between `begin` and `end`. `begin_optional`: whoever reads an output may miss `begin`, which the
    prompt has or the model leaves out."""

    begin: str
    end: str
    begin_optional: bool = False


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begin_optional=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
REASONING_ALIASES = {"qwen3": "think", "glm45": "think", "deepseek_v3": "think", "minimax_m2": "deepseek_r1"}
TEMPLATE_SIGNS = (
    ("[THINK]", "mistral"), ("<seed:think>", "seed_oss"), ("Here is my thought process:", "granite"),
    ("</think>", "think"), ("<think>", "think"),
)  # fmt: skip
OFF = "off"


def reasoning_format_named(name: str) -> str:
    """The format that --reasoning-parser names, or "off". StartupError if there is none."""
    found = REASONING_ALIASES.get(name, name)
    if found not in REASONING_FORMATS and found != OFF:
        known = ", ".join(sorted({*REASONING_FORMATS, *REASONING_ALIASES, OFF}))
        raise StartupError(f"--reasoning-parser is {name[:60]!r}", f"It is one of {known}")
    return found


def detect_reasoning_format(template: str) -> str:
    """The format that a chat template speaks of; "off" where it speaks of none."""
    return next((name for sign, name in TEMPLATE_SIGNS if sign in template), OFF)


def reasoning_start(format: ReasoningFormat, prompt: str, continued: str | None = None) -> ReasoningStart:
    """Whether an output begins within thoughts, has none any more, or says so itself: by how the prompt ends.
    `continued`: the message that it goes on with."""
    end = prompt[-256:].rstrip()
    if end.endswith(format.begin):
        return "open"
    if continued is not None:
        return "open" if continued.rfind(format.begin) > continued.rfind(format.end) else "closed"
    if end.endswith(format.end):
        return "closed"
    return "open" if format.begin_optional else "maybe"


class ReasoningParser:
    """Reads one output, which begins "open" (within thoughts), "closed" (behind them) or "maybe" (with `begin`, or
    there are none). White space around thoughts is dropped."""

    def __init__(self, format: ReasoningFormat, start: ReasoningStart) -> None:
        self.format, self.start = format, start
        self.phase: Literal["before", "inside", "behind", "over"] = "over" if start == "closed" else "before"
        self.steps = 0
        self.begin_seen = False  # `begin` was read
        self._matched = 0  # characters of a marker that were read
        self._pending_space: list[str] = []  # white space that counts if more follows
        self._has_reasoning = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        assert all(marker[0] not in marker[1:] for marker in (format.begin, format.end)), "matching never goes back"

    @property
    def in_reasoning(self) -> bool:
        """The end of thoughts is awaited."""
        return self.phase == "inside" or (self.phase == "before" and self.start == "open")

    @property
    def in_marker(self) -> bool:
        """What was read last may be a part of a marker."""
        return self._matched > 0

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """What `text`, the next of the output, adds to the thoughts, and to what follows them; with `last` the output
        has ended."""
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
        found = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return found

    def _consume(self, char: str) -> bool:
        """Whether the character was taken in the present phase, or another one is to take it."""
        if self.phase == "behind":
            if not char.isspace():
                self.phase = "over"
            return self.phase == "behind"
        marker = self.format.begin if self.phase == "before" else self.format.end
        if char == marker[self._matched]:
            self._matched += 1
            if self._matched == len(marker):
                self._matched, self._pending_space, self.begin_seen = 0, [], True
                self.phase = "inside" if self.phase == "before" else "behind"
            return True
        if self.phase == "before" and not self._matched and char.isspace():
            self._pending_space.append(char)
            return True
        if self.phase == "before" or self._matched:
            read = self._reject_marker()
            self.phase = "inside" if self.in_reasoning else "over"
            for one in read:  # of the first marker: the other one may begin with it
                self.steps += 1
                while not self._consume(one):
                    self.steps += 1
            return False
        self._add_reasoning(char)
        return True

    def _reject_marker(self) -> str:
        """What was read of a marker is none. Returns what may be the beginning of the other one."""
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
