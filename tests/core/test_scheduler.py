"""The scheduler: first come first served, one iteration at a time, within a budget; preemption."""

from __future__ import annotations

import random
from typing import Any

import pytest
from echo_oracle import expected_tokens
from memories import MAX_LEN, MEMORIES, VOCAB
from traces import DEPTHS, Asked, Trace, open_trace

from bench.echo_runner import EchoRunner
from quire.core.request import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan, StepResult


def opened(name: str = "paged-4", **how: Any) -> Trace:
    return open_trace(MEMORIES[name], **how)


def ask(trace: Trace, id: str, length: int, *, n: int = 1, max_tokens: int = 12, stop: tuple[int, ...] = ()) -> None:
    prompt = tuple(random.Random(id).choices(range(1, VOCAB), k=length))
    params = SamplingParams(n=n, seed=hash(prompt) % 1000, max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=True)
    trace.add(Asked(id, prompt, params, ""))


class Recorded(Scheduler):
    """A scheduler that writes down what each call of `schedule` did."""

    log: list[tuple[StepPlan | None, list[str], list[str], int]]  # plan, admitted, preempted, steps in flight

    def schedule(self) -> StepPlan | None:
        before, flight = [request.id for request in self.running], self.num_in_flight
        self.victims: list[str] = []
        plan = super().schedule()
        stayed = set(before) - set(self.victims)
        admitted = [request.id for request in self.running if request.id not in stayed]
        self.log.append((plan, admitted, self.victims, flight))
        return plan

    def _preempt(self, victim: Request) -> None:
        self.victims.append(victim.id)
        super()._preempt(victim)


def recorded(trace: Trace) -> Recorded:
    scheduler = trace.scheduler
    scheduler.__class__ = Recorded
    assert isinstance(scheduler, Recorded)
    scheduler.log = []
    return scheduler


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("seed", range(6))
def test_first_come_first_served(seed: int, depth: int) -> None:
    """In every step those who run are the earliest; victims are the latest; who preempts admits nobody; all end."""
    rng = random.Random(seed)
    trace = opened(tokens=56, budget=rng.choice((8, 16, 64)), depth=depth)
    scheduler = recorded(trace)
    for i in range(10):
        ask(trace, f"{i:02}", rng.randint(1, 20), n=rng.choice((1, 1, 2)), max_tokens=rng.randint(8, 20))
    while trace.engine.has_unfinished_requests:
        trace.step()
        running = [request.id for request in scheduler.running]
        waiting = [request.id for request in scheduler.waiting]
        assert running + waiting == sorted(running + waiting)
    trace.drained()
    for plan, admitted, victims, flight in scheduler.log:
        assert victims == sorted(victims, reverse=True)
        if victims:
            assert not admitted
            assert flight == 0
        assert admitted == sorted(admitted)
        if plan is not None:
            assert sum(len(row.tokens) for row in plan.slices) <= scheduler.token_budget
    assert any(victims for _, _, victims, _ in scheduler.log)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_new_request_joins_within_one_step(depth: int) -> None:
    trace = opened(depth=depth)
    ask(trace, "old", 8, max_tokens=30)
    for _ in range(4):
        trace.step()
    scheduler = recorded(trace)
    ask(trace, "new", 8)
    trace.step()
    plan, admitted, _, _ = scheduler.log[0]
    assert admitted == ["new"]
    assert plan is not None
    assert sorted(len(row.tokens) for row in plan.slices) == [1, 8]
    trace.finish()


def test_the_oldest_gets_the_budget_first() -> None:
    trace = opened(budget=6)
    for id in ("a", "b", "c"):
        ask(trace, id, 10, max_tokens=4)
    scheduler = recorded(trace)
    shares = []
    while trace.engine.has_unfinished_requests:
        trace.step()
        plan = scheduler.log[-1][0]
        shares.append([] if plan is None else [len(row.tokens) for row in plan.slices])
    trace.drained()
    assert shares[:6] == [[6], [4, 2], [1, 5], [1, 3, 2], [1, 1, 4], [1, 4]]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_late_stop_wastes_at_most_the_other_steps_in_flight(depth: int) -> None:
    trace = opened(depth=depth)
    prompt = (1, 2, 3)
    free = expected_tokens(prompt, SamplingParams(max_tokens=20, ignore_eos=True), 7, vocab_size=VOCAB, max_len=MAX_LEN)
    end = next(i for i in range(6, 20) if free[i] not in free[:i])
    params = SamplingParams(seed=7, max_tokens=20, ignore_eos=True, stop_token_ids=[free[end]])
    trace.add(Asked("a", prompt, params, ""))
    trace.finish()
    assert trace.runner.rows == end + 1 + (depth - 1)
    ask(trace, "b", 5, max_tokens=9)
    trace.finish()
    assert trace.runner.rows == end + 1 + (depth - 1) + 9, "a stop by length wastes nothing"


