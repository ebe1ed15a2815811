"""The steps of random traces are the recorded ones: which sequence gets which slot and pages, what is copied and
swapped, and which tokens each step computes.

After an intended change record them again, and say in the commit which memories differ and why:
`PYTHONPATH=src python tests/conformance/test_recorded.py`."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from memories import EVERY, RESERVED, VOCAB
from traces import run_trace

from bench.echo_runner import EchoRunner
from quire.protocol.step_plan import PageCopy, Poison, StepPlan, SwapIn, SwapOut, TableWrite

FILE = Path(__file__).with_name("recorded.json.gz")
LETTERS = {TableWrite: "t", PageCopy: "c", SwapOut: "o", SwapIn: "i", Poison: "p"}
CASES = [f"{name}-{seed}" for name in EVERY for seed in (1, 4, 7, 8)]  # of which some swap


class Recorder(EchoRunner):
    """Notes every plan."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, vocab_size=VOCAB)
        self.steps: list[Any] = []

    def submit(self, plan: StepPlan) -> int:
        births = [[birth.slot, birth.seq_id, birth.parent_slot] for birth in plan.new_slots]
        ops = [[[LETTERS[type(op)], *op] for op in ops] for ops in (plan.page_ops, plan.overlapped_page_ops)]
        rows = [[row.slot, row.start, len(row.tokens), row.num_samples, len(row.score_tokens)] for row in plan.slices]
        self.steps.append([births, *ops, rows])
        return super().submit(plan)


def record(case: str) -> list[Any]:
    """Run a trace over a memory, with settings drawn by the seed. Return its steps as JSON values."""
    name, _, seed = case.rpartition("-")
    rng, runner = random.Random(int(seed)), Recorder(1 + int(seed) % 2)
    run_trace(
        EVERY[name],
        seed=int(seed),
        depth=runner.depth,
        runner=runner,
        requests=20,
        budget=rng.choice((3, 8, 16, 64)),
        tokens=rng.choice((56, 64, 80)) * (4 if name in RESERVED else 1 + ("mixed" in name)),
        max_seqs=rng.choice((4, 8)),
        preemption=rng.choice(("swap", "recompute", "auto")),
        host=rng.choice((6, 1000)),
        prefix_tokens=rng.choice((0, 24)),
        aborts=0.06,
    )
    steps: list[Any] = json.loads(json.dumps(runner.steps))
    return steps


@cache
def recorded() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


@pytest.mark.share(8)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_recorded_ones(case: str) -> None:
    was, now = recorded()[case], record(case)
    for i, (before, after) in enumerate(zip(was, now)):
        assert before == after, f"step {i} of {case} differs"
    assert len(now) == len(was)


@pytest.mark.parametrize("name", EVERY)
def test_deterministic(name: str) -> None:
    """The same calls give the same placements and the same page operations, so page ids mean the same on every rank."""
    assert record(f"{name}-1") == record(f"{name}-1")


if __name__ == "__main__":
    FILE.write_bytes(gzip.compress(json.dumps({case: record(case) for case in CASES}).encode(), 9, mtime=0))
