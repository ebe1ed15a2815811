"""The story templates of tiny_scenes.txt: slots, each of which gives a story one sentence, and scenes of slots.

The sentences of a slot mean the same. Those that begin with `~` never occur in training: they are the unseen
templates of the held-out text. A section `[scene MOVES: ...]` has its slots, with an empty line after each, then what
may be asked about it, as `question = answer`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

Slot = tuple[str, ...]


class Scene(NamedTuple):
    """Slots and facts; `moves` names the thing that changes place or owner, at most once in a story."""

    slots: tuple[Slot, ...]
    facts: tuple[tuple[str, str], ...]
    moves: str


def _read(text: str) -> tuple[dict[str, Slot], tuple[Scene, ...]]:
    """Return the slots that every story has, by their names, and the scenes."""
    named: dict[str, Slot] = {}
    scenes: list[Scene] = []
    for section in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("]\n")
        *slots, last = (tuple(block.splitlines()) for block in body.strip().split("\n\n"))
        if head.startswith("scene"):
            facts = tuple((ask, answer) for ask, _, answer in (line.partition(" = ") for line in last))
            scenes.append(Scene(tuple(slots), facts, head.partition(":")[0].removeprefix("scene").strip()))
        else:
            named[head] = last
    return named, tuple(scenes)


_SLOTS, SCENES = _read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
OPENINGS, FRIENDS, OWNS, TIMES, PUTS, STILL, ENDINGS = _SLOTS.values()
