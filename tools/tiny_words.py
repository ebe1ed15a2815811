"""The words and everyday facts of the bundled model's small world, from tiny_words.toml.

Nothing here draws from them; tiny_story.py, tiny_chat.py and others make sentences of them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple


class Being(NamedTuple):
    """A person or a named animal with its pronouns; formats as its name, so templates may say `{A}` and `{A.his}`."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    def __format__(self, spec: str) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def a_kind(self) -> str:
        return article(self.kind)


class Place(NamedTuple):
    """A place with the phrases for being there and going there."""

    name: str
    at: str
    to: str


def article(noun: str) -> str:
    """`an owl`, `a fox`."""
    return f"an {noun}" if noun[0] in "aeiou" and not noun.startswith(("uni", "one")) else f"a {noun}"


def plural(noun: str) -> str:
    """The plural of a noun of these tables."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return PLURALS.get(noun, f"{noun}es" if noun.endswith(("x", "s", "ch")) else f"{noun}s")


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Phrases between `|`."""
    return tuple(phrase.strip() for phrase in text.split("|"))


def pairs(text: str) -> dict[str, str]:
    """`one:two; three:four` as a dict."""
    return {one.strip(): other.strip() for one, other in (pair.split(":") for pair in text.split(";"))}


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
(GIRLS, BOYS, ANIMAL_NAMES, ANIMALS, TRAITS, COLOURS, ITEMS, FOODS, ANIMAL_FOODS, DAYS, MONTHS, NUMBERS) = (
    split_words(text) for text in TABLES["words"].values()
)
PLACES = tuple(
    Place(name, f"{preposition} the {name}", f"to the {name}")
    for preposition, names in TABLES["places"].items()
    for name in split_words(names)
)
KINDS = {kind: split_words(names) for kind, names in TABLES["kinds"].items()}
SPOTS, SKILLS, BUILDS, TROUBLES, SYSTEMS, BEYOND = map(phrases, TABLES["phrases"].values())
(SOUNDS, OPPOSITES, CAPITALS, HOMES, YOUNG, THING_COLOURS, PLURALS, JOBS, BODY, LEGS) = (
    pairs(text) for text in TABLES["pairs"].values()
)
