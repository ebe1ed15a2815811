"""The seeds of branches: what is drawn is a function of a request's seed, the branch and the position, everywhere."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt

Word = TypeVar("Word", int, npt.NDArray[Any])  # the arrays are of uint64
WORD, SEEDS = 2**64 - 1, 2**63 - 1


def split_mix(state: Word) -> Word:
    """The output function of SplitMix64 (Steele et al. 2014), a bijection of 64-bit words: one, or an array of them."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
    state ^= state >> 31  # its own copy by now
    return state


def branch_seed(seed: Word, index: Word) -> Word:
    """The seed, below 2**63, of branch `index` of a request: a result depends on the request's seed and the branch
    alone. Branch 0 has the request's own seed; the others' are no other small seed's, lest the branches of seeds 1, 2
    and 3 be each other's."""
    seed = seed & SEEDS
    seed ^= split_mix(index * (split_mix(seed) | 1) & WORD) & SEEDS
    return seed
