"""The seeds of branches: distinct, pinned, and the same for numbers and arrays of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.vocabulary.seeds import branch_seed, split_mix


def test_split_mix_is_the_published_generator() -> None:
    """The first outputs of the reference implementation (prng.di.unimi.it/splitmix64.c) for the state 1234567."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(1, 6)]
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [split_mix(state) for state in states] == known


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_the_first_branch_keeps_the_seed_and_no_two_share_one(seed: int) -> None:
    seeds = [branch_seed(seed, i) for i in range(128)]
    assert seeds[0] == seed % 2**63
    assert len(set(seeds)) == 128
    assert all(0 <= one < 2**63 for one in seeds)


def test_small_seeds_and_branches_are_all_distinct() -> None:
    """Seeds 1, 2, 3 with n=3 must not give a sample twice, as they would if branch i had seed + i."""
    assert len({branch_seed(seed, i) for seed in range(300) for i in range(128)}) == 300 * 128


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**32)), min_size=1))
def test_arrays_give_what_numbers_give(pairs: list[tuple[int, int]]) -> None:
    seeds, indices = np.array(pairs, dtype=np.uint64).T
    found = branch_seed(seeds, indices)
    assert found.dtype == np.uint64
    assert found.tolist() == [branch_seed(seed, index) for seed, index in pairs]


def test_pinned() -> None:
    """Saved seeds must give tomorrow what they give today."""
    assert [branch_seed(1, i) for i in range(4)] == [1, 8841707400507832956, 8095962701997021336, 2387646179595654958]
