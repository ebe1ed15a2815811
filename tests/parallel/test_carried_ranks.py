"""Three ranks as processes, from their start to sums that are carried: exact, as the bench and the test on GPUs ask."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.link.child import BOOT
from quire.parallel import starting
from quire.parallel.frames import Hello
from quire.parallel.remote import RemoteRunner
from quire.parallel.sides import start_program
from quire.vocabulary.layout import Layout

RANKS, EXACT, REPLAYS, PATIENCE = 3, 0, 2, 60.0
TESTS = Path(__file__).parents[1]
PROGRAM = ("-P", "-c", BOOT, str(TESTS), "carried_ranks")


@pytest.mark.soak
def test_three_ranks_carry_what_they_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folders = (str(TESTS / "gpu"), str(TESTS / "data/kernels/triton"), *filter(None, sys.path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    config = EngineConfig(tp=RANKS, device="cuda")
    runner = RemoteRunner(RANKS, PATIENCE, partial(start_program, program=PROGRAM))
    try:
        starting.meet(runner, config)
        meeting = runner.meeting.descriptors
        runner.hello([Hello(config, part, (), 1, PATIENCE, meeting) for part in Layout(RANKS).parts()])
        runner.wait()
        runner.warm_up(21, EXACT)
        assert runner.ask("found") == [{"wrong": 0, "pieces": 6, "calls": 6}] * RANKS
        runner.warm_up(18, REPLAYS)
        assert runner.ask("found") == [{"wrong": 0}] * RANKS
    finally:
        runner.close()
