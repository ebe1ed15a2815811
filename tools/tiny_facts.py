"""Everyday facts of the bundled model's world, each with several wordings of its question.

A few (fact, wording) pairs are kept out of training, so that held-out questions are new although both halves are known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import tiny_words as words
from tiny_riddles import Turns
from tiny_story import Split, is_unseen
from tiny_words import article, phrases

Fact = tuple[str, tuple[str, ...], str]
"""What the fact is about, the wordings of its question, and the answer."""
Pair = tuple[str, str]


def ask(rng: random.Random, split: Split, fact: str, wordings: tuple[str, ...]) -> str:
    """One wording of a question about `fact` that this split may use."""
    allowed = [line for line in wordings if is_unseen(fact, line) == split.unseen_pairs]
    return rng.choice(allowed or wordings[:1])


def fact_turn(rng: random.Random, split: Split) -> Pair:
    """One question about the world and its answer."""
    draw = rng.choice(FACTS)
    fact, wordings, answer = draw(rng)
    return ask(rng, split, fact, wordings), answer


def of_pair(pair: Pair, asks: str, answer: str) -> Fact:
    """The fact that a pair of words makes of wordings (between `|`) and an answer. Both may name the two words, {k} and
    {v}, also with articles, {a} and {b}; in capitals as a sentence begins."""
    k, v = pair
    names = {"k": k, "v": v, "a": article(k), "b": article(v)}
    names |= {name.upper(): word[0].upper() + word[1:] for name, word in names.items()}
    return k, tuple(line.format_map(names) for line in phrases(asks)), answer.format_map(names)


def known(rng: random.Random, table: dict[str, str], asks: str, answer: str, back: Pair = ("", "")) -> Fact:
    """A pair of the table. With `back`, a question and answer for the pair's words in reverse, asked now and then."""
    k, v = rng.choice(tuple(table.items()))
    if back[0] and rng.random() < 0.25:
        return of_pair((v, k), *back)
    return of_pair((k, v), asks, answer)


def opposite(rng: random.Random) -> Fact:
    a, b = rng.choice(tuple(words.OPPOSITES.items()))
    if rng.random() < 0.5 and b not in words.OPPOSITES and list(words.OPPOSITES.values()).count(b) == 1:
        a, b = b, a
    asks = (
        "What is the opposite of {k}? | Tell me the opposite of {k}. | What's the opposite of {k}? "
        '| Which word is the opposite of {k}? | What is the opposite of "{k}"?'
    )
    return of_pair((a, b), asks, "The opposite of {k} is {v}.")


def is_a(rng: random.Random) -> Fact:
    kind = rng.choice(tuple(words.KINDS))
    thing = rng.choice(words.KINDS[kind])
    noun = thing if kind == "colour" else article(thing)
    start = noun[0].upper() + noun[1:]
    style = rng.random()
    if style < 0.4:
        asks = phrases(f"What is {noun}? | What kind of thing is {noun}? | Tell me what {noun} is.")
        return thing, asks, f"{start} is {article(kind)}."
    if style < 0.7:
        return thing, (f"Is {noun} {article(kind)}?",), f"Yes, {noun} is {article(kind)}."
    alike = ({"animal", "bird"}, {"colour", "flower"})
    wrong = rng.choice([k for k in words.KINDS if thing not in words.KINDS[k] and {k, kind} not in alike])
    return thing, (f"Is {noun} {article(wrong)}?",), f"No, {noun} is {article(kind)}."


def calendar(rng: random.Random) -> Fact:
    names, noun, whole, count = rng.choice(((words.DAYS, "day", "week", "seven"),
                                            (words.MONTHS, "month", "year", "twelve")))  # fmt: skip
    i = rng.randrange(len(names))
    here, after, before = names[i], names[(i + 1) % len(names)], names[i - 1]
    style = rng.randrange(4)
    if style == 0:
        asks = (f"Which {noun} comes after {here}? | What {noun} comes after {here}? | What comes after {here}? "
                f"| What {noun} is after {here}?")  # fmt: skip
        return here, phrases(asks), f"After {here} comes {after}."
    if style == 1:
        asks = f"Which {noun} comes before {here}? | What {noun} comes before {here}? | What comes before {here}?"
        return here, phrases(asks), f"Before {here} comes {before}."
    if style == 2:
        asks = (f"How many {noun}s are in a {whole}? | How many {noun}s does a {whole} have? "
                f"| How many {noun}s are there in a {whole}?")  # fmt: skip
        return whole, phrases(asks), f"A {whole} has {count} {noun}s."
    asks = f"Name the {noun}s. | What are the {noun}s of the {whole}? | List the {noun}s."
    return noun, phrases(asks), f"The {noun}s are {', '.join(names[:-1])} and {names[-1]}."


