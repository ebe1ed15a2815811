"""On a GPU, `submit` only enqueues: it returns before the step has run, and waits for nothing on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gpu_serving import answers, engine_of, greedy

from quire.core.engine import Engine
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import LAST_SAMPLED, StepPlan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(
        model_config="llama3-8b", kv_tokens=65536, max_num_batched_tokens=4096, enable_prefix_caching=False
    )


def serve(engine: Engine, count: int, length: int, output: int, params: SamplingParams | None = None) -> int:
    """How many tokens are generated."""
    prompts = [[(7 * i + j) % 1000 + 10 for j in range(length)] for i in range(count)]
    return sum(map(len, answers(engine, [(tokens, params or greedy(output)) for tokens in prompts])))


def test_submit_returns_before_the_last_event_of_its_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve(engine, 8, 512, 4) == 32  # warm
    returned_early, unseen = [], []

    def timed(real: Any, plan: StepPlan) -> Any:
        ticket = real(plan)
        done = torch.cuda.Event()
        done.record()
        if sum(len(row.tokens) for row in plan.slices) > 1000:
            returned_early.append(not done.query())
        unseen.append(any(row.tokens == (LAST_SAMPLED,) for row in plan.slices))
        return ticket

    monkeypatch.setattr(engine.runner, "submit", partial(timed, engine.runner.submit))
    assert serve(engine, 8, 512, 16) == 128
    assert returned_early, "no step computed a prompt"
    assert all(returned_early)
    # Decode steps were planned from samples that the host had not seen.
    assert sum(unseen) >= 10


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_submit_never_waits_for_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(engine, 4, 64, 4)

    def strict(real: Any, plan: StepPlan) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine.runner, "submit", partial(strict, engine.runner.submit))
    assert serve(engine, 4, 64, 8) == 32
    mixed = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, n=2, seed=1, logprobs=2, max_tokens=8)
    assert serve(engine, 3, 40, 8, mixed) == 48


def test_a_wasted_row_is_all_that_a_late_stop_costs(engine: Engine) -> None:
    serve(engine, 1, 16, 4)
    rows = engine.stats.rows
    [first] = answers(engine, [([11] * 16, greedy(50))])
    assert engine.stats.rows - rows == 50
    rows = engine.stats.rows
    [tokens] = answers(engine, [([11] * 16, greedy(50, stop_token_ids=[first[5]]))])
    assert tokens == first[: first.index(first[5]) + 1]
    assert engine.stats.rows - rows <= len(tokens) + 1
    assert engine.scheduler.memory.account().usage.used == 0


def test_a_step_that_samples_nothing_has_run_when_it_is_collected(engine: Engine) -> None:
    """Its pages may be given to others then, which swaps write on a stream of their own."""
    engine.add("long", [(3 * j) % 1000 + 10 for j in range(8000)], SamplingParams(max_tokens=1, ignore_eos=True))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert not any(row.num_samples for row in plan.slices)
    ticket = engine.runner.submit(plan)
    assert not torch.cuda.current_stream().query(), "the step is still running"
    result = engine.runner.collect(ticket)
    assert torch.cuda.current_stream().query()
    engine.scheduler.update(plan, result)
    engine.abort("long")
    while engine.has_unfinished_requests:
        engine.step()
