"""Batches of fuzzed schemas and patterns through the engine, preempted both ways (structured_batches.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structured_batches import BATCHES, ENGINE, SHORT, run

from quire import LLM


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    """A roomy one, and those that are short of memory."""
    with (
        LLM(**ENGINE) as roomy,
        LLM(**ENGINE, **SHORT, preemption="swap") as swapping,
        LLM(**ENGINE, **SHORT, preemption="recompute") as recomputing,
    ):
        yield [roomy, swapping, recomputing]


@pytest.mark.share(25)
@pytest.mark.parametrize("number", range(0, BATCHES, 2))
def test_swapped(number: int, engines: list[LLM]) -> None:
    run(number, engines[0], engines[1])


@pytest.mark.share(25)
@pytest.mark.parametrize("number", range(1, BATCHES, 2))
def test_recomputed(number: int, engines: list[LLM]) -> None:
    run(number, engines[0], engines[2])
    assert not engines[2].engine.scheduler.preemption_counts["swap"]
