"""On a GPU, `submit` only enqueues: it returns before the step has run, and waits for nothing on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from quire.build import build
from quire.config import EngineConfig
from quire.control.engine import Engine
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import LAST

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        model_config="llama3-8b", dummy_weights=True, dtype="bfloat16", device="cuda", kv_tokens=65536,
        max_num_batched_tokens=4096, enable_prefix_caching=False,
    )  # fmt: skip
    return build(config).engine


def serve(engine: Engine, count: int, prompt: int, output: int, params: SamplingParams | None = None) -> int:
    params = params or SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for i in range(count):
        engine.add(str(i), [(7 * i + j) % 1000 + 10 for j in range(prompt)], params)
    tokens = 0
    while engine.unfinished:
        tokens += sum(len(o.tokens) for o in engine.step())
    return tokens


def test_submit_returns_before_the_last_event_of_its_step(engine: Engine, tmp_path: Path) -> None:
    assert serve(engine, 8, 512, 4) == 32  # warm
    timeline = []
    real = engine.runner.submit

    def submit(plan):
        began = time.perf_counter()
        ticket = real(plan)
        done = torch.cuda.Event()
        done.record()
        timeline.append(
            {
                "rows": len(plan.rows),
                "tokens": sum(len(row.tokens) for row in plan.rows),
                "unseen": sum(row.tokens == (LAST,) for row in plan.rows),
                "submit_ms": 1e3 * (time.perf_counter() - began),
                "returned_before_the_end": not done.query(),
            }
        )
        return ticket

    engine.runner.submit = submit
    try:
        assert serve(engine, 8, 512, 16) == 128
    finally:
        engine.runner.submit = real
    (tmp_path / "timeline.json").write_text(json.dumps(timeline, indent=1))
    prompts = [step for step in timeline if step["tokens"] > 1000]
    assert prompts, "no step computed a prompt"
    assert all(step["returned_before_the_end"] for step in prompts)
    # Decode steps were planned from samples that the host had not seen.
    assert sum(step["unseen"] > 0 for step in timeline) >= 10


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_submit_never_waits_for_the_device(engine: Engine) -> None:
    serve(engine, 4, 64, 4)
    real = engine.runner.submit

    def submit(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.submit = submit
    try:
        assert serve(engine, 4, 64, 8) == 32
        mixed = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, n=2, seed=1, logprobs=2, max_tokens=8)
        assert serve(engine, 3, 40, 8, mixed) == 48
    finally:
        engine.runner.submit = real


def test_a_wasted_row_is_all_that_a_late_stop_costs(engine: Engine) -> None:
    serve(engine, 1, 16, 4)
    rows = engine.stats.rows
    engine.add("stops", [11] * 16, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    first: list[int] = []
    while engine.unfinished:
        first += [t for o in engine.step() for t in o.tokens]
    assert engine.stats.rows - rows == 50
    stop = first[5]
    rows = engine.stats.rows
    engine.add("again", [11] * 16, SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[stop], ignore_eos=True))
    tokens: list[int] = []
    while engine.unfinished:
        tokens += [t for o in engine.step() for t in o.tokens]
    assert tokens == first[: first.index(stop) + 1]
    assert engine.stats.rows - rows <= len(tokens) + 1
    assert engine.scheduler.memory.account().usage.used == 0


def test_a_step_that_samples_nothing_has_run_when_it_is_collected(engine: Engine) -> None:
    """Its pages may be given to others then, which swaps write on a stream of their own."""
    engine.add("long", [(3 * j) % 1000 + 10 for j in range(8000)], SamplingParams(max_tokens=1, ignore_eos=True))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert not any(row.sample for row in plan.rows)
    ticket = engine.runner.submit(plan)
    assert not torch.cuda.current_stream().query(), "the step is still running"
    result = engine.runner.collect(ticket)
    assert torch.cuda.current_stream().query()
    engine.scheduler.update(plan, result)
    engine.abort("long")
    while engine.unfinished:
        engine.step()
