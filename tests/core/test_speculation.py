"""Speculative decoding: the tokens are those of steps of one token, whatever is drafted, and the counts add up."""

from __future__ import annotations

import random
from itertools import takewhile
from typing import Any

import pytest
import traces
from memories import MAX_LEN, Build, paged
from traces import DEPTHS, WAYS, Asked, Trace

from quire.core.preemption_costs import PreemptionCosts, SpeculationCosts
from quire.core.scheduler import Scheduler
from quire.core.speculation import Speculator, count_markers
from quire.protocol.model_spec import LayerSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SeqSlice, StepPlan, StepResult
from quire.sim.echo_runner import expected_proposals

VOCAB = 8  # few tokens, so that n-grams occur again and are followed by the same token
FREE = SpeculationCosts(PreemptionCosts(0.0, 0.0, 1.0, 0.0, 0.0), PreemptionCosts(0.0, 0.0, 0.0, 0.0, 0.0))
"""Costs with which more tokens in a step take no longer: there are always as many draft tokens as possible."""
DRAFT = LayerSpec(1, 4, is_draft=True)
METHODS = ("ngram", "draft", "both")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "VOCAB", VOCAB)
    monkeypatch.setattr(traces, "STEMS", tuple(tuple(token % 7 + 1 for token in stem) for stem in traces.STEMS))


class Recorded(Scheduler):
    """A scheduler that records what was drafted and accepted."""

    def record(self) -> None:
        self.log: list[tuple[Sequence, SeqSlice, int]] = []  # sequence, slice, accepted draft tokens
        self.steps = 0

    def update(self, plan: StepPlan, result: StepResult) -> Any:
        drafts = [self.by_slot[row.slot][1] if row.draft_tokens else None for row in plan.slices]
        for seq, row, sampled in zip(drafts, plan.slices, result.slice_results):
            if seq is not None:
                assert self.num_in_flight == 1, "a step with draft tokens is not the only one"
                self.log.append((seq, row, len(sampled.tokens) - 1))
        tokens = sum(len(row.tokens) + len(row.draft_tokens) for row in plan.slices)
        assert tokens <= self.token_budget, "the model computes more than the budget"
        assert sum(len(row.tokens) for row in plan.draft_slices) <= self.token_budget, "the draft model does"
        self.steps += 1
        return super().update(plan, result)


def opened(
    method: str, *, k: int = 3, page: int = 4, windows: tuple[Any, ...] = (None, None), tokens: int = 192,
    budget: int = 64, max_seqs: int = 8, host: int = 0, prefix_tokens: int = 0, costs: SpeculationCosts = FREE,
    settings: dict[str, Any] | None = None, **how: Any,
) -> Trace:  # fmt: skip
    """A trace over a memory with a draft layer, if `method` has a draft model."""
    layers = windows if method == "ngram" else (*windows, DRAFT)
    memory = paged(layers, page_size=page, **(settings or {}))(
        Build(tokens, budget, max_seqs, MAX_LEN, host, prefix_tokens)
    )
    trace = Trace(memory, budget=budget, max_seqs=max_seqs, **how)
    scheduler = trace.scheduler
    scheduler.speculator = Speculator(method, k, lookup=(1, 3), costs=costs)
    scheduler.__class__ = Recorded
    scheduler.record()  # type: ignore[attr-defined]
    return trace


def check_counts(trace: Trace) -> None:
    """Compare the counts with what was drafted, and the draft model's share of it with what it must propose."""
    log, stats = trace.scheduler.log, trace.engine.stats  # type: ignore[attr-defined]
    assert stats.num_drafts == len(log)
    assert stats.draft_tokens == sum(len(row.draft_tokens) for _, row, _ in log)
    assert stats.accepted_tokens == sum(accepted for _, _, accepted in log) == sum(stats.accepted_per_pos)
    assert stats.accepted_per_pos == [sum(accepted > i for _, _, accepted in log) for i in range(16)]
    for seq, row, accepted in log:
        if count := count_markers(row):
            right = expected_proposals(seq.tokens, trace.groups, seq.prompt_len)[row.start : row.start + count]
            leading = len(list(takewhile(bool, right)))
            ended = leading == len(right) < count  # what it would have been followed by is not known
            assert accepted == leading or (ended and accepted > leading), "the draft model read other states"
    assert not trace.scheduler.speculator.seqs, "a sequence is kept that has ended"  # type: ignore[union-attr]


def ask(trace: Trace, id: str, prompt: tuple[int, ...], **params: Any) -> None:
    params = {"seed": 7, "max_tokens": 24, "ignore_eos": True, **params}
    trace.add(Asked(id, prompt, SamplingParams(**params), ""))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_single_steps(method: str, page: int, depth: int) -> None:
    """Random requests in a memory of 192 tokens: chunks, hits, both preemptions, branches, stop tokens and lengths
    within a run, min_tokens, log-probabilities, penalties, aborts."""
    accepted = 0
    for seed in range(4):
        rng = random.Random(f"{method} {page} {depth} {seed}")
        trace = opened(
            method, k=rng.choice((1, 3, 5)), page=page, windows=rng.choice(((None, None), (None, 6))), depth=depth,
            seed=seed, budget=rng.choice((3, 8, 16, 64)), max_seqs=rng.choice((3, 8)), host=rng.choice((0, 12, 1000)),
            preemption=rng.choice(WAYS), tokens=rng.choice((96, 192)), unforked=rng.choice((0.0, 0.1)),
        )  # fmt: skip
        trace.run(12)
        check_counts(trace)
        accepted += trace.engine.stats.accepted_tokens
    assert accepted > 0