def total(rng: random.Random) -> Fact:
    a = rng.randint(0, 20)
    if rng.random() < 0.5:
        b = rng.randint(0, 20 - a)
        asks = (f"What is {a} + {b}? | What is {a} plus {b}? | How much is {a} plus {b}? | {a} + {b} = ? "
                f"| Add {a} and {b}. | How much is {a} + {b}?")  # fmt: skip
        sign, result = "plus", a + b
    else:
        b = rng.randint(0, a)
        asks = (f"What is {a} - {b}? | What is {a} minus {b}? | How much is {a} minus {b}? | {a} - {b} = ? "
                f"| How much is {a} - {b}?")  # fmt: skip
        sign, result = "minus", a - b
    return f"{a} {sign} {b}", phrases(asks), f"{a} {sign} {b} is {result}."


def counting(rng: random.Random) -> Fact:
    style, n = rng.random(), rng.randint(1, 19)
    if style < 0.3:
        start = 1 if rng.random() < 0.6 else rng.randint(0, 15)
        end = rng.randint(start + 2, 20)
        asks = (f"Count from {start} to {end}. | Please count from {start} to {end}. "
                f"| Can you count from {start} to {end}?")  # fmt: skip
        return f"{start}-{end}", phrases(asks), ", ".join(map(str, range(start, end + 1))) + "."
    if style < 0.5:
        asks = f"What number comes after {n}? | Which number comes after {n}? | What comes after {n}?"
        return str(n), phrases(asks), f"After {n} comes {n + 1}."
    if style < 0.7:
        asks = f"What number comes before {n}? | Which number comes before {n}?"
        return str(n), phrases(asks), f"Before {n} comes {n - 1}."
    if style < 0.85:
        return str(n), (f"How do you write {n} as a word?", f"Write {n} as a word."), f"{n} is {words.NUMBERS[n]}."
    a, b = rng.sample(range(21), 2)
    asks = f"Which is bigger, {a} or {b}? | Which number is bigger, {a} or {b}?"
    return f"{a} or {b}", phrases(asks), f"{max(a, b)} is bigger than {min(a, b)}."


Draw = Callable[[random.Random], Fact]
CAPITAL: Draw = partial(
    known, table=words.CAPITALS, answer="The capital of {k} is {v}.",
    asks="What is the capital of {k}? | Name the capital of {k}. | Which city is the capital of {k}? "
         "| Do you know the capital of {k}? | Tell me the capital of {k}. | What's the capital of {k}?",
    back=("{k} is the capital of which country? | Which country has the capital {k}?", "{V}."),
)  # fmt: skip
SOUND: Draw = partial(
    known, table=words.SOUNDS, answer="{A} says {v}.",
    asks="What sound does {a} make? | What does {a} say? | Which sound does {a} make? | Tell me what {a} says.",
    back=('Which animal says "{k}"? | What animal says {k}?', "{B} says {k}."),
)  # fmt: skip
LIVES: Draw = partial(
    known, table=words.HOMES, answer="{A} lives {v}.",
    asks="Where does {a} live? | Where is the home of {a}? | Where can I find {a}? | Tell me where {a} lives.",
)  # fmt: skip
YOUNG: Draw = partial(
    known, table=words.YOUNG, answer="A baby {k} is called {b}.",
    asks="What is a baby {k} called? | What do we call a young {k}? | What is the name for a baby {k}?",
)  # fmt: skip
COLOUR: Draw = partial(
    known, table=words.THING_COLOURS, answer="{K} is {v}.",
    asks="What colour is {k}? | What color is {k}? | Which colour does {k} have? | Tell me the colour of {k}.",
)  # fmt: skip
PLURAL: Draw = partial(
    known, table=words.PLURALS, answer="The plural of {k} is {v}.",
    asks='What is the plural of {k}? | Tell me the plural of {k}. | What is the plural of "{k}"? | One {k}, two what?',
)  # fmt: skip
JOB: Draw = partial(
    known, table=words.JOBS, answer="{V} {k}.",
    asks="Who {k}? | What do we call someone who {k}? | Tell me who {k}.",
)  # fmt: skip
BODY: Draw = partial(
    known, table=words.BODY, answer="We {k} with {v}.",
    asks="What do we {k} with? | Which part of the body do we {k} with? | With what do we {k}?",
)  # fmt: skip
LEGS: Draw = partial(
    known, table=words.LEGS, answer="{A} has {v} legs.",
    asks="How many legs does {a} have? | How many legs has {a}?",
)  # fmt: skip
FACTS: tuple[Draw, ...] = (
    CAPITAL, CAPITAL, CAPITAL, opposite, opposite, SOUND, LIVES, YOUNG, COLOUR, PLURAL, PLURAL, JOB, BODY, is_a, LEGS,
    calendar, total, total, total, counting,
)  # fmt: skip


def facts(rng: random.Random, split: Split) -> Turns:
    """One to four everyday questions; a follow-up may be short (`And of Italy?`)."""
    turns = [fact_turn(rng, split) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))]
    if rng.random() < 0.15:
        first, second, third = rng.sample(tuple(words.CAPITALS), 3)
        follow = rng.choice((f"And of {second}?", f"And what about {second}?"))
        asks = {first: f"What is the capital of {first}?", second: follow, third: f"And {third}?"}
        answers = [(text, f"The capital of {name} is {words.CAPITALS[name]}.") for name, text in asks.items()]
        turns = answers[: rng.randint(2, 3)]
    return turns
