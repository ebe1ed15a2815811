"""Random traces whose runner is lost now and then, at any call: with another one and an empty memory every request goes
on, and its outputs are the oracle's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from addresses import runner_for
from memories import MAX_LEN, VOCAB, Build
from pictured import LAYOUTS
from traces import Checked, Trace, Watched

from quire.core.recovery import RunnerRestarter
from quire.errors import RanksLost

SOME = ("paged-4", "virtual-mixed", "unlike-large-8-12-1-3", "states-window", "inside-4", "pow2-layer-tables")


class Flaky:
    """A runner that is lost at any call, and stays so."""

    def __init__(self, runner: Checked, rng: random.Random, often: float) -> None:
        self.runner, self.rng, self.often, self.lost = runner, rng, often, False
        self.depth = runner.depth

    def __getattr__(self, name: str) -> Any:
        called = getattr(self.runner, name)

        def call(*args: Any) -> Any:
            self.lost = self.lost or self.rng.random() < self.often
            if self.lost and name != "close":
                raise RanksLost("the device is gone")
            return called(*args)

        return call


def run(name: str, seed: int, requests: int = 12) -> int:
    """A random trace; how often its runner was lost."""
    rng = random.Random(seed)
    depth, budget, often = rng.choice((1, 2, 3)), rng.choice((16, 64)), rng.choice((0.02, 0.1))
    build = Build(rng.choice((96, 128, 256)), budget, 8, MAX_LEN, rng.choice((0, 12)), 0)
    trace = Trace(
        LAYOUTS[name](build), seed=seed, depth=depth, budget=budget,
        preemption=rng.choice(("swap", "recompute", "auto")),
        restarter=RunnerRestarter(lambda: anew(), max_restarts=10**6),
    )  # fmt: skip

    def anew() -> Any:
        trace.memory = Watched(LAYOUTS[name](build))
        trace.runner = Checked(runner_for(trace.memory.kv_config, depth, VOCAB), trace.memory, budget)
        trace.runner.bind(trace.memory.kv_config)
        return Flaky(trace.runner, rng, often), trace.memory

    trace.engine.runner = Flaky(trace.runner, rng, often)  # type: ignore[assignment]
    trace.run(requests)
    return trace.engine.stats.restarts


@pytest.mark.parametrize("name", SOME)
def test_requests_outlive_their_runner(name: str) -> None:
    assert run(name, SOME.index(name)) > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_requests_outlive_their_runner(name: str) -> None:
    assert sum(run(name, seed) for seed in range(100, 120)) > 20
