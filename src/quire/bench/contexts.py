"""Decode steps of long contexts without computing the prompts, for timings of dummy weights: prompts are planned and
get memory as usual, but of a prompt's tokens in a step only the last is computed, over the present contents of its
pages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from quire.bench.shapes import local_runner
from quire.core.engine import Engine
from quire.core.runner import Runner
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SeqSlice, StepPlan, StepResult

TOKEN = 10  # the token that prompts consist of
WARM = 6  # untimed steps, in which kernels are compiled and graphs captured


class Skipping:
    """A runner that wraps the engine's own and treats prompts as computed."""

    def __init__(self, engine: Engine) -> None:
        self.runner: Any = engine.runner
        engine.runner = cast(Runner, self)  # an engine without images calls no other methods

    def submit(self, plan: StepPlan) -> Any:
        return self.runner.submit(plan._replace(slices=tuple(map(last_token, plan.slices))))

    def collect(self, ticket: Any) -> StepResult:
        result: StepResult = self.runner.collect(ticket)
        return result

    def close(self) -> None:
        self.runner.close()

    @property
    def store(self) -> Any:
        return self.runner.store


def last_token(row: SeqSlice) -> SeqSlice:
    """Return the slice with its last token alone."""
    skipped = len(row.tokens) - 1
    return row._replace(tokens=row.tokens[skipped:], start=row.start + skipped, score_tokens=())


def skipping(engine: Engine) -> None:
    """Replace the engine's runner by one that skips prompts, over random keys and values."""
    if not isinstance(engine.runner, Skipping):
        local_runner(engine).store.buffer.normal_()
        Skipping(engine)


def start(engine: Engine, lengths: Sequence[int], name: str = "row") -> None:
    """Start sequences of these lengths, which decode until `stop`, and wait until their prompts are computed."""
    limit = engine.limits.max_len
    for i, length in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=limit - length, ignore_eos=True, detokenize=False)
        engine.add(f"{name}-{i}", [TOKEN] * length, params)
    running = engine.scheduler.running
    while any(request.id.startswith(name) for request in engine.scheduler.waiting) or any(
        one.live_seqs[0].computed < one.live_seqs[0].prompt_len for one in running
    ):
        engine.step()


def stop(engine: Engine, names: Sequence[str] | None = None) -> None:
    """Abort these requests (None: all) and wait for the steps in flight."""
    for name in list(engine.requests) if names is None else names:
        engine.abort(name)
    while engine.has_unfinished_requests if names is None else any(name in engine.requests for name in names):
        engine.step()


def step_seconds(engine: Engine, steps: int, warm: int = WARM) -> list[float]:
    """Return the seconds of each of `steps` steps by the host's clock; with several in flight, since the end of the one
    before."""
    for _ in range(warm):
        engine.step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds
