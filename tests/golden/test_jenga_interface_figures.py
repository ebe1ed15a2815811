"""Jenga, Figures 9 to 11: the paper's interface for layer types, letter by letter."""

from __future__ import annotations

from paper_types import SelfAttention, SlidingWindow

from quire.jenga import access, longest_prefix


def pages(letters: str) -> list[int]:
    """A token's page is its letter's number; there is none before the first."""
    return [0, *map(ord, letters)]


def letters(stamps: dict[int, int]) -> dict[str, int]:
    return {chr(page): stamp for page, stamp in stamps.items()}


def test_figure_10_last_access_times_after_two_requests() -> None:
    layers = full, window = SelfAttention(), SlidingWindow(2)
    first, second = [pages("ABCDEF")] * 2, [pages("ABCDGH")] * 2
    access(layers, first, 0, 4, time=1)  # ABCD->E
    access(layers, first, 5, 5, time=2)  # ABCDE->F, DE->F
    assert letters(window.evictor.last_access) == {"A": 1, "B": 1, "C": 1, "D": 2, "E": 2}
    access(layers, second, 4, 5, time=3)  # ABCDG->H, CDG->H: ABCD was found, of which C and D must be there
    assert letters(full.evictor.last_access) == {"A": 3, "B": 3, "C": 3, "D": 3, "E": 2, "G": 3}
    assert letters(window.evictor.last_access) == {"A": 1, "B": 1, "C": 3, "D": 3, "E": 2, "G": 3}
    for layer in layers:
        assert letters(layer.evictor.prefix_length) == {"A": 1, "B": 2, "C": 3, "D": 4, "E": 5, "G": 5}
    # Balanced: what only the first request had goes before what the second one has; aligned: G before C and D.
    assert "".join(map(chr, full.evictor.order())) == "EGDCBA"
    assert "".join(map(chr, window.evictor.order())) == "BAEGDC"


def test_figure_11_valid_prefixes() -> None:
    text = "ABCDEFGHIJ"
    full = [letter in "ABCDEFGHI" for letter in text]
    window = [letter in "CDHIJ" for letter in text]
    assert SelfAttention().get_possible_prefix(full) == set(range(1, 10))
    assert {text[:p] for p in SlidingWindow(2).get_possible_prefix(window)} == {"ABCD", "ABCDEFGHI", "ABCDEFGHIJ"}
    assert longest_prefix([SelfAttention(), SlidingWindow(2)], [full, window]) == 9
    assert longest_prefix([SelfAttention(), SlidingWindow(2)], [full, [False] * 10]) == 0
