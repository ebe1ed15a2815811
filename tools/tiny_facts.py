"""Everyday facts of the bundled model's world, each with several wordings of its question.

A few (fact, wording) pairs are kept out of training, so that held-out questions are new although both halves are known.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import tiny_words as words
from tiny_riddles import Turns
from tiny_story import Split, is_unseen


def ask(rng: random.Random, split: Split, fact: str, wordings: tuple[str, ...]) -> str:
    """One wording of a question about `fact` that this split may use."""
    allowed = [line for line in wordings if is_unseen(fact, line) == split.unseen_pairs]
    return rng.choice(allowed or wordings[:1])


def fact_turn(rng: random.Random, split: Split) -> tuple[str, str]:
    """One question about the world and its answer."""
    draw = rng.choice(FACTS)
    fact, wordings, answer = draw(rng)
    return ask(rng, split, fact, wordings), answer


Fact = tuple[str, tuple[str, ...], str]


def capital(rng: random.Random) -> Fact:
    country, city = rng.choice(tuple(words.CAPITALS.items()))
    if rng.random() < 0.25:
        start = country[0].upper() + country[1:]
        return city, (f"{city} is the capital of which country?", f"Which country has the capital {city}?"), f"{start}."
    asks = (
        "What is the capital of {}?",
        "Name the capital of {}.",
        "Which city is the capital of {}?",
        "Do you know the capital of {}?",
        "Tell me the capital of {}.",
        "What's the capital of {}?",
    )
    return country, tuple(line.format(country) for line in asks), f"The capital of {country} is {city}."


def opposite(rng: random.Random) -> Fact:
    a, b = rng.choice(tuple(words.OPPOSITES.items()))
    if rng.random() < 0.5 and b not in words.OPPOSITES and list(words.OPPOSITES.values()).count(b) == 1:
        a, b = b, a
    asks = (
        "What is the opposite of {}?",
        "Tell me the opposite of {}.",
        "What's the opposite of {}?",
        "Which word is the opposite of {}?",
        'What is the opposite of "{}"?',
    )
    return a, tuple(line.format(a) for line in asks), f"The opposite of {a} is {b}."


def sound(rng: random.Random) -> Fact:
    beast, noise = rng.choice(tuple(words.SOUNDS.items()))
    if rng.random() < 0.25:
        return (
            noise,
            (f'Which animal says "{noise}"?', f"What animal says {noise}?"),
            f"{words.article(beast).capitalize()} says {noise}.",
        )
    asks = ("What sound does {} make?", "What does {} say?", "Which sound does {} make?", "Tell me what {} says.")
    return (
        beast,
        tuple(line.format(words.article(beast)) for line in asks),
        f"{words.article(beast).capitalize()} says {noise}.",
    )


def lives(rng: random.Random) -> Fact:
    beast, home = rng.choice(tuple(words.HOMES.items()))
    asks = ("Where does {} live?", "Where is the home of {}?", "Where can I find {}?", "Tell me where {} lives.")
    a = words.article(beast)
    return beast, tuple(line.format(a) for line in asks), f"{a.capitalize()} lives {home}."


def young(rng: random.Random) -> Fact:
    beast, baby = rng.choice(tuple(words.YOUNG.items()))
    asks = ("What is a baby {} called?", "What do we call a young {}?", "What is the name for a baby {}?")
    return beast, tuple(line.format(beast) for line in asks), f"A baby {beast} is called {words.article(baby)}."


def colour_of(rng: random.Random) -> Fact:
    thing, colour = rng.choice(tuple(words.THING_COLOURS.items()))
    asks = ("What colour is {}?", "What color is {}?", "Which colour does {} have?", "Tell me the colour of {}.")
    return thing, tuple(line.format(thing) for line in asks), f"{thing[0].upper()}{thing[1:]} is {colour}."


def plural(rng: random.Random) -> Fact:
    one, many = rng.choice(tuple(words.PLURALS.items()))
    asks = (
        "What is the plural of {}?",
        "Tell me the plural of {}.",
        'What is the plural of "{}"?',
        "One {}, two what?",
    )
    return one, tuple(line.format(one) for line in asks), f"The plural of {one} is {many}."


def job(rng: random.Random) -> Fact:
    does, who = rng.choice(tuple(words.JOBS.items()))
    asks = (f"Who {does}?", f"What do we call someone who {does}?", f"Tell me who {does}.")
    return does, asks, f"{who.capitalize()} {does}."


def body(rng: random.Random) -> Fact:
    do, part = rng.choice(tuple(words.BODY.items()))
    return (
        do,
        (f"What do we {do} with?", f"Which part of the body do we {do} with?", f"With what do we {do}?"),
        f"We {do} with {part}.",
    )


def is_a(rng: random.Random) -> Fact:
    kind = rng.choice(tuple(words.KINDS))
    thing = rng.choice(words.KINDS[kind])
    noun = thing if kind == "colour" else words.article(thing)
    start = noun[0].upper() + noun[1:]
    style = rng.random()
    if style < 0.4:
        return (
            thing,
            (f"What is {noun}?", f"What kind of thing is {noun}?", f"Tell me what {noun} is."),
            f"{start} is {words.article(kind)}.",
        )
    if style < 0.7:
        return thing, (f"Is {noun} {words.article(kind)}?",), f"Yes, {noun} is {words.article(kind)}."
    wrong = rng.choice(
        [
            k
            for k in words.KINDS
            if thing not in words.KINDS[k] and {k, kind} not in ({"animal", "bird"}, {"colour", "flower"})
        ]
    )
    return thing, (f"Is {noun} {words.article(wrong)}?",), f"No, {noun} is {words.article(kind)}."


def legs(rng: random.Random) -> Fact:
    beast, count = rng.choice(tuple(words.LEGS.items()))
    a = words.article(beast)
    return beast, (f"How many legs does {a} have?", f"How many legs has {a}?"), f"{a.capitalize()} has {count} legs."


def calendar(rng: random.Random) -> Fact:
    names, noun = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    i = rng.randrange(len(names))
    here, after, before = names[i], names[(i + 1) % len(names)], names[i - 1]
    style = rng.randrange(4)
    asks: tuple[str, ...]
    if style == 0:
        asks = (
            f"Which {noun} comes after {here}?",
            f"What {noun} comes after {here}?",
            f"What comes after {here}?",
            f"What {noun} is after {here}?",
        )
        return here, asks, f"After {here} comes {after}."
    if style == 1:
        asks = (f"Which {noun} comes before {here}?", f"What {noun} comes before {here}?", f"What comes before {here}?")
        return here, asks, f"Before {here} comes {before}."
    if style == 2:
        whole, count = ("week", "seven") if noun == "day" else ("year", "twelve")
        asks = (
            f"How many {noun}s are in a {whole}?",
            f"How many {noun}s does a {whole} have?",
            f"How many {noun}s are there in a {whole}?",
        )
        return whole, asks, f"A {whole} has {count} {noun}s."
    asks = (
        f"Name the {noun}s.",
        f"What are the {noun}s of the {'week' if noun == 'day' else 'year'}?",
        f"List the {noun}s.",
    )
    return noun, asks, f"The {noun}s are {', '.join(names[:-1])} and {names[-1]}."


def total(rng: random.Random) -> Fact:
    a = rng.randint(0, 20)
    asks: tuple[str, ...]
    if rng.random() < 0.5:
        b = rng.randint(0, 20 - a)
        asks = (
            "What is {} + {}?",
            "What is {} plus {}?",
            "How much is {} plus {}?",
            "{} + {} = ?",
            "Add {} and {}.",
            "How much is {} + {}?",
        )
        sign, result = "plus", a + b
    else:
        b = rng.randint(0, a)
        asks = (
            "What is {} - {}?",
            "What is {} minus {}?",
            "How much is {} minus {}?",
            "{} - {} = ?",
            "How much is {} - {}?",
        )
        sign, result = "minus", a - b
    return f"{a} {sign} {b}", tuple(line.format(a, b) for line in asks), f"{a} {sign} {b} is {result}."


def counting(rng: random.Random) -> Fact:
    style, n = rng.random(), rng.randint(1, 19)
    if style < 0.3:
        start = 1 if rng.random() < 0.6 else rng.randint(0, 15)
        end = rng.randint(start + 2, 20)
        asks = (
            f"Count from {start} to {end}.",
            f"Please count from {start} to {end}.",
            f"Can you count from {start} to {end}?",
        )
        return f"{start}-{end}", asks, ", ".join(map(str, range(start, end + 1))) + "."
    if style < 0.5:
        return (
            str(n),
            (f"What number comes after {n}?", f"Which number comes after {n}?", f"What comes after {n}?"),
            f"After {n} comes {n + 1}.",
        )
    if style < 0.7:
        return (
            str(n),
            (f"What number comes before {n}?", f"Which number comes before {n}?"),
            f"Before {n} comes {n - 1}.",
        )
    if style < 0.85:
        return str(n), (f"How do you write {n} as a word?", f"Write {n} as a word."), f"{n} is {words.NUMBERS[n]}."
    a, b = rng.sample(range(21), 2)
    return (
        f"{a} or {b}",
        (f"Which is bigger, {a} or {b}?", f"Which number is bigger, {a} or {b}?"),
        f"{max(a, b)} is bigger than {min(a, b)}.",
    )


FACTS: tuple[Callable[[random.Random], Fact], ...] = (
    capital,
    capital,
    capital,
    opposite,
    opposite,
    sound,
    lives,
    young,
    colour_of,
    plural,
    plural,
    job,
    body,
    is_a,
    legs,
    calendar,
    total,
    total,
    total,
    counting,
)


def facts(rng: random.Random, split: Split) -> Turns:
    """One to four everyday questions; a follow-up may be short (`And of Italy?`)."""
    turns = [fact_turn(rng, split) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))]
    if rng.random() < 0.15:
        first, second, third = rng.sample(tuple(words.CAPITALS), 3)
        turns = [
            (f"What is the capital of {first}?", f"The capital of {first} is {words.CAPITALS[first]}."),
            (
                rng.choice((f"And of {second}?", f"And what about {second}?")),
                f"The capital of {second} is {words.CAPITALS[second]}.",
            ),
            (f"And {third}?", f"The capital of {third} is {words.CAPITALS[third]}."),
        ][: rng.randint(2, 3)]
    return turns
