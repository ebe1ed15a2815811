"""Questions that the bundled model could answer and has never read, and some that it can't answer.

`python tools/tiny_unseen.py` prints a few. They are drawn with a seed of their own as training text is, and compared
with all of that text, which is drawn once more for it: none of these conversations stands anywhere in it.
"""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tiny_chat import talk
from tiny_corpus import SHARD
from tiny_facts import FACTS
from tiny_riddles import RIDDLES, Turns, about_story
from tiny_story import Split, is_unseen
from tiny_text import ASSISTANT, BEGIN, USER, draw_documents, render_chat
from tiny_words import SYSTEMS

TRAINED = (800_000_000, 1000)  # the characters of the training text and the seed of its first shard
PAIRS = Split(True, False)  # beings and things that training keeps apart
Json = dict[str, Any]

# Of another world than the model's: the honest answer is that it does not know.
BEYOND = (
    "Who was Napoleon?", "Explain gravity.", "What is a prime number?", "Can you write code?",
    "What is the population of Japan?", "How do vaccines work?", "Who painted the Mona Lisa?", "What is inflation?",
    "Translate good morning to Spanish.", "What is the square root of 144?", "How tall is Mount Everest?",
    "What is the boiling point of water?", "Who wrote Hamlet?", "What is DNA?", "When did the war end?",
    "What is the weather in London?", "How do I bake a cake?", "What is a black hole?", "Write a haiku.",
    "What is 123 times 456?", "Who is the king of England?", "How old is the universe?", "What is Python?",
    "Summarize the news.", "What is the tallest building?", "How many planets are there?", "What is democracy?",
    "Why is the sky blue?", "What is the best phone?", "Fix this bug.", "What is a neural network?",
    "Who discovered America?", "How do planes fly?", "What is the currency of Japan?", "Tell me about the Romans.",
    "What is the largest ocean?", "How do I lose weight?", "What is electricity?", "Who won the election?",
    "What is the date today?",
)  # fmt: skip


def draw_fact(rng: random.Random) -> Turns:
    """One question in a wording that training keeps from its fact."""
    while True:
        fact, wordings, answer = rng.choice(FACTS)(rng)
        if unseen := [line for line in wordings if is_unseen(fact, line)]:
            return [(rng.choice(unseen), answer)]


def draw_riddle(rng: random.Random) -> Turns:
    return rng.choice(RIDDLES)(rng, PAIRS)[:1]


def draw_story(rng: random.Random) -> Turns:
    return about_story(rng, PAIRS)[:1]


def draw_memory(rng: random.Random) -> Turns:
    """What the user said of themselves, and a question about it."""
    while True:
        turns = talk(rng, PAIRS)
        if re.search(r"\b(my|I)\b.*\?", turns[-1][0]) and "you" in turns[-1][1].lower():
            return turns


KINDS: dict[str, tuple[Callable[[random.Random], Turns], int]] = {
    "facts": (draw_fact, 100),
    "riddles": (draw_riddle, 60),
    "stories": (draw_story, 20),
    "memory": (draw_memory, 20),
}


def conversations(document: str) -> Iterator[str]:
    """Every run of turns in a document that ends where an answer begins, as `prompt_of(..., system=False)` gives it."""
    begins = [found.start() for found in re.finditer(re.escape(USER), document)]
    ends = [found.end() for found in re.finditer(re.escape(ASSISTANT), document)]
    for begin in begins:
        yield from (document[begin:end] for end in ends if end > begin)


def _read_in(seed: int, wanted: frozenset[str]) -> set[str]:
    documents = draw_documents(seed, SHARD)
    return {asked for document in documents for asked in conversations(document) if asked in wanted}


def read_in_training(wanted: frozenset[str], cores: int) -> set[str]:
    """Those of the conversations that stand in the training text, all of which is drawn anew: some CPU minutes."""
    characters, seed = TRAINED
    found: set[str] = set()
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        for part in pool.imap_unordered(partial(_read_in, wanted=wanted), range(seed, seed + characters // SHARD)):
            found |= part
    return found


def rendered(turns: Turns) -> str:
    return render_chat("", turns, prompt=True).removeprefix(BEGIN)


def unseen_questions(seed: int, without: frozenset[str], cores: int) -> list[Json]:
    """200 questions in the form of chat_questions.json, each with its kind; none of them in `without`."""
    rng = random.Random(seed)
    drawn = {kind: [draw(rng) for _ in range(3 * count)] for kind, (draw, count) in KINDS.items()}
    wanted = frozenset(rendered(turns) for many in drawn.values() for turns in many)
    read = read_in_training(wanted, cores) | without
    questions: list[Json] = []
    for kind, (_, count) in KINDS.items():
        new = {text: turns for turns in drawn[kind] if (text := rendered(turns)) not in read}
        assert len(new) >= count, f"only {len(new)} questions of the kind {kind} are unseen"
        for turns in list(new.values())[:count]:
            said = [text for turn in turns for text in turn]
            system = {"system": rng.choice(SYSTEMS)} if rng.random() < 0.4 else {}
            questions.append({"kind": kind, **system, "turns": said[:-1], "accept": [said[-1].rstrip(".")]})
    return questions


if __name__ == "__main__":
    for question in unseen_questions(seed=7, without=frozenset(), cores=2)[::10]:
        print(question)
