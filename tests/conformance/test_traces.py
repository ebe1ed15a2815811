"""Random traces over every memory, at depths 1 to 3: every step is checked, every output is the oracle's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from memories import EVERY, RESERVED, VOCAB, Build
from pictured import LAYOUTS, PICTURED
from traces import DEPTHS, WAYS, Asked, Told, Trace, drawn_trace, open_trace, run_trace
from unlike import QUERIES

from bench.echo_runner import EchoRunner
from quire.protocol.images import ImageItem
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice, SliceResult, StepPlan


def drawn(name: str, seed: int, depth: int) -> Told:
    settings: dict[str, Any] = {}
    if name in EVERY:
        settings = {"tokens": (48, 64, 96, 128, 256), "hosts": (0, 6, 1000)}
        settings["scale"] = 4 if name in RESERVED else 1  # a run may be for the longest sequence
    elif "both-ways" in name:
        settings = {"least": 64, "prefixes": (0,)}
    elif "budgets" in name:
        settings = {"least": QUERIES}
    return drawn_trace(LAYOUTS[name], seed, depth, **settings)


@pytest.mark.share(8)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_traces(name: str, depth: int) -> None:
    told = [drawn(name, seed, depth) for seed in range(4)]
    assert sum(t.finished for t in told) > (16 if name in EVERY else 12)
    assert sum(t.aborted for t in told) > 0
    assert sum(t.parts for t in told) > 10 or name not in PICTURED


class Staged(EchoRunner):
    """Notices plans that stages can't be given: with a token that only the last one knows. Counts those that were made
    while others were in flight."""

    beside = 0

    def submit(self, plan: StepPlan) -> int:
        assert not any(LAST_SAMPLED in row.tokens for row in plan.slices), "a sample is needed that isn't known yet"
        self.beside += bool(plan.slices and any(other.slices for other in self.queue))
        return super().submit(plan)


@pytest.mark.share(2)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["paged-4", "layer-tables", "mixed-16", "states-window"])
def test_traces_over_stages(name: str, stages: int) -> None:
    """As many steps are in flight, of other sequences each; every output is the oracle's."""
    runners = [Staged(stages, vocab_size=VOCAB) for _ in range(4)]
    for seed, runner in enumerate(runners):
        run_trace(EVERY[name], seed=seed, depth=stages, runner=runner, stages=stages, max_seqs=8, tokens=192)
    assert sum(runner.beside for runner in runners) > 50


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_random_traces(name: str, depth: int) -> None:
    for seed in range(1000, 2000):
        drawn(name, seed, depth)


@pytest.mark.parametrize(
    ("name", "seed", "depth"),
    [
        ("paged-4", 1322, 1),  # a request was admitted and, since it couldn't be forked, dropped within one step
        ("paged-4", 1609, 2),  # a sequence came back and left again before its birth was told
    ],
)
def test_traces_that_failed_once(name: str, seed: int, depth: int) -> None:
    drawn(name, seed, depth)


PAGED = EVERY["paged-4"]


