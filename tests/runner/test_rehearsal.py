"""The rehearsal leaves no trace: what is served afterwards is what would have been served without it."""

from __future__ import annotations

import pytest
import torch

from quire.build import build
from quire.config import EngineConfig
from quire.plan import StepPlan
from quire.request import SamplingParams
from quire.runner.rehearsal import _plans


def steps(tokens: int, max_len: int) -> list[StepPlan]:
    return list(_plans(tokens, max_len))


@pytest.mark.parametrize(("tokens", "max_len"), [(2048, 512), (100, 512), (1, 1), (513, 512), (7, 3)])
def test_the_largest_step_has_all_tokens_in_sequences_that_may_be(tokens: int, max_len: int) -> None:
    rows = steps(tokens, max_len)[-1].rows
    assert sum(len(row.tokens) for row in rows) == tokens
    assert all(1 <= len(row.tokens) <= max_len and row.slot == 0 for row in rows)


def test_what_follows_is_the_same() -> None:
    """Steps of padding go through the runner; afterwards a request gets the tokens that it gets without them."""
    params = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1, seed=3, max_tokens=12)]
    tokens = []
    for rehearsed in (False, True):
        made = build(EngineConfig(device="cpu", kv_tokens=2048, max_num_batched_tokens=64))
        runner = made.engine.runner
        if rehearsed:
            for plan in steps(64, made.plan.max_len):
                assert not any(sample.error for sample in runner.collect(runner.submit(plan)).samples)
            pages = runner.store.pages.clone()
            assert not pages[1:].any(), "only the scratch page was written"
            assert pages[0].isfinite().all()
        for i, own in enumerate(params):
            made.engine.add(str(i), [11, 12, 13, 14 + i], own)
        served: dict[str, list[int]] = {"0": [], "1": []}
        while made.engine.unfinished:
            for output in made.engine.step():
                served[output.request] += output.tokens
        tokens.append(served)
        made.engine.close()
    assert tokens[0] == tokens[1]
    assert all(len(own) >= 5 for own in tokens[0].values())


def test_a_cpu_needs_none() -> None:
    made = build(EngineConfig(device="cpu", kv_tokens=512))
    made.engine.runner.warm_up(64, 512)
    assert not torch.any(made.engine.runner.store.pages[0]), "nothing ran"
    made.engine.close()
