"""The seeds of branches: samples are a function of the request's seed, the branch and the position."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt

UInt64 = TypeVar("UInt64", int, npt.NDArray[Any])  # the arrays are of uint64
WORD_MASK, SEED_MASK = 2**64 - 1, 2**63 - 1


def splitmix64(state: UInt64) -> UInt64:
    """Return the output function of SplitMix64 (Steele et al. 2014), a bijection, of one or an array of 64-bit
    words."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD_MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD_MASK
    state ^= state >> 31  # not in the caller's array: `state` is a copy here
    return state


def branch_seed(seed: UInt64, index: UInt64) -> UInt64:
    """Return the seed, below 2**63, of branch `index` of a request with `seed`. Branch 0 has the request's seed. The
    seeds of the others are hashes, so that requests with seeds 1, 2 and 3 don't share branches."""
    seed = seed & SEED_MASK
    seed ^= splitmix64(index * (splitmix64(seed) | 1) & WORD_MASK) & SEED_MASK
    return seed
