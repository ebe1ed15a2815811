"""Steps of random traces, recorded in a form that doesn't depend on how messages are written down: which sequence got
which slot and which pages, what was copied and swapped, and which tokens each step computed.

`python tests/conformance/recorded.py FILE` writes them; test_recorded.py compares those of the working tree with the
file, which holds those of revision e9bb017, before layer groups owned their geometry.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from memories import EVERY, RESERVED, VIRTUAL, VOCAB
from traces import Told, run_trace

from quire.sim.echo import EchoRunner
from quire.vocabulary.plan import Copy, Entry, In, Out, Poison, StepPlan, Table

FILE = Path(__file__).with_name("recorded.json.gz")
LETTERS = {Table: "t", Copy: "c", Out: "o", In: "i", Poison: "p"}


class Case(NamedTuple):
    """One trace."""

    name: str
    seed: int
    depth: int

    def __str__(self) -> str:
        return f"{self.name}-{self.seed}-{self.depth}"


LATER = {
    "own-sizes", "gcd", "uniform", "chunked", "chunked-16", "shared", "slack", "boundary", "literal", *VIRTUAL,
    *(name for name in EVERY if name.startswith(("large", "states"))),
}  # fmt: skip
"""What that revision hadn't."""
CASES = [Case(name, seed, 1 + seed % 2) for name in EVERY if name not in LATER for seed in range(8)]


class Recorder(EchoRunner):
    """Notes every plan."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, vocab_size=VOCAB)
        self.steps: list[Any] = []

    def submit(self, plan: StepPlan) -> int:
        self.steps.append(step_of(plan))
        return super().submit(plan)


def step_of(plan: StepPlan) -> list[Any]:
    births = [[birth.slot, birth.seq, birth.parent] for birth in plan.births]
    journal = [entry_of(entry) for entry in plan.journal]
    rows = [[row.slot, row.start, len(row.tokens), row.sample, len(row.score)] for row in plan.rows]
    return [births, journal, rows]


def entry_of(entry: Entry) -> list[Any]:
    fields = [list(field) if isinstance(field, tuple) else field for field in entry]
    return [LETTERS[type(entry)], *fields]


def record(case: Case) -> tuple[list[Any], Told]:
    """The steps of a case, and what came of it."""
    rng, runner = random.Random(case.seed), Recorder(case.depth)
    told = run_trace(
        EVERY[case.name],
        seed=case.seed,
        depth=case.depth,
        runner=runner,
        requests=20,
        budget=rng.choice((3, 8, 16, 64)),
        tokens=rng.choice((56, 64, 80)) * (4 if case.name in RESERVED else 1 + ("mixed" in case.name)),
        max_seqs=rng.choice((4, 8)),
        preemption=rng.choice(("swap", "recompute", "auto")),
        host=rng.choice((6, 1000)),
        prefix_tokens=rng.choice((0, 24)),
        aborts=0.06,
    )
    return runner.steps, told


if __name__ == "__main__":
    every = {}
    for case in CASES:
        every[str(case)], told = record(case)
        print(case, len(every[str(case)]), "steps", told)
    with gzip.GzipFile(sys.argv[1], "wb", mtime=0) as file:
        file.write(json.dumps(every, separators=(",", ":")).encode())
