"""Layer policies against brute force over positions."""

from __future__ import annotations

import pytest

from quire.control.memory.policies import FullPolicy, LayerPolicy, WindowPolicy


def needed(start: int, end: int, size: int, window: int | None) -> set[int]:
    """Pages of all positions that tokens [start, end) see, each for itself."""
    lows = [0 if window is None else max(0, p - window + 1) for p in range(start, end)]
    return {position // size for low, p in zip(lows, range(start, end)) for position in range(low, p + 1)}


def policy(size: int, window: int | None) -> LayerPolicy:
    return FullPolicy(size) if window is None else WindowPolicy(size, window)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 7, 16])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_live_pages_are_those_that_are_seen(size: int, window: int | None) -> None:
    for start in range(40):
        for end in range(start + 1, 44):
            assert set(policy(size, window).live(start, end)) == needed(start, end, size, window)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 7, 16])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_the_peak_is_enough_for_every_step(size: int, window: int | None, chunk: int) -> None:
    for length in range(1, 44):
        steps = [(start, min(start + chunk, length)) for start in range(length)]
        most = max(len(policy(size, window).live(start, end)) for start, end in steps)
        assert most <= policy(size, window).peak(length, chunk) <= -(-length // size)
