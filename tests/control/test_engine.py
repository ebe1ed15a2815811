"""The engine's own: counts of seconds, and stops that its readers find."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from memories import MEMORIES, Build

from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.recent import LAST, Recent, Step
from quire.control.scheduler import Scheduler
from quire.sim.echo import EchoRunner
from quire.vocabulary.method import Advance, Branch, Choice, Context
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import StepResult


class Timed(EchoRunner):
    """Its n-th step takes n/8 seconds, counted from when the step before it ended."""

    def collect(self, ticket: int) -> StepResult:
        return super().collect(ticket)._replace(seconds=ticket / 8)


def engine_of(
    runner: EchoRunner, build: Build | None = None, budget: int = 64, preemption: str = "recompute"
) -> Engine:
    memory = MEMORIES["paged-4"](build or Build())
    runner.bind(memory.geometry)
    scheduler = Scheduler(memory, budget=budget, max_seqs=8, max_len=48, preemption=preemption)
    return Engine(scheduler, runner, Limits(512, 48, 16), clock=time.monotonic)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_seconds_that_do_not_overlap_are_added_as_they_are(depth: int) -> None:
    """With steps in flight too, each step's seconds count once and when it is collected."""
    runner = Timed(depth)
    engine = engine_of(runner)
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.unfinished:
        engine.step()
        assert engine.stats.step_seconds == sum(n / 8 for n in range(1, runner.collected + 1))
    assert runner.collected == engine.stats.steps == 9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_steps_are_noted_from_when_somebody_watches(depth: int) -> None:
    """What each did adds up to what the engine counted since; steps that were planned before aren't noted."""
    engine = engine_of(Timed(depth), Build(tokens=96, host=24), 16, "auto")
    scheduler = engine.scheduler
    for name in "abcdef":
        engine.add(name, [ord(name)] * 9, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(2):
        engine.step()
    begun, computed = engine.stats.steps, engine.stats.computed_tokens
    under_way = sum(len(row.tokens) for plan, _ in engine.flight for row in plan.rows)
    before, engine.recent = dict(scheduler.preempted), Recent(scheduler.preempted)
    engine.add("g", [7] * 12, SamplingParams(max_tokens=2))
    steps = list[Step]()
    while engine.unfinished:
        engine.step()
        steps += [step for step in engine.recent.steps if not steps or step.number > steps[-1].number]
        assert len(engine.recent.steps) <= LAST
    assert [step.number for step in steps] == list(range(begun + 1, engine.stats.steps + 1))
    assert [step.ms for step in steps] == [125.0 * step.number for step in steps]
    told = sum(step.tokens + step.rows for step in steps)
    assert told == engine.stats.computed_tokens - computed - under_way
    assert max(step.tokens for step in steps) > 8
    assert sum(step.swapped for step in steps) == scheduler.preempted["swap"] - before["swap"]
    assert sum(step.recomputed for step in steps) == scheduler.preempted["recompute"] - before["recompute"]
    assert scheduler.preemptions > sum(before.values())


class Second:
    """Two branches, of which the second goes on, until both that it becomes do: what readers call 0 never has that
    index here, and then two have one text."""

    width = 2

    def __init__(self) -> None:
        self.steps = 0

    def top(self, context: Context) -> int:
        return 2

    def keep(self) -> int:
        return 2

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance:
        self.steps += 1
        parents = {1: [0, 0], 2: [1], 3: [0], 4: [0, 0]}.get(self.steps, range(len(branches)))
        return Advance(tuple(Choice(parent, 7 if self.steps > 1 else at, -1.0) for at, parent in enumerate(parents)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", [3, 4, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_in_a_methods_text_ends_all_of_its_branches(depth: int, steps: int, n: int) -> None:
    """Readers see what all branches agree on, under numbers that aren't the branches' own."""
    engine = engine_of(EchoRunner(depth))
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True, method=Second, n=n))
    told = [output for _ in range(steps) for output in engine.step()]
    assert {output.branch for output in told if output.tokens} == set(range(n))
    ended = [engine.stop("a", branch, "so") for branch in range(n)]
    assert ended[0] is True
    assert not any(ended[1:])
    assert engine.requests == {}
    for _ in range(depth):
        assert engine.step() == []
    assert not engine.unfinished
    assert engine.stats.finished == {"stop": n}
    assert engine.stats.steps <= steps + depth
    engine.scheduler.memory.check()
