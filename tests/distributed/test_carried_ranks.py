"""Three ranks as processes, from their start to sums that are carried: exact, as the bench and the test on GPUs ask."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ranks_alone import joined

from quire.ipc.child_process import BOOTSTRAP

RANKS, EXACT, REPLAYS, PATIENCE = 3, 0, 2, 60.0
TESTS = Path(__file__).parents[1]
PROGRAM = ("-P", "-c", BOOTSTRAP, str(TESTS), "carried_ranks")


@pytest.mark.soak
def test_three_ranks_carry_what_they_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folders = (str(TESTS / "gpu"), str(TESTS / "kernels/triton"), *filter(None, sys.path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    with joined(RANKS, PROGRAM, PATIENCE) as runner:
        runner.warm_up(21, EXACT)
        assert runner.query("found") == [{"wrong": 0, "pieces": 6, "calls": 6}] * RANKS
        runner.warm_up(18, REPLAYS)
        assert runner.query("found") == [{"wrong": 0}] * RANKS
