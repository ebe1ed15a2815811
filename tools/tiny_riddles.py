"""Riddles of the bundled model's world: a few sentences or a story, and questions that only they answer."""

from __future__ import annotations

import itertools
import random

import tiny_words as words
from tiny_story import Split, draw_pair, invented_name, tell_story

Turns = list[tuple[str, str]]  # (question, answer)


def draw_people(rng: random.Random, count: int) -> list[str]:
    """Different names, sometimes invented ones."""
    names: list[str] = rng.sample(words.GIRLS + words.BOYS, count)
    return [invented_name(rng) if rng.random() < 0.2 else name for name in names]


def who_has(rng: random.Random, split: Split) -> Turns:
    count = rng.randint(2, 4)
    owners, things = list[str](), list[str]()
    while len(owners) < count:
        name, thing = draw_pair(rng, words.GIRLS + words.BOYS, words.ITEMS, split)
        if rng.random() < 0.2:
            name = invented_name(rng)
        if name not in owners and thing not in things:
            owners.append(name)
            things.append(thing)
    colours = rng.sample(words.COLOURS, count)
    verb = rng.choice(("has", "has", "owns", "holds"))
    told = " ".join(f"{o} {verb} {words.article(f'{c} {t}')}." for o, c, t in zip(owners, colours, things))
    facts = []
    for owner, colour, thing in zip(owners, colours, things):
        facts += [
            (f"Who {verb} the {thing}?", f"{owner} {verb} the {colour} {thing}."),
            (f"What colour is the {thing}?", f"The {thing} is {colour}."),
            (f"What does {owner} have?", f"{owner} has {words.article(f'{colour} {thing}')}."),
        ]
    return about(rng, told, facts)


def who_went(rng: random.Random, split: Split) -> Turns:
    people, facts, at = draw_people(rng, rng.randint(2, 3)), [], {}
    told = []
    for name in people + rng.choices(people, k=rng.randint(0, 2)):
        place = rng.choice(words.PLACES)
        verb = rng.choice(("went", "walked", "ran", "travelled"))
        told.append(f"{name} {verb} {place.to}.")
        at[name] = place
    for name, place in at.items():
        facts.append((f"Where is {name}?", f"{name} is {place.at}."))
        if [other.name for other in at.values()].count(place.name) == 1:
            facts.append((f"Who is {place.at}?", f"{name} is {place.at}."))
    return about(rng, " ".join(told), facts)


def where_put(rng: random.Random, split: Split) -> Turns:
    told, facts = [], []
    things = rng.sample(words.ITEMS, rng.randint(1, 3))
    spots = rng.sample(words.SPOTS, len(things) + 1)
    for thing, spot in zip(things, spots):
        name = draw_pair(rng, words.GIRLS + words.BOYS, (thing,), split)[0]
        name = invented_name(rng) if rng.random() < 0.15 else name
        told.append(f"{name} {rng.choice(('put', 'left', 'hid', 'placed'))} the {thing} {spot}.")
        facts.append((f"Who put the {thing} {spot if len(things) > 1 else 'there'}?", f"{name} did."))
    if rng.random() < 0.3:
        name = draw_people(rng, 1)[0]
        told.append(f"Then {name} took the {things[0]} and put it {spots[-1]}.")
        spots[0], facts = spots[-1], []
    facts += [(f"Where is the {thing}?", f"The {thing} is {spot}.") for thing, spot in zip(things, spots)] * 2
    return about(rng, " ".join(told), facts)


def gave_on(rng: random.Random, split: Split) -> Turns:
    people, thing = draw_people(rng, rng.randint(2, 4)), rng.choice(words.ITEMS)
    first = draw_pair(rng, words.GIRLS + words.BOYS, (thing,), split)[0]
    people = [first] + [name for name in people if name != first]
    told = [f"{people[0]} has {words.article(thing)}."]
    for giver, taker in itertools.pairwise(people):
        told.append(f"{giver} {rng.choice(('gives', 'hands', 'passes'))} the {thing} to {taker}.")
    facts = [(f"Who has the {thing} now?", f"{people[-1]} has the {thing}.")] * 2
    facts.append((f"Who had the {thing} first?", f"{people[0]} had the {thing} first."))
    return about(rng, " ".join(told), facts)


