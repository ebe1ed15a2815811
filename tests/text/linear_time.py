"""How many times as long one thing takes as another, on a machine that others use."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

TURNS = 5
LEAST = 1e-3  # seconds that are added to both: what takes microseconds says nothing


def ratio(one: Callable[[], object], other: Callable[[], object], enough: float) -> float:
    """By the least processor time of each, in turns, until it is below `enough` or TURNS are over. Without Python's
    collector, which walks through all objects again and again while many are made, these and others."""
    best = [float("inf")] * 2
    for _ in range(TURNS):
        for at, run in enumerate((one, other)):
            best[at] = min(best[at], _seconds(run))
        if (best[0] + LEAST) / (best[1] + LEAST) < enough:
            break
    return (best[0] + LEAST) / (best[1] + LEAST)


def repeated(piece: str, size: int) -> str:
    return (piece * (size // len(piece) + 1))[:size]


def _seconds(run: Callable[[], object]) -> float:
    gc.disable()
    try:
        began = time.thread_time()
        run()
        return time.thread_time() - began
    finally:
        gc.enable()
