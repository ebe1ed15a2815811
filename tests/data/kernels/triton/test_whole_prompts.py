"""Prompts whose tokens attend both ways, on the kernels: steps that have such rows beside others equal the
reference's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from small_models import a_model, a_runner, pages_of

from quire.data.runner.model_runner import ModelRunner
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Birth, Row, StepPlan

small = cache(lambda: a_model("gemma-2-2b"))


def runner_of(attention: str) -> ModelRunner:
    model, spec = small()
    runner = a_runner(model, spec, attention)
    runner.bind(replace(runner.store.geometry, both_ways=True))
    runner.store.views[0][1:].fill_(torch.nan)
    return runner


def plans() -> list[StepPlan]:
    """Prompts alone, beside rows that decode, behind tokens that are there; each of their last layers is asked for the
    last token alone, and one prompt scores all of its tokens."""
    params = SamplingParams(temperature=0, max_tokens=20).sampling()
    births = [Birth(slot, slot, -1, params, 0, prompt) for slot, prompt in ((1, 9), (2, 1), (3, 12), (4, 10))]
    tables = tuple(pages_of(1, 2, 3, 4))
    return [
        StepPlan(tuple(births), tables, (Row(1, tuple(range(9)), 0, 1), Row(2, (11,), 0, 1))),
        StepPlan((), (), (Row(1, (40,), 9, 1), Row(3, tuple(range(20, 32)), 0, 1), Row(2, (41, 42), 1, 1))),
        StepPlan((), (), (Row(3, (43,), 12, 1), Row(1, (44,), 10, 1), Row(2, (45,), 3, 1))),
        StepPlan((), (), (Row(4, tuple(range(6)), 0, 0), Row(3, (46,), 13, 1))),
        StepPlan((), (), (Row(4, (6, 7, 8, 9), 6, 1), Row(1, (47,), 11, 1))),
    ]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_steps_equal_the_reference(attention: str) -> None:
    runners = runner_of("reference"), runner_of(attention)
    seen = []
    for plan in plans():
        for runner in runners:
            logits = runner.model.logits
            runner.model.logits = lambda hidden, of=logits: seen.append(of(hidden)) or seen[-1]
            runner.collect(runner.submit(plan))
            runner.model.logits = logits
        torch.testing.assert_close(seen[-1], seen[-2], atol=2e-4, rtol=2e-4)
        assert seen[-1].std() > 0.1
    assert len(seen) == 2 * len(plans())
