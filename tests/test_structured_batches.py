"""Batches of fuzzed schemas and patterns through the engine, preempted both ways (structured_batches.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structured_batches import BATCHES, ENGINE, SHORT, run

from quire import LLM


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    with LLM(**ENGINE) as found:
        yield found


@pytest.fixture(scope="module")
def swapping() -> Iterator[LLM]:
    with LLM(**ENGINE, **SHORT, preemption="swap") as found:
        yield found


@pytest.fixture(scope="module")
def recomputing() -> Iterator[LLM]:
    with LLM(**ENGINE, **SHORT, preemption="recompute") as found:
        yield found


@pytest.mark.share(25)
@pytest.mark.parametrize("number", range(0, BATCHES, 2))
def test_swapped(number: int, roomy: LLM, swapping: LLM) -> None:
    run(number, roomy, swapping)


@pytest.mark.share(25)
@pytest.mark.parametrize("number", range(1, BATCHES, 2))
def test_recomputed(number: int, roomy: LLM, recomputing: LLM) -> None:
    run(number, roomy, recomputing)
    assert not recomputing.engine.scheduler.preempted["swap"]
