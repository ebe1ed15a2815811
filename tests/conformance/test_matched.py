"""Random traces in which some requests have a grammar: over every memory, with preemption, forks, prefixes and steps in
flight, each output is the oracle's, also of those that have none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from memories import EVERY, VOCAB, Build
from traces import Asked, Told, Trace

from quire.protocol.sampling_params import SamplingParams, Structured
from quire.protocol.step_plan import LAST_SAMPLED, StepPlan, TokenBitmask

FORM = Structured("regex", "numbers")
END = 0


class NumberMatcher:
    """A Matcher of nothing but numbers, whose place is the tokens so far: what may follow is drawn from them, sometimes
    one token alone or a run of them, now and then the end."""

    def __init__(self, seed: int, tokens: tuple[int, ...] = ()) -> None:
        self.seed, self.tokens = seed, tokens
        self.queue: tuple[int, ...] = ()
        self._look()

    def _look(self) -> None:
        if self.is_unconstrained():
            self.allowed = set(range(VOCAB))
            return
        rng = random.Random(f"{self.seed} {self.tokens}")
        self.allowed = set(rng.sample(range(1, VOCAB), rng.choice((2, 5, 40))))
        if rng.random() < 0.2:
            self.allowed.add(END)
        if not self.queue and rng.random() < 0.4:
            self.queue = tuple(rng.choices(range(1, VOCAB), k=rng.choice((1, 3, 8))))
            if rng.random() < 0.1:
                self.queue += (END,)

    def accept(self, token: int) -> str:
        if token not in ({self.queue[0]} if self.queue else self.allowed):
            return f"token {token} can't follow"
        self.tokens, self.queue = (*self.tokens, token), self.queue[1:]
        self._look()
        return ""

    def forced_tokens(self) -> tuple[int, ...]:
        return self.queue

    def is_unconstrained(self) -> bool:
        """Every other one is from its fifth token on, unless a run was to follow."""
        return self.seed % 2 > 0 and len(self.tokens) >= 5 and not self.queue

    def copy(self) -> NumberMatcher:
        other = NumberMatcher(self.seed, self.tokens)
        other.queue = self.queue
        return other


class NumberGrammar:
    """A Grammar."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def new_matcher(self) -> NumberMatcher:
        return NumberMatcher(self.seed)

    def compute_masks(self, matchers: Sequence[NumberMatcher]) -> list[bytes]:
        found = []
        for matcher in matchers:
            bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.bool_)
            bits[[matcher.queue[0]] if matcher.queue else sorted(matcher.allowed)] = True
            found.append(np.packbits(bits, bitorder="little").tobytes())
        return found


class MatchedTrace(Trace):
    """A trace with grammars. `waited` counts rows of requests without one in steps while a matched one waits."""

    def __init__(self, *args: Any, late: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, deferred_masks=late, **kwargs)
        self.masked = self.jumped = self.passed = self.early = self.freed = 0
        self.submitted = self.runner.submit
        if late:
            self.runner.submit_without_masks, self.runner.submit_masks = self.hold, self.release  # type: ignore[attr-defined]
        else:
            self.runner.submit = self.look  # type: ignore[method-assign]

    def hold(self, plan: StepPlan) -> int:
        """A step begins: its rows may follow tokens that nobody has seen."""
        assert not plan.masks
        self.early += any(LAST_SAMPLED in row.tokens for row in plan.slices if self._matched(row.slot))
        self.plan = plan
        return self.submitted(plan)

    def release(self, ticket: int, masks: tuple[TokenBitmask, ...]) -> int:
        """Its masks: of all rows that sample, but for those whose sequences have ended meanwhile."""
        ended = {row.slot for row in self.plan.slices if self.scheduler.by_slot[row.slot][1].finish_reason is not None}
        asked = {row.slot for row in self.plan.slices if row.num_samples and self._matched(row.slot)}
        assert {mask.slot for mask in masks} == asked - ended
        self.masked += len(masks)
        self._count(self.plan)
        return self.runner.runner.submit_masks(ticket, masks)

    def _count(self, plan: StepPlan) -> None:
        for row in plan.slices:
            request, seq = self.scheduler.by_slot[row.slot]
            self.jumped += seq.matcher is not None and row.start > seq.prompt_len and len(row.tokens) > 1
            self.freed += seq.matcher is None and request.params.grammar is not None

    def draw(self, rng: random.Random, id: str) -> Asked:
        asked = super().draw(rng, id)
        if asked.params.beam_width is not None or rng.random() < 0.4:
            return asked
        params = replace(asked.params, structured=FORM, grammar=NumberGrammar(rng.randrange(5)), min_tokens=0,
                         ignore_eos=False)  # fmt: skip
        return asked._replace(params=params)

    def look(self, plan: StepPlan) -> int:
        """Masks are of rows that sample, one each; and no row of a matched sequence follows a token not yet seen."""
        slots = [mask.slot for mask in plan.masks]
        asked = {row.slot for row in plan.slices if row.num_samples and self._matched(row.slot)}
        assert len(set(slots)) == len(slots)
        assert set(slots) == asked
        for row in plan.slices:
            if self._matched(row.slot):
                assert LAST_SAMPLED not in row.tokens, "a mask was made before a token was known"
        self._count(plan)
        self.masked += len(slots)
        self.passed += bool(self.engine.in_flight) and bool(plan.slices) and not slots
        return self.submitted(plan)

    def _matched(self, slot: int) -> bool:
        return self.scheduler.by_slot[slot][1].matcher is not None


