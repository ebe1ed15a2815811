"""The simulator is the engine: its plans are those of a runner that computes; and its time is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.echo_runner import EchoRunner
from quire.config import EngineConfig, Experiment
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import FIRST_DRAFT, SeqSlice, SlotInit, StepPlan, StepResult
from quire.sim.cost_model import AttentionShape, Coefficients, CostModel, ModelShape
from quire.sim.runner import SimRunner, VirtualClock
from quire.sim.simulation import RunTotals, Simulation, TraceRequest

SPEC = ModelSpec("none", (LayerSpec(2, 16),) * 2, 512, 256, 64, 4, 128, 10**6, eos_ids=(7, 8))
SHAPE = ModelShape.from_spec(SPEC, 2, tied=True)
NOTHING = Coefficients(*(0.0,) * 10)
SOME = NOTHING._replace(step=0.01, row=0.001, operation=1e-9, kv_byte=1e-6, swapped_byte=1e-7, host_step=0.002)
SMALL = EngineConfig(page_size=4, max_num_seqs=6, max_num_batched_tokens=32, swap_gib=0.001)


def asked(output: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output, n=n, ignore_eos=True, detokenize=False)


def trace(count: int) -> list[TraceRequest]:
    """Prompts that differ from the first token on, of different lengths; the last ones come after a pause."""
    found = []
    for i in range(count):
        prompt = [10 + (31 * i + 7 * j) % 400 for j in range(5 + 11 * i % 40)]
        found.append(TraceRequest(0.02 * i + 5.0 * (i > count - 4), prompt, asked(3 + 13 * i % 30, 1 + i % 2)))
    return found


def planned(config: EngineConfig, depth: int, echo: EchoRunner | None = None) -> tuple[list[Any], Simulation]:
    """What was planned, token values aside, which a simulation doesn't have; those of an EchoRunner, if it is given."""
    simulation = Simulation(config, SPEC, CostModel(SHAPE, SOME), 160, kind="cpu", depth=depth)
    runner, plans = simulation.runner, list[Any]()
    submit, collect = runner.submit, runner.collect
    if echo is not None:
        echo.bind(simulation.engine.scheduler.memory.kv_config)

    def noted(plan: StepPlan) -> int:
        rows = [(row.slot, len(row.tokens), row.start, row.num_samples) for row in plan.slices]
        plans.append((plan.new_slots, plan.page_ops, rows, plan.overlapped_page_ops))
        if echo is not None:
            echo.submit(plan)
        return submit(plan)

    def drawn(ticket: int) -> StepResult:
        result = collect(ticket)
        return result if echo is None else echo.collect(echo.collected + 1)._replace(seconds=result.seconds)

    runner.submit, runner.collect = noted, drawn  # type: ignore[method-assign]
    simulation.run(trace(24))
    return plans, simulation


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_plans_are_those_of_a_runner_that_computes(depth: int, preemption: str) -> None:
    config = replace(SMALL, preemption=preemption)
    simulated, simulation = planned(config, depth)
    computed, _ = planned(config, depth, EchoRunner(depth))
    assert simulated == computed
    assert simulation.engine.scheduler.num_preemptions > 0
    assert not simulation.engine.has_unfinished_requests


def test_time_is_exact_without_overlap() -> None:
    cost = CostModel(SHAPE, NOTHING._replace(step=1.0, host_step=0.25))
    outcome = Simulation(SMALL, SPEC, cost, 160).run(
        [TraceRequest(0.0, [1, 2, 3, 4], asked(3)), TraceRequest(10.0, [5], asked(1))]
    )
    assert outcome.requests[0].token_times == [(1.25, 1), (2.5, 1), (3.75, 1)]
    assert outcome.requests[1].token_times == [(11.25, 1)]  # the clock went on to its arrival
    assert outcome.totals.seconds == 11.25
    assert outcome.totals.busy_share == 4 / 11.25


@pytest.mark.parametrize(
    ("step", "host", "times"),
    [
        (1.0, 0.25, [1.25, 2.25, 3.25]),  # the host plans the second step at 0.25, while the first computes
        (0.25, 1.0, [2.0, 3.0, 3.25]),  # two plans are made before the first result is looked at
    ],
)
def test_time_is_exact_with_two_steps_in_flight(step: float, host: float, times: list[float]) -> None:
    cost = CostModel(SHAPE, NOTHING._replace(step=step, host_step=host))
    simulation = Simulation(SMALL, SPEC, cost, 160, depth=2)
    outcome = simulation.run([TraceRequest(0.0, [1, 2, 3, 4], asked(3))])
    assert outcome.requests[0].token_times == [(time, 1) for time in times]
    assert simulation.engine.stats.step_seconds == 3 * step  # a step's seconds are the device's, though steps overlap


def test_a_request_joins_when_it_comes() -> None:
    cost = CostModel(SHAPE, NOTHING._replace(step=1.0))
    requests = [TraceRequest(0.0, [1, 2], asked(4)), TraceRequest(1.5, [3, 4], asked(2))]
    outcome = Simulation(SMALL, SPEC, cost, 160).run(requests)
    assert [time for time, _ in outcome.requests[0].token_times] == [1, 2, 3, 4]
    assert [time for time, _ in outcome.requests[1].token_times] == [3, 4]
    assert outcome.totals.mean_running == 1.5