def test_a_blind_runner_draws_one_constant_token_for_each_sample() -> None:
    trace = opened()
    ask(trace, "a", 5, n=3, max_tokens=4)
    trace.engine.runner = EchoRunner(is_constant=True)
    trace.memory.placed.clear()
    trace.exhaust()
    tokens = {token for output in trace.outputs["a"] for token in output.tokens}
    assert len(tokens) == 1
    assert sum(len(output.tokens) for output in trace.outputs["a"]) == 12


def test_refused_branches_are_tried_again_when_others_were_swapped_out() -> None:
    """What stood in a request's way was swapped out and aborted there: its pages came back without a sequence being
    freed."""
    trace = opened("uncached", tokens=72, host=100)
    ask(trace, "a", 10, max_tokens=30)
    ask(trace, "b", 10, n=3, max_tokens=12)
    a, b = trace.scheduler.waiting
    memory = trace.memory.memory
    while memory.last_refused[0] != b.live_seqs[0].id:
        trace.step()
    assert (a.status, b.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert memory.admit(b.live_seqs, 64) is None
    trace.scheduler.preemption = "swap"
    trace.scheduler._preempt(a)
    assert a.status is RequestStatus.SWAPPED
    trace.abort("a")
    trace.step()
    assert b.status is RequestStatus.RUNNING
    trace.finish()


def test_all_branches_come_back_in_one_step_or_none_does() -> None:
    """A preempted group finds room for some of its branches many steps before it finds room for all."""
    trace = opened("uncached", tokens=72)
    ask(trace, "a", 10, max_tokens=30)
    ask(trace, "b", 10, n=3, max_tokens=12)
    b = list(trace.scheduler.waiting)[1]
    some = 0
    while trace.engine.has_unfinished_requests:
        trace.step()
        here = [seq.id in trace.memory.memory.seq_pages for seq in b.live_seqs]
        assert all(here) or not any(here)
        some += (
            b.preemptions > 0 and b.status is RequestStatus.WAITING and trace.memory.memory.page_pool.can_allocate([5])
        )
    assert some > 0
    trace.drained()


# Requests that wait for what another one computes


def twice(trace: Trace, first: str, second: str, length: int, max_tokens: int = 12) -> None:
    """Two requests with one prompt, and seeds of their own."""
    prompt = tuple(random.Random(first).choices(range(1, VOCAB), k=length))
    for seed, id in enumerate((first, second)):
        trace.add(Asked(id, prompt, SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True), ""))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("tokens", [64, 256])
def test_who_waits_for_another_does_not_starve(tokens: int, depth: int) -> None:
    """New requests come at every step, and could take all slots and pages. What shares a long prompt, of which a piece
    is computed a step, is overtaken only while that is computed, and then is the next to come in."""
    trace = opened(tokens=tokens, budget=8, max_seqs=4, depth=depth)
    twice(trace, "a", "b", 30, max_tokens=2)
    scheduler = recorded(trace)
    a, b = scheduler.waiting
    (first,) = a.live_seqs
    later: list[Request] = []
    shared: int | None = None  # the step after which all is there that can be shared
    while b.status is RequestStatus.WAITING:
        ask(trace, f"c{len(scheduler.log):03}", 3 + len(scheduler.log) % 5, max_tokens=6)
        later.append(list(scheduler.waiting)[-1])
        trace.step()
        if shared is None and first.computed >= 28:
            shared = len(scheduler.log)
        if shared is not None:
            came = [id for _, admitted, _, _ in scheduler.log[shared:] for id in admitted]
            assert not came or came[0] == "b", f"{came} come first"
        assert len(scheduler.log) < 60, "it starves"
    assert shared is not None
    assert any(request.scheduled_time is not None or request.status is not RequestStatus.WAITING for request in later)
    trace.finish()