def how_many(rng: random.Random, split: Split) -> Turns:
    [name] = draw_people(rng, 1)
    thing = rng.choice(("apples", "coins", "books", "eggs", "shells", "balls", "cups", "stones"))
    have, change = rng.randint(1, 10), rng.randint(1, 10)
    if rng.random() < 0.5 and change < have:
        told, left = f"{name} has {have} {thing}. {name} gives away {change}.", have - change
    else:
        told, left = f"{name} has {have} {thing}. {name} gets {change} more.", have + change
    things = thing[:-1] if left == 1 else thing
    return about(rng, told, [(f"How many {thing} does {name} have now?", f"{name} has {left} {things}.")])


def compare(rng: random.Random, split: Split) -> Turns:
    a, b = draw_people(rng, 2)
    words_of = (("taller", "shorter"), ("older", "younger"), ("faster", "slower"), ("stronger", "weaker"))
    word, opposite = rng.choice(words_of)
    told = f"{a} is {word} than {b}."
    return about(rng, told, [(f"Who is {word}?", f"{a} is {word}."), (f"Who is {opposite}?", f"{b} is {opposite}.")])


def likes(rng: random.Random, split: Split) -> Turns:
    people, foods = draw_people(rng, 3), rng.sample(words.FOODS, 3)
    told = " ".join(f"{name} likes {food}." for name, food in zip(people, foods))
    asks = [*(f"What does {name} like?" for name in people), *(f"Who likes {food}?" for food in foods)]
    answers = [f"{name} likes {food}." for name, food in zip(people, foods)]
    return about(rng, told, list(zip(asks, answers * 2)))


def pets(rng: random.Random, split: Split) -> Turns:
    owner, pet = draw_pair(rng, words.GIRLS + words.BOYS, words.ANIMALS, split)
    name = invented_name(rng) if rng.random() < 0.3 else rng.choice(words.ANIMAL_NAMES)
    named = rng.choice((" named {}.", ". Its name is {}.")).format(name)
    told = f"{owner} has {words.article(pet)}{named}"
    facts = [
        (f"What is the name of the {pet}?", f"The {pet} is named {name}."),
        ("What is the pet's name?", f"The pet's name is {name}."),
        ("What animal is it?", f"It is {words.article(pet)}."),
        (f"Who is {name}?", f"{name} is {owner}'s {pet}."),
        (f"Whose {pet} is it?", f"It is {owner}'s {pet}."),
    ]
    return about(rng, told, facts)


def because(rng: random.Random, split: Split) -> Turns:
    name, thing = draw_pair(rng, words.GIRLS + words.BOYS, words.ITEMS, split)
    feeling, reason = rng.choice((
        ("sad", f"lost the {thing}"), ("happy", f"got a new {thing}"), ("angry", f"broke the {thing}"),
        ("tired", "ran all day"), ("afraid", "heard a strange noise"),
        ("proud", f"learned to {rng.choice(words.SKILLS)}"),
    ))  # fmt: skip
    told = f"{name} {reason}. Now {name} is {feeling}."
    facts = [(f"Why is {name} {feeling}?", f"{name} is {feeling} because {name} {reason}.")]
    return about(rng, told, [*facts, (f"How does {name} feel?", f"{name} feels {feeling}.")])


def about_story(rng: random.Random, split: Split) -> Turns:
    story = tell_story(rng, split)
    return about(rng, story.text, story.facts)


def about(rng: random.Random, told: str, facts: Turns) -> Turns:
    """A text and one to three questions about it, the text in the first turn."""
    chosen = rng.sample(facts, min(len(facts), rng.choice((1, 1, 2, 3))))
    question, answer = chosen[0]
    style = rng.random()
    if style < 0.6:
        first = f"{told} {question}"
    elif style < 0.8:
        first = f"{told}\n\n{question}"
    else:
        lead = rng.choice(("Read this story: ", "Here is a story. ", "Listen: ",
                           "Read the text and answer the question.\n\n"))  # fmt: skip
        first = f"{lead}{told}\n\nQuestion: {question}" if rng.random() < 0.5 else f"{lead}{told} {question}"
    return [(first, answer), *chosen[1:]]


RIDDLES = (
    who_has, who_has, who_has, who_went, who_went, where_put, where_put, gave_on, how_many, compare, likes, pets,
    because,
)  # fmt: skip