def test_what_one_leaves_half_encoded_another_one_begins_anew() -> None:
    trace = open_trace(PICTURED["cross-4"], tokens=128, budget=4)
    for i, id in enumerate("ab"):
        prompt, params = (7 + i, VOCAB - 1, 5), SamplingParams(seed=1, max_tokens=4)
        trace.add(Asked(id, prompt, params, "", (ImageItem(bytes(32), 1, 1, 8, 4),)))
    trace.step()
    trace.step()
    assert 0 < trace.runner.parts < 4
    trace.abort("a")
    trace.finish()
    assert trace.runner.parts > 4


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("steps", range(5))
def test_the_id_of_an_aborted_request_can_be_used_at_once(depth: int, steps: int) -> None:
    trace = open_trace(PAGED, depth=depth)
    trace.add(Asked("a", (1, 2, 3), SamplingParams(seed=1, max_tokens=20, ignore_eos=True), ""))
    for _ in range(steps):
        trace.step()
    trace.abort("a")
    again = Asked("a", (4, 5, 6), SamplingParams(seed=2, max_tokens=20, ignore_eos=True), "")
    (first,) = trace.engine.pending_outputs
    assert first.finish_reason == "abort"
    assert first.done
    trace.engine.pending_outputs.clear()
    trace.aborted.clear()
    trace.add(again)
    trace.finish()
    assert len(trace.outputs["a"]) == 20


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_named_log_probabilities_survive_preemption(way: str, depth: int) -> None:
    kinds: list[dict[str, Any]] = [{}, {"n": 3}, {"n": 1, "best_of": 2}, {"logprob_token_ids": None, "logprobs": 2}]
    trace = open_trace(PAGED, depth=depth, tokens=72, budget=8, host=1000 if way == "swap" else 0, preemption=way)
    for i, values in enumerate(kinds):
        prompt = tuple((7 * i + j) % (VOCAB - 1) + 1 for j in range(14))
        params = {"seed": i, "max_tokens": 12, "ignore_eos": True, "logprob_token_ids": [9, 2, 40 + i]} | values
        trace.add(Asked(str(i), prompt, SamplingParams(**params), ""))
    trace.finish()
    assert trace.scheduler.preemption_counts[way] > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_beams_that_are_preempted_between_their_candidates(depth: int) -> None:
    """Some branches have their candidates and others wait for the budget when memory runs short."""
    hurt = 0
    for tokens in range(64, 96, 8):
        trace = open_trace(PAGED, depth=depth, tokens=tokens, budget=3)
        old = SamplingParams(seed=1, ignore_eos=True, max_tokens=36)
        trace.add(Asked("old", tuple(range(1, 10)), old, ""))
        trace.add(Asked("beams", tuple(range(20, 29)), SamplingParams(seed=1, beam_width=4, max_tokens=9), ""))
        beams = list(trace.scheduler.waiting)[1]
        while trace.engine.has_unfinished_requests:
            waited, before = len(beams.candidates), beams.preemptions
            trace.step()
            hurt += waited > 0 and beams.preemptions > before
        trace.drained()
    assert hurt


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("way", WAYS)
def test_traces_swap_recompute_share_again_and_are_aborted_in_every_state(way: str, depth: int) -> None:
    """What the traces are for really happens in them."""
    told = [
        run_trace(
            EVERY[name], seed=seed, depth=depth, budget=budget, tokens=72, requests=24, preemption=way, host=host,
            prefix_tokens=8, aborts=0.15,
        )
        for seed, (name, budget, host) in enumerate(
            [("paged-4", 16, 1000), ("paged-1", 8, 1000), ("paged-4", 6, 12), ("poisoned", 16, 1000)] * 3
        )
    ]  # fmt: skip
    assert (sum(t.swapped for t in told) > 5) == (way != "recompute")
    assert sum(t.recomputed for t in told) > 0 or way == "swap"
    assert sum(t.siblings for t in told) > 0 or way == "swap"
    assert sum(t.partial for t in told) > 0
    assert sum(t.evictions for t in told) > 0
    aborts = sum((t.aborts for t in told), Counter())
    assert all(aborts[state] for state in ("waiting", "running")), aborts
    assert aborts["swapped"] or way == "recompute", aborts


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_abort_while_branches_wait_to_be_forked(depth: int) -> None:
    for kind in ({"n": 3}, {"best_of": 3}, {"beam_width": 3}):
        trace = open_trace(PAGED, depth=depth)
        trace.add(Asked("a", (1, 2, 3), SamplingParams(seed=1, max_tokens=20, **kind), ""))
        plan = trace.scheduler.schedule()
        assert plan is not None
        trace.engine.in_flight.append((plan, trace.runner.submit(plan)))
        trace.abort("a")
        assert trace.aborts["forking"] == 1
        trace.finish()


class Faulty(EchoRunner):
    """The row of one slot fails in one step."""

    def __init__(self, depth: int, slot: int, step: int) -> None:
        super().__init__(depth, vocab_size=VOCAB)
        self.slot, self.step = slot, step

    def compute_row(self, row: SeqSlice) -> SliceResult:
        sampled = super().compute_row(row)
        return sampled._replace(error="not finite") if (row.slot, self.collected) == (self.slot, self.step) else sampled


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("slot", [1, 2, 3])
def test_a_request_whose_branches_advance_together_fails_as_one(slot: int, budget: int, depth: int) -> None:
    for step in range(1, 12):
        trace = open_trace(PAGED, depth=depth, budget=budget, runner=Faulty(depth, slot, step))
        params = SamplingParams(n=2, beam_width=3, seed=1, max_tokens=9, ignore_eos=True)
        trace.engine.add("a", (1, 2, 3), params)
        ends: list[str | None] = []
        while trace.engine.has_unfinished_requests:
            ends += [output.finish_reason for output in trace.step() if output.finish_reason is not None]
        assert ends in (["error"] * 2, ["length"] * 2)
        assert step > 6 or slot > 1 or budget < 64 or ends == ["error"] * 2
        trace.drained()


FEW = ("paged-4", "poisoned", "mixed", "large-16", "boundary", "states", "virtual-poisoned", "virtual-one-pool", "ft")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.soak) for name in EVERY]
)
def test_traces_with_naps(name: str) -> None:
    """Over a runner that loses all its pages now and then: nothing from before is found."""
    build = Build(tokens=400, chunk=16) if name in RESERVED else Build(160, chunk=16, host=200, prefix_tokens=24)
    trace = Trace(EVERY[name](build), seed=3, depth=2, budget=16, preemption="auto")
    trace.sleeps = []
    told = trace.run(10, arrivals=0.05)
    assert told.finished > 3
    assert len(trace.sleeps) > 3
