"""Loose English: sentences from a small phrase grammar and synonyms for the words of the story templates.

The fixed templates alone would teach the model that nothing else can ever be said; these keep it open to new ones.
"""

from __future__ import annotations

import random

import tiny_words as words
from tiny_words import Being, article, split_words

_LOOSE_NOUNS = split_words(
    "man woman child teacher farmer sailor king queen baker road house "
    "door window tree flower star moon sun cloud night "
    "day morning letter song story word voice name hand eye foot head heart face smile tear dream gift plan idea world "
    "summer spring winter river sea wood fire water wind rain snow storm "
    "drop shelter corner bag coat clothes minute hour "
    "week year sound noise light dark bed room table chair wall street "
    "town bow joy fear fun end way thing friend minute "
    "lunch grandmother mother father sister brother neighbour day doorstep course air sky smell"
)
_LOOSE_ADJECTIVES = split_words(
    "big small old new long short warm cold dry wet happy sad angry tired "
    "poor good bad fine great little strange bright "
    "dark deep high low soft hard loud sweet fresh heavy light strong weak better best alone sorry missing lost safe "
    "beautiful whole same other next last first"
)
NOUNS = (*_LOOSE_NOUNS, *words.ITEMS, *words.ANIMALS, *(place.name for place in words.PLACES))
ADJECTIVES = (*_LOOSE_ADJECTIVES, *words.TRAITS, *words.COLOURS)
DOES = split_words(
    "saw found took held lost made broke carried opened closed washed "
    "painted liked loved wanted knew heard watched followed "
    "met helped called told showed chose shared hid fed forgot remembered owned handed brought kept left"
)
ACTS = split_words(
    "walked ran slept laughed cried smiled sang danced waited sat stood "
    "fell jumped played worked rested lived came went "
    "stayed thought looked shone began stopped lay sank beat searched started clapped"
)
ADVERBS = words.phrases(
    "slowly | quickly | quietly | happily | sadly | often | always | never | soon | again | there | then | today "
    "| later | suddenly | gladly | together | already | at once | in vain | at last | before long | of course "
    "| for a while | in the end | in a minute | at first"
)
WHERE = split_words("in on under behind beside near with without by from over into after before around between")
JOINS = split_words("and but so because when while before after until")

SYNONYMS = {word: tuple(others.split(" / ")) for word, others in words.pairs(
    "walked: strolled / wandered; saw: spotted / noticed; found: discovered; big: large / huge; little: tiny / small; "
    "happy: glad / merry / full of joy; sad: unhappy / sorry; very: really; said: replied / answered / whispered; "
    "asked: wondered; began: started; gave: handed; took: picked up; looked: searched; lived: had a home; "
    "liked: loved; went: came; wanted: wished / hoped; soon: before long / after a short time; hard: difficult; "
    "good: fine; smiled: laughed / grinned; called: named; friend: companion; afraid: scared / full of fear; "
    "ran: hurried / rushed; angry: cross; brave: bold; helped: looked after; strong: solid; there: right there; "
    "together: side by side; again: once more; day: morning / afternoon; was: was still / was also; "
    "Then: After that, / Next, / A moment later,; Soon: Before long,; But: However,; Suddenly: All at once,; "
    "Slowly,: Step by step, / With care,; got: received; sorry: very sorry; fell: tumbled; met: came across; "
    "every: each; noise: sound; at: right at; had: owned / kept; home: back home; put: placed / left; hid: left"
).items()}  # fmt: skip


def vary(rng: random.Random, line: str) -> str:
    """A template with one or two of its words replaced, where it has any that can be."""
    parts = line.split(" ")
    places = [at for at, word in enumerate(parts) if word in SYNONYMS]
    for at in rng.sample(places, min(len(places), rng.randint(1, 2))):
        parts[at] = rng.choice(SYNONYMS[parts[at]])
    return " ".join(parts)


def noun_phrase(rng: random.Random, known: tuple[Being, ...]) -> str:
    style = rng.random()
    if known and style < 0.35:
        return rng.choice(known).name
    noun = rng.choice(NOUNS)
    if rng.random() < 0.4:
        noun = f"{rng.choice(ADJECTIVES)} {noun}"
    if known and style < 0.5:
        return f"{rng.choice(known).his} {noun}"
    return f"the {noun}" if style < 0.8 else article(noun)


def clause(rng: random.Random, known: tuple[Being, ...]) -> str:
    who = noun_phrase(rng, known) if not known or rng.random() < 0.6 else rng.choice(known).he
    style = rng.random()
    if style < 0.4:
        said = f"{who} {rng.choice(DOES)} {noun_phrase(rng, known)}"
    elif style < 0.7:
        said = f"{who} {rng.choice(ACTS)}"
    else:
        said = f"{who} was {rng.choice(ADJECTIVES)}"
    if rng.random() < 0.4:
        said += f" {rng.choice(WHERE)} {noun_phrase(rng, known)}"
    if rng.random() < 0.25:
        said += " " + rng.choice(ADVERBS)
    return said


def free_sentence(rng: random.Random, known: tuple[Being, ...] = ()) -> str:
    """A sentence that is grammatical and means little, about the beings of a story or about anything."""
    said = clause(rng, known)
    style = rng.random()
    if style < 0.15:
        said += f" {rng.choice(JOINS)} {clause(rng, known)}"
    elif style < 0.3:
        said = f"{rng.choice(ADVERBS)} {said}"
    elif style < 0.4:
        said = f"{rng.choice(WHERE)} {noun_phrase(rng, ())}, {said}"
    said = said[0].upper() + said[1:]
    if style > 0.9:
        return f'"{said}," said {noun_phrase(rng, known)}.'
    return said + "."
