"""The engine's own counts: seconds of steps."""

from __future__ import annotations

import time

import pytest
from memories import MEMORIES, Build

from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.scheduler import Scheduler
from quire.sim.echo import EchoRunner
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import StepResult


class Timed(EchoRunner):
    """Its n-th step takes n/8 seconds, counted from when the step before it ended."""

    def collect(self, ticket: int) -> StepResult:
        return super().collect(ticket)._replace(seconds=ticket / 8)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_seconds_that_do_not_overlap_are_added_as_they_are(depth: int) -> None:
    """With steps in flight too, each step's seconds count once and when it is collected."""
    memory = MEMORIES["paged-4"](Build())
    runner = Timed(depth)
    runner.bind(memory.geometry)
    scheduler = Scheduler(memory, budget=64, max_seqs=8, max_len=48)
    engine = Engine(scheduler, runner, Limits(512, 48, 8), clock=time.monotonic)
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.unfinished:
        engine.step()
        assert engine.stats.step_seconds == sum(n / 8 for n in range(1, runner.collected + 1))
    assert runner.collected == engine.stats.steps == 9
