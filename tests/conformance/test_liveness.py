"""Whatever arrives, is aborted, preempted or swapped: work that waits is done in a bounded number of steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from memories import EVERY, MAX_LEN, Build
from pictured import PICTURED
from soak import soak
from test_stateful import machine
from traces import AT_LENGTH, Trace

KNOWN = {**EVERY, **PICTURED}
OPS = ("arrive", "arrive", "arrive", "step", "step", "steps", "abort", "preempt", "preempt", "prefix", "settle")


class Schedules(RuleBasedStateMachine):
    """Arrivals, aborts, preemptions by any way, steps and prefixes in any order."""

    name = "paged-4"

    @initialize(
        tokens=st.integers(16, 160),
        budget=st.integers(1, 20),
        host=st.sampled_from((0, 5, 1000)),
        prefix_tokens=st.sampled_from((0, 12)),
        way=st.sampled_from(("swap", "recompute", "auto")),
        depth=st.integers(1, 3),
        max_seqs=st.integers(1, 8),
        unforked=st.sampled_from((0.0, 0.0, 0.2)),
    )
    def build(self, tokens: int, budget: int, max_seqs: int, host: int, prefix_tokens: int, depth: int, **how) -> None:
        memory = KNOWN[self.name](Build(tokens, budget, max_seqs, MAX_LEN, host, prefix_tokens))
        self.trace = Trace(
            memory, seed=0, depth=depth, budget=budget, max_seqs=max_seqs, preemption=how["way"],
            unforked=how["unforked"],
        )  # fmt: skip
        self.added = 0

    @rule(op=st.sampled_from(OPS), seed=st.integers(0, 2**32))
    def act(self, op: str, seed: int) -> None:
        getattr(self, op)(random.Random(seed))

    def arrive(self, rng: random.Random) -> None:
        self.trace.add(self.trace.draw(rng, str(self.added)))
        self.added += 1

    def step(self, rng: random.Random) -> None:
        if self.trace.engine.has_unfinished_requests:
            self.trace.step()

    def steps(self, rng: random.Random) -> None:
        for _ in range(rng.randint(2, 12)):
            self.step(rng)

    def abort(self, rng: random.Random) -> None:
        if self.trace.asked:
            self.trace.abort(rng.choice(list(self.trace.asked)))

    def preempt(self, rng: random.Random) -> None:
        """The youngest is preempted though there is room; like the scheduler, only when nothing is in flight."""
        scheduler = self.trace.scheduler
        while self.trace.engine.in_flight:
            self.collect()
        if scheduler.running:
            scheduler.preemption = rng.choice(("swap", "recompute"))
            scheduler._preempt(next(reversed(scheduler.running)))

    def collect(self) -> None:
        """Take in a step without planning the next one."""
        engine = self.trace.engine
        depth, engine.depth = engine.depth, 0
        self.trace.step()
        engine.depth = depth

    def prefix(self, rng: random.Random) -> None:
        if self.trace.registers:
            self.trace.prefixes()

    def settle(self, rng: random.Random) -> None:
        """All that was asked for is done: each token of each branch is computed a few times at most."""
        engine = self.trace.engine
        bound = 20 + 4 * MAX_LEN * sum(request.params.width for request in engine.requests.values())
        while engine.has_unfinished_requests:
            self.trace.step()
            bound -= 1
            assert bound > 0, "the engine makes no progress"

    def teardown(self) -> None:
        if hasattr(self, "trace"):
            self.settle(random.Random(0))
            self.trace.drained()


@pytest.mark.share(8)
@pytest.mark.parametrize(("examples", "steps"), [(12, 25), pytest.param(3000, 50, marks=AT_LENGTH)])
@pytest.mark.parametrize("name", KNOWN)
def test_all_work_is_done(name: str, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine(Schedules, name), settings=settings(max_examples=examples, stateful_step_count=steps)
    )


@pytest.mark.parametrize(
    ("name", "requests"),
    [("paged-4", 300), ("states-window", 300), *(pytest.param(name, 10**5, marks=AT_LENGTH)
    for name in ("paged-4", "states-window", "large-cross-4", "large-vision-4"))],
)  # fmt: skip
def test_many_requests_leave_nothing_behind(name: str, requests: int) -> None:
    told = soak(requests, name=name)
    assert told["pages_left"] == told["slots_left"] == told["host_pages_left"] == 0
    assert min(told["preemptions_by_swap"], told["preemptions_by_recomputation"], told["forks"], told["aborted"]) > 0
