"""Which phrases token sequences end with, compared with Python's slices."""

from __future__ import annotations

import random

import torch

from quire.data.runner.penalties import Phrases, TokenStatistics
from quire.data.runner.sampler import Rules
from quire.vocabulary.plan import Sampling


def test_endings_of_several_slots_equal_brute_force() -> None:
    chance, device = random.Random(5), torch.device("cpu")
    statistics = TokenStatistics(4, device)
    texts = [[chance.randrange(3) for _ in range(length)] for length in (1, 2, 5, 300)]
    for slot, text in enumerate(texts):
        statistics.birth(slot, text, 1)
    some = [[tuple(chance.randrange(3) for _ in range(chance.choice((1, 2, 3, 6)))) for _ in range(40)] for _ in "ab"]
    some[0] += [tuple(texts[3]), tuple(texts[3][1:]), (0, *texts[3])]
    phrases = [Phrases.of(each) for each in some]
    slots, which = [3, 0, 2, 1, 3], [0, 0, 1, 1, 1]
    found = statistics.ends_with(slots, [phrases[i] for i in which])
    wanted = [tuple(texts[slot][-len(p) :]) == p for slot, i in zip(slots, which) for p in some[i]]
    assert found.tolist() == wanted
    assert {True, False} == set(wanted)


def test_a_long_word_costs_its_own_tokens_only() -> None:
    words = ((1,) * 401, *((2, 3),) * 100)
    rules = Rules.of(Sampling(bad_word_ids=words), 10, (0,), torch.device("cpu"))
    assert len(rules.openings.tokens) == 400 + 100
