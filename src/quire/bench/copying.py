"""Texts for models that follow instructions to repeat: a copying task, as edits of code and quotes are."""

from __future__ import annotations

import numpy as np

REQUEST = "Repeat the following text word for word.\n\n"
SUBJECTS = (
    "The captain", "A young baker", "My neighbour", "The old teacher", "Our doctor", "The gardener", "A tired sailor",
    "The painter", "Her brother", "The judge", "A farmer", "The nurse",
)  # fmt: skip
VERBS = (
    "bought", "found", "carried", "repaired", "sold", "borrowed", "painted", "lost", "hid", "drew", "washed", "counted",
)  # fmt: skip
OBJECTS = (
    "a wooden chair", "two red apples", "the heavy lamp", "his blue bicycle", "a small boat", "three letters",
    "an iron key", "the broken clock", "some warm bread", "nine silver coins", "a leather bag", "the tall ladder",
)  # fmt: skip
CLOSINGS = (
    "at the market", "near the river", "behind the station", "in the library", "on the bridge", "beside the harbour",
    "under the stairs", "by the window", "before sunrise", "after lunch", "in the snow", "outside the school",
)  # fmt: skip
PARTS = (SUBJECTS, VERBS, OBJECTS, CLOSINGS)
MAX_SENTENCES = len(SUBJECTS)


def random_text(rng: np.random.Generator, sentences: int) -> str:
    """Return a text of up to MAX_SENTENCES sentences. None of their parts occurs twice, so that small models, too, can
    follow the text."""
    orders = [rng.permutation(len(part))[:sentences] for part in PARTS]
    return " ".join(" ".join(part[i] for part, i in zip(PARTS, chosen)) + "." for chosen in zip(*orders))
