"""Stories: draws the beings, things and places of one story and tells it as scenes with consequences.

A story comes with its facts: what may be asked about it, and the answers.
"""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

import tiny_words as words
from tiny_free import free_sentence, vary
from tiny_scenes import ENDINGS, FRIENDS, OPENINGS, OWNS, PUTS, SCENES, STILL, TIMES, Scene
from tiny_words import Being

UNSEEN_ONE_IN = 10  # one (being, thing) pair in ten never meets in training


class Split(NamedTuple):
    """Which part of the language to draw from. Training is Split(False, False)."""

    unseen_pairs: bool
    unseen_templates: bool


TRAIN = Split(False, False)


class Story(NamedTuple):
    """A told story, the facts one may ask about it, and who and what it is about."""

    text: str
    facts: list[tuple[str, str]]
    hero: Being
    thing: str


def is_unseen(being: str, thing: str) -> bool:
    """Whether this pair is kept out of training: a property of the two words, the same in every run."""
    return zlib.crc32(f"{being}+{thing}".encode()) % UNSEEN_ONE_IN == 0


def draw_pair(rng: random.Random, beings: tuple[str, ...], things: tuple[str, ...], split: Split) -> tuple[str, str]:
    """A being and a thing that may meet in this split; where a short list holds no unseen pair, a seen one."""
    for _ in range(200):
        being, thing = rng.choice(beings), rng.choice(things)
        if is_unseen(being, thing) == split.unseen_pairs:
            return being, thing
    assert split.unseen_pairs, "every pair of these lists is kept out of training"
    return being, thing


def draw_template(rng: random.Random, slot: tuple[str, ...], split: Split) -> str:
    """One sentence of a slot; an unseen one where the split wants it and the slot has one."""
    unseen = [line for line in slot if line[0] == "~"]
    if split.unseen_templates and unseen:
        return rng.choice(unseen)[1:]
    while True:
        line = rng.choice(slot)
        if line[0] != "~":
            return line


def invented_name(rng: random.Random) -> str:
    """A name nobody has, so that the model learns to copy names and not only to know them."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))).capitalize()


def person(name: str, rng: random.Random) -> Being:
    girl = name in words.GIRLS if name in words.GIRLS or name in words.BOYS else rng.random() < 0.5
    return Being(name, "girl", "she", "her", "her") if girl else Being(name, "boy", "he", "him", "his")


def animal(name: str, kind: str, rng: random.Random) -> Being:
    return Being(name, kind, *rng.choice((("he", "him", "his"), ("she", "her", "her"))))


def draw_cast(rng: random.Random, split: Split, hero: str = "", thing: str = "", kind: str = "") -> dict[str, object]:
    """Every being, thing and place one story may name, so that its scenes agree with each other."""
    people = words.GIRLS + words.BOYS
    noun = thing
    if not hero:
        animals = bool(kind) or rng.random() < 0.3
        names = words.ANIMAL_NAMES if animals else people
        hero, noun = draw_pair(rng, names, (thing,) if thing else words.ITEMS, split)
        a = animal(hero, kind or rng.choice(words.ANIMALS), rng) if animals else person(hero, rng)
    else:
        a = person(hero, rng)
        noun = thing or draw_pair(rng, (hero,), words.ITEMS, split)[1]
    friend, other = a.name, noun
    while friend == a.name or other == noun:
        friend, other = draw_pair(rng, people, words.ITEMS, split)
    colour, other_colour = rng.sample(words.COLOURS, 2)
    spot, wrong, found, elsewhere = rng.sample(words.SPOTS, 4)
    home, place = rng.sample(words.PLACES, 2)
    pet = rng.choice([kind for kind in words.ANIMALS if kind != a.kind])
    red, blue = f"{colour} {noun}", f"{other_colour} {other}"
    return {
        "A": a, "B": person(friend, rng),
        "noun": noun, "thing": red, "a_thing": words.article(red), "colour": colour,
        "other_noun": other, "other": blue, "a_other": words.article(blue), "other_colour": other_colour,
        "spot": spot, "wrong_spot": wrong, "found_spot": found, "other_spot": elsewhere,
        "home": home, "place": place, "place_At": place.at.capitalize(),
        "pet": pet, "food": rng.choice(words.FOODS), "skill": rng.choice(words.SKILLS),
        "pet_food": rng.choice(words.ANIMAL_FOODS), "build": rng.choice(words.BUILDS),
        "trouble": rng.choice(words.TROUBLES), "trait_kind": words.article(f"{rng.choice(words.TRAITS)} {a.kind}"),
    }  # fmt: skip


def tell_story(rng: random.Random, split: Split = TRAIN, **wanted: str) -> Story:
    """A story of one to four scenes, about `hero`, `thing` or an animal of `kind` where one is wanted."""
    cast = draw_cast(rng, split, **wanted)
    hero, friend = cast["A"], cast["B"]
    assert isinstance(hero, Being)
    assert isinstance(friend, Being)

    loose = 0.0 if split.unseen_templates or rng.random() < 0.5 else rng.choice((0.1, 0.2, 0.4))

    def line(slot: tuple[str, ...]) -> str:
        template = draw_template(rng, slot, split)
        told = (vary(rng, template) if rng.random() < loose else template).format_map(cast)
        if rng.random() < loose / 2:
            told += " " + free_sentence(rng, (hero, friend))
        return told

    chosen: list[Scene] = []
    for scene in rng.sample(SCENES, rng.choice((1, 1, 2, 2, 3, 4))):
        if not scene.moves or scene.moves not in {told.moves for told in chosen}:
            chosen.append(scene)
    keeps = rng.random() < 0.5 and "thing" not in {scene.moves for scene in chosen}
    paragraphs = [" ".join([line(OPENINGS), line(FRIENDS), line(OWNS)])]
    questions = [
        ("What colour was {A}'s {noun}?", "{A}'s {noun} was {colour}."),
        ("Who had the {thing}?", "{A} had the {thing}."),
        ("Who was {A}'s friend?", "{A}'s friend was {B}."),
    ]
    start = [line(TIMES)]
    if keeps:
        start.append(line(PUTS))
        questions.append(("Where did {A} put the {noun}?", "{A} put the {noun} {spot}."))
    for number, scene in enumerate(chosen):
        told = [line(slot) for slot in scene.slots]
        paragraphs.append(" ".join((start if number == 0 else []) + told))
        questions.extend(scene.facts)
    paragraphs.append(" ".join(([line(STILL)] if keeps else []) + [line(ENDINGS)]))
    facts = [(ask.format_map(cast), answer.format_map(cast)) for ask, answer in questions]
    return Story("\n\n".join(paragraphs), facts, hero, str(cast["thing"]))
