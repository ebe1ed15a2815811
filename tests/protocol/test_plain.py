"""What plans say of parameters: all that the device must know, and nothing large twice."""

from __future__ import annotations

from typing import Any

import pytest
from memories import MEMORIES, Build
from traces import Trace

from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}


def test_parameters_are_said_once_a_request_not_once_a_fork() -> None:
    trace = Trace(MEMORIES["paged-4"](Build(tokens=512)), seed=0, depth=1, budget=64, max_seqs=8)
    engine, runner = trace.engine, trace.runner
    sent: list[StepPlan] = []
    submit = runner.submit
    runner.submit = lambda plan: sent.append(plan) or submit(plan)  # type: ignore[method-assign,func-returns-value]
    allowed = tuple(range(40))
    engine.add("a", [1, 2, 3], SamplingParams(n=8, allowed_token_ids=allowed, max_tokens=4))
    engine.add("b", [4, 5], SamplingParams(beam_width=4, allowed_token_ids=allowed, max_tokens=8))
    while engine.has_unfinished_requests:
        engine.step()
    slot_inits = [init for plan in sent for init in plan.new_slots]
    assert sum(init.parent_slot >= 0 for init in slot_inits) > 10
    assert sum(init.sampling is not None for init in slot_inits) == 2


def test_what_the_device_must_know_of_parameters() -> None:
    assert SamplingParams().to_device_params() == DeviceSamplingParams()
    params = SamplingParams(
        **PENALTIES, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, min_tokens=2, stop_token_ids=[7, 7, 8],
        allowed_token_ids=[3, 1], logit_bias={"4": 2}, bad_word_ids=((1,), (2, 3)), method=lambda: None,  # type: ignore[arg-type,return-value,dict-item]
        prompt_logprobs=0, stop=["x"],
    )  # fmt: skip
    assert params.to_device_params() == DeviceSamplingParams(
        **PENALTIES, temperature=0.5, top_p=0.9, min_p=0.1, min_tokens=2, stop_token_ids=(7, 8),
        allowed_token_ids=(3, 1), logit_bias=((4, 2.0),), bad_word_ids=((1,), (2, 3)), candidates_only=True,
        prompt_logprobs=0,
    )  # fmt: skip
    assert SamplingParams(logprob_token_ids=[9, 1, 9]).to_device_params() == DeviceSamplingParams(
        logprob_token_ids=(9, 1)
    )


@pytest.mark.parametrize(
    ("sampling", "greedy", "needs_history"),
    [
        (DeviceSamplingParams(), False, False),
        (DeviceSamplingParams(temperature=0.0), True, False),
        (DeviceSamplingParams(candidates_only=True), True, False),
        (DeviceSamplingParams(presence_penalty=-0.1), False, True),
        (DeviceSamplingParams(frequency_penalty=0.1), False, True),
        (DeviceSamplingParams(repetition_penalty=0.9), False, True),
        (DeviceSamplingParams(bad_word_ids=((1,), (2,))), False, False),
        (DeviceSamplingParams(bad_word_ids=((1,), (2, 3))), False, True),
    ],
)
def test_what_follows_from_it(sampling: DeviceSamplingParams, greedy: bool, needs_history: bool) -> None:
    assert (sampling.greedy, sampling.needs_history) == (greedy, needs_history)
