"""What a model thinks before it answers, told from the answer by markers. A state machine over characters: the same
parts wherever the text is cut, in a number of steps linear in it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from quire.errors import StartupError

Opening = Literal["open", "closed", "maybe"]


class ThoughtFormat(NamedTuple):
    """Thoughts stand between `begin` and `end`. `opened`: whoever reads an output may miss `begin`, which the prompt
    has or the model leaves out."""

    begin: str
    end: str
    opened: bool = False


FORMATS = {
    "think": ThoughtFormat("<think>", "</think>"),
    "deepseek_r1": ThoughtFormat("<think>", "</think>", opened=True),
    "mistral": ThoughtFormat("[THINK]", "[/THINK]"),
    "seed_oss": ThoughtFormat("<seed:think>", "</seed:think>"),
    "granite": ThoughtFormat("Here is my thought process:", "Here is my response:"),
}
ALIASES = {"qwen3": "think", "glm45": "think", "deepseek_v3": "think", "minimax_m2": "deepseek_r1"}
SIGNS = (
    ("[THINK]", "mistral"), ("<seed:think>", "seed_oss"), ("Here is my thought process:", "granite"),
    ("</think>", "think"), ("<think>", "think"),
)  # fmt: skip
OFF = "off"


def thoughts_named(name: str) -> str:
    """The format that --reasoning-parser names, or "off". StartupError if there is none."""
    found = ALIASES.get(name, name)
    if found not in FORMATS and found != OFF:
        known = ", ".join(sorted({*FORMATS, *ALIASES, OFF}))
        raise StartupError(f"--reasoning-parser is {name[:60]!r}", f"It is one of {known}")
    return found


def thoughts_of(template: str) -> str:
    """The format that a chat template speaks of; "off" where it speaks of none."""
    return next((name for sign, name in SIGNS if sign in template), OFF)


def opening_of(format: ThoughtFormat, prompt: str, continued: str | None = None) -> Opening:
    """Whether an output begins within thoughts, has none any more, or says so itself: by how the prompt ends.
    `continued`: the message that it goes on with."""
    end = prompt[-256:].rstrip()
    if end.endswith(format.begin):
        return "open"
    if continued is not None:
        return "open" if continued.rfind(format.begin) > continued.rfind(format.end) else "closed"
    if end.endswith(format.end):
        return "closed"
    return "open" if format.opened else "maybe"


class Thoughts:
    """Reads one output, which begins "open" (within thoughts), "closed" (behind them) or "maybe" (with `begin`, or
    there are none). White space around thoughts is dropped."""

    def __init__(self, format: ThoughtFormat, opening: Opening) -> None:
        self.format, self.opening = format, opening
        self.phase: Literal["before", "inside", "behind", "over"] = "over" if opening == "closed" else "before"
        self.steps = 0
        self.marked = False  # `begin` was read
        self._at = 0  # characters of a marker that were read
        self._blank: list[str] = []  # white space that counts if more follows
        self._begun = False
        self._thought: list[str] = []
        self._rest: list[str] = []
        assert all(marker[0] not in marker[1:] for marker in (format.begin, format.end)), "matching never goes back"

    @property
    def thinking(self) -> bool:
        """The end of thoughts is awaited."""
        return self.phase == "inside" or (self.phase == "before" and self.opening == "open")

    @property
    def marking(self) -> bool:
        """What was read last may be a part of a marker."""
        return self._at > 0

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """What `text`, the next of the output, adds to the thoughts, and to what follows them; with `last` the output
        has ended."""
        for i, char in enumerate(text):
            while self.phase != "over":
                self.steps += 1
                if self._take(char):
                    break
            else:
                self._rest.append(text[i:])
                break
        if last:
            self._thought += self._give_back()
        found = "".join(self._thought), "".join(self._rest)
        self._thought, self._rest = [], []
        return found

    def _take(self, char: str) -> bool:
        """Whether the character was taken in the present phase, or another one is to take it."""
        if self.phase == "behind":
            if not char.isspace():
                self.phase = "over"
            return self.phase == "behind"
        marker = self.format.begin if self.phase == "before" else self.format.end
        if char == marker[self._at]:
            self._at += 1
            if self._at == len(marker):
                self._at, self._blank, self.marked = 0, [], True
                self.phase = "inside" if self.phase == "before" else "behind"
            return True
        if self.phase == "before" and not self._at and char.isspace():
            self._blank.append(char)
            return True
        if self.phase == "before" or self._at:
            read = self._give_back()
            self.phase = "inside" if self.thinking else "over"
            for one in read:  # of the first marker: the other one may begin with it
                self.steps += 1
                while not self._take(one):
                    self.steps += 1
            return False
        self._think(char)
        return True

    def _give_back(self) -> str:
        """What was read of a marker is none. Returns what may be the beginning of the other one."""
        read = (self.format.begin if self.phase == "before" else self.format.end)[: self._at]
        self._at = 0
        if self.phase == "before" and self.opening == "open":
            return read
        if self.phase == "inside":
            for char in read:
                self._think(char)
        elif self.phase == "before":
            self._rest += [*self._blank, read]
            self._blank = []
        return ""

    def _think(self, char: str) -> None:
        if char.isspace():
            self._blank.append(char)
            return
        if self._begun:
            self._thought += self._blank
        self._thought.append(char)
        self._begun, self._blank = True, []