def matched_trace(
    name: str, seed: int, depth: int, tokens: int, preemption: str, late: bool = False
) -> tuple[Told, MatchedTrace]:
    build = Build(tokens, 16, host=1000 if preemption == "swap" else 0)
    trace = MatchedTrace(EVERY[name](build), seed=seed, depth=depth, budget=16, max_seqs=6, preemption=preemption,
                         late=late)  # fmt: skip
    return trace.run(10), trace


@pytest.mark.share(6)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["paged-1", "paged-4", "mixed-16", "large", "virtual-4", "orca-max"])
def test_matched_traces(name: str, depth: int, preemption: str) -> None:
    room = 288 if "orca" in name else 160 if name in ("mixed-16", "large") else 72
    pairs = [matched_trace(name, seed, depth, room, preemption) for seed in range(6)]
    assert sum(trace.masked for _, trace in pairs) > 50
    assert sum(trace.jumped for _, trace in pairs) > 2
    assert sum(trace.freed for _, trace in pairs) > 0, "no matcher was let go"
    assert name != "paged-4" or sum(told.preemptions for told, _ in pairs) > 0
    assert depth == 1 or sum(trace.passed for _, trace in pairs) > 0, "nobody went on while others waited"
    assert all(not trace.scheduler.num_grammar_requests for _, trace in pairs)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("name", ["paged-4", "mixed-16", "virtual-4"])
def test_masks_that_come_late(name: str, depth: int) -> None:
    """Steps begin before it is known what their rows may draw, and forced runs are still appended at once."""
    pairs = [matched_trace(name, seed, depth, 96, ("swap", "recompute")[seed % 2], late=True) for seed in range(8)]
    assert sum(trace.early for _, trace in pairs) > 50, "nothing began early"
    assert sum(trace.jumped for _, trace in pairs) > 2
    assert sum(trace.freed for _, trace in pairs) > 0, "no matcher was let go"
    assert sum(trace.masked for _, trace in pairs) > 100
    assert all(not trace.engine.is_awaiting_masks for _, trace in pairs)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", EVERY)
def test_many_matched_traces(name: str, depth: int) -> None:
    for seed in range(300):
        matched_trace(name, seed, depth, 288 if "orca" in name else 96, ("swap", "recompute")[seed % 2],
                      late=seed % 3 == 0)  # fmt: skip


def test_a_token_that_cannot_follow_ends_its_request_alone() -> None:
    """As when a grammar grows too complex: the others go on."""

    class Broken(NumberGrammar):
        def new_matcher(self) -> object:  # type: ignore[override]
            made = super().new_matcher()
            real = made.accept
            made.accept = lambda token: "too complex" if len(made.tokens) == 3 else real(token)  # type: ignore
            return made

    trace = MatchedTrace(EVERY["paged-4"](Build(256, 64)), seed=0, depth=2, budget=64, max_seqs=8)
    broken = SamplingParams(seed=3, max_tokens=40, structured=FORM, grammar=Broken(1))
    trace.add(Asked("a", (1, 2, 3), broken, ""))
    trace.add(Asked("b", (1, 2, 3), SamplingParams(seed=4, max_tokens=20, ignore_eos=True), ""))
    trace.exhaust()
    last = trace.outputs["a"][-1]
    assert (last.finish_reason, last.stop_reason) == ("error", "too complex")
    assert sum(len(out.tokens) for out in trace.outputs["b"]) == 20
    del trace.asked["a"]
    trace.drained()