def test_tokens_end_no_sequence() -> None:
    """7, which is drawn where it may be, is an end token here."""
    params = SamplingParams(temperature=0.0, max_tokens=9, detokenize=False)
    simulation = Simulation(SMALL, SPEC, CostModel(SHAPE, SOME), 160)
    outcome = simulation.run([TraceRequest(0.0, [1, 2, 3], params)])
    assert sum(count for _, count in outcome.requests[0].token_times) == 9
    assert 7 not in simulation.runner.drawn_tokens
    assert 8 not in simulation.runner.drawn_tokens


def accepted(acceptance: float, drafts: int, seq: int, steps: int) -> list[int]:
    """Return the draft tokens that are accepted in verifications at each of the first positions of a sequence."""
    runner = SimRunner(CostModel(SHAPE, NOTHING), VirtualClock(), acceptance=acceptance)
    init, found = SlotInit(4, seq, -1, None, 0, 1), list[int]()
    for start in range(1, steps):
        row = SeqSlice(4, (7,), start, 1, (), tuple(range(FIRST_DRAFT, FIRST_DRAFT - drafts, -1)))
        runner.submit(StepPlan((init,) * (start == 1), (), (row,)))
        [result] = runner.collect(0).slice_results
        assert set(result.tokens) == {7}
        found.append(len(result.tokens) - 1)
    return found


def test_draft_tokens_are_accepted_by_sequence_and_position() -> None:
    assert set(accepted(0.0, 3, 1, 9)) == {0}
    assert set(accepted(1.0, 3, 1, 9)) == {3}
    three, one = (accepted(0.7, drafts, 5, 2000) for drafts in (3, 1))
    assert [min(count, 1) for count in three] == one, "with any number of draft tokens"
    assert three[:-2] == [(*one[i : i + 3], 0).index(0) for i in range(len(one) - 2)]
    assert sum(one) / len(one) == pytest.approx(0.7, abs=0.03)
    assert accepted(0.7, 3, 6, 100) != three[:99]


EACH = NOTHING._replace(step=1.0)


def speculating(
    acceptance: float, output: int, requests: int = 1, coefficients: Coefficients = EACH, adaptive: bool = True
) -> tuple[RunTotals, list[float]]:
    """Serve requests with a draft model of a fifth of the size. Return the totals, and the times of the first one's
    tokens."""
    draft = ModelSpec("draft", (LayerSpec(2, 16),), 512, 256, 64, 4, 128, 2 * 10**5)
    config = replace(
        SMALL,
        speculative_model="draft",
        num_speculative_tokens=3,
        adaptive_speculation=adaptive,
        experiment=Experiment(synthetic_acceptance=acceptance),
    )
    cost = CostModel(SHAPE, coefficients, ModelShape.from_spec(draft, 2, tied=True))
    simulation = Simulation(config, SPEC.with_draft(draft), cost, 640)
    outcome = simulation.run([TraceRequest(0.0, [10 + i, 2, 3, 4], asked(output)) for i in range(requests)])
    assert all(sum(count for _, count in one.token_times) == output for one in outcome.requests)
    usage = simulation.engine.scheduler.memory.account().usage
    assert usage.free + usage.cached == usage.total
    return outcome.totals, [time for time, count in outcome.requests[0].token_times for _ in range(count)]


def test_accepted_drafts_save_steps_and_others_none() -> None:
    every, times = speculating(1.0, 41, adaptive=False)
    assert (every.drafts, every.draft_tokens, every.accepted_tokens) == (10, 29, 29)
    assert every.steps == 12
    # The prompt, then that of the draft model; a token; then three passes of the draft model and a step each time.
    assert times == [1, 3, *(8 + 4 * i for i in range(9) for _ in range(4)), 44, 44, 44]
    none, times = speculating(0.0, 41, adaptive=False)
    assert none.steps == 41
    assert (none.drafts, none.draft_tokens, none.accepted_tokens) == (38, 38 * 3 - 3, 0), (
        "the last token needs no draft, the ones before it fewer"
    )
    some, _ = speculating(0.7, 41, 4, adaptive=False)
    assert some.accepted_tokens / some.drafts == pytest.approx(0.7 + 0.49 + 0.343, rel=0.25)


def test_drafts_that_do_not_pay_are_not_verified() -> None:
    slow, _ = speculating(1.0, 41)
    assert slow.draft_tokens == 0, "a pass of the draft model takes as long as a step"
    reading, computing = NOTHING._replace(weight_byte=1.0), NOTHING._replace(operation=1.0)
    fast, _ = speculating(1.0, 41, coefficients=reading)
    assert fast.steps == 12
    assert speculating(1.0, 41, coefficients=computing)[0].steps == 41, "a token more takes as long as another step"
    assert 39 * 3 > speculating(0.0, 41, coefficients=reading)[0].draft_tokens > 0, "few are tried if none is accepted"


def test_static_batches_pay_for_their_padding() -> None:
    """Two prompts of 8 and 2 tokens and outputs of 1 and 3: 6 tokens pad the second, and the first one's row
    is computed in the two steps after its end."""
    shape = ModelShape(1, 0, 1, (AttentionShape(None, 0, 0),))
    cost = CostModel(shape, NOTHING._replace(operation=0.5))
    requests = [TraceRequest(0.0, list(range(10, 18)), asked(1)), TraceRequest(0.0, [20, 21], asked(3))]
    config = EngineConfig(memory="ft", page_size=4, max_model_len=32)
    outcome = Simulation(config, SPEC, cost, 160).run(requests)
    assert [time for time, _ in outcome.requests[1].token_times] == [16, 18, 20]
    paged = Simulation(EngineConfig(page_size=4), SPEC, cost, 160).run(requests)
    assert [time for time, _ in paged.requests[1].token_times] == [10, 11, 12]