@pytest.mark.parametrize("depth", DEPTHS)
def test_room_is_kept_for_who_waits_for_another(depth: int) -> None:
    """A younger request that fits beside the first of two, but not beside the second, doesn't take the second's room:
    a step of waiting isn't the whole life of somebody else."""
    trace = opened(tokens=72, depth=depth)
    stem = [*range(1, 9)]
    trace.engine.add("a", [*stem, 60], SamplingParams(max_tokens=2, ignore_eos=True))
    trace.engine.add("b", [*stem, *range(10, 38)], SamplingParams(max_tokens=2, ignore_eos=True))
    trace.engine.add("c", [*range(40, 60), *range(20, 28)], SamplingParams(max_tokens=12, ignore_eos=True))
    order = [request.id for request in trace.scheduler.waiting]
    came: list[str] = []
    while trace.engine.has_unfinished_requests:
        trace.step()
        came += [request.id for request in trace.scheduler.running if request.id not in came]
    assert came == order


@pytest.mark.parametrize("depth", DEPTHS)
def test_nobody_new_passes_a_preempted_one_that_waits_for_another(depth: int) -> None:
    """Two requests with one prompt are preempted, and come back one after the other: nobody new comes between."""
    trace = opened(depth=depth)
    twice(trace, "a", "b", 24, max_tokens=20)
    trace.step()
    for _ in range(2 + depth):
        trace.step()
    while trace.engine.in_flight:
        trace.scheduler.update(*_collected(trace))
    for request in reversed(list(trace.scheduler.running)):
        trace.scheduler._preempt_by_recompute(request)
    trace.memory.prefix_cache.reset()
    ask(trace, "c", 5, max_tokens=4)
    came: list[str] = []
    while trace.engine.has_unfinished_requests:
        trace.step()
        came += [request.id for request in trace.scheduler.running if request.id not in came]
    assert came == ["a", "b", "c"]


def _collected(trace: Trace) -> tuple[StepPlan, StepResult]:
    plan, ticket = trace.engine.in_flight.popleft()
    return plan, trace.runner.collect(ticket)


def test_a_group_is_swapped_while_what_it_shares_is_being_computed() -> None:
    """Pages that no branch has computed yet go out and come back. Nobody may find them by the name of what they will
    hold: here one would, in the very step that computes it."""
    trace = opened("poisoned", budget=12, host=100)
    prompt = tuple(random.Random(1).choices(range(1, VOCAB), k=16))
    trace.add(Asked("a", prompt, SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True), ""))
    scheduler, (a,) = trace.scheduler, trace.scheduler.waiting
    while len(a.live_seqs) < 2:
        trace.step()
    scheduler._preempt(a)
    trace.memory.prefix_cache.reset()
    trace.step()
    assert a.live_seqs[1].prefix_source is a.live_seqs[0]
    assert (a.live_seqs[0].computed, a.live_seqs[1].computed) == (12, 16)
    scheduler.preemption = "swap"
    scheduler._preempt(a)
    trace.memory.prefix_cache.reset()
    trace.add(Asked("b", (*prompt, 5), SamplingParams(seed=2, max_tokens=4, ignore_eos=True), ""))
    trace.step()
    assert a.status is RequestStatus.RUNNING
    trace.finish()


def test_nobody_new_is_admitted_while_somebody_is_swapped() -> None:
    trace = opened(tokens=40, host=100, preemption="swap")
    for id in ("a", "b"):
        ask(trace, id, 12, max_tokens=20)
    while not trace.scheduler.swapped:
        trace.step()
    ask(trace, "c", 1, max_tokens=1)  # there would be room for it
    while trace.scheduler.swapped:
        trace.step()
        assert "c" not in [request.id for request in trace.scheduler.running] or not trace.scheduler.swapped
    trace.finish()
    assert trace.scheduler.preemption_counts == {"swap": 1, "recompute": 0}


def test_auto_takes_the_cheaper_way_for_each_victim() -> None:
    """In these traces recomputing costs as much as swapping six pages."""
    for length, way in ((8, "swap"), (32, "recompute")):
        trace = opened(tokens=128, host=100, preemption="auto")
        ask(trace, "a", length, max_tokens=6)
        trace.step()
        trace.scheduler._preempt(next(iter(trace.scheduler.running)))
        assert trace.scheduler.preemption_counts[way] == 1
        trace.finish()


@pytest.mark.parametrize(("host", "ways"), [(100, {"swap"}), (4, {"recompute"}), (0, {"recompute"})])
@pytest.mark.parametrize("policy", ["swap", "auto"])
def test_who_does_not_fit_into_host_memory_is_recomputed(policy: str, host: int, ways: set[str]) -> None:
    """Also where swapping is asked for, or predicted to cost less."""
    trace = opened(tokens=40, host=host, preemption=policy)
    for id in ("a", "b"):
        ask(trace, id, 12, max_tokens=20)
    trace.finish()
    assert {way for way, count in trace.scheduler.preemption_counts.items() if count} == ways
