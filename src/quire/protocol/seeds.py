"""The seeds of branches: what is drawn is a function of a request's seed, the branch and the position, everywhere."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt

UInt64 = TypeVar("UInt64", int, npt.NDArray[Any])  # the arrays are of uint64
WORD_MASK, SEED_MASK = 2**64 - 1, 2**63 - 1


def splitmix64(state: UInt64) -> UInt64:
    """The output function of SplitMix64 (Steele et al. 2014), a bijection of 64-bit words: one, or an array of them."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD_MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD_MASK
    state ^= state >> 31  # its own copy by now
    return state


def branch_seed(seed: UInt64, index: UInt64) -> UInt64:
    """The seed, below 2**63, of branch `index` of a request: a result depends on the request's seed and the branch
    alone. Branch 0 has the request's own seed; the others' are no other small seed's, lest the branches of seeds 1, 2
    and 3 be each other's."""
    seed = seed & SEED_MASK
    seed ^= splitmix64(index * (splitmix64(seed) | 1) & WORD_MASK) & SEED_MASK
    return seed
