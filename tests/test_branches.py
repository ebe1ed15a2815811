"""Branches in awkward moments: appended to while a step is in flight, freed while another waits for them, failed."""

from __future__ import annotations

import time

import pytest
from echo_oracle import expected_states
from memories import MEMORIES, Build

from bench.echo_runner import EchoRunner, fake_top
from quire.core.engine import Engine
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import common_prefix_len
from quire.protocol.step_plan import StepResult
from quire.text.session import Node, session_params

VOCAB = 64


def engine_of(runner: EchoRunner, budget: int = 64, name: str = "paged-4") -> Engine:
    memory = MEMORIES[name](Build(256, budget, 8))
    runner.bind(memory.kv_config)
    scheduler = Scheduler(memory, token_budget=budget, max_seqs=8, max_len=48)
    return Engine(scheduler, runner, EngineLimits(VOCAB, 48, 8), clock=time.monotonic)


def session_of(engine: Engine, prompt: list[int]) -> Node:
    engine.add("session", prompt, session_params(3, 20, 5), may_wait=True)
    request = engine.requests["session"]
    return Node(engine, engine.step, request, request.live_seqs[0])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_in_flight_does_not_answer_for_tokens_appended_since(depth: int) -> None:
    engine = engine_of(EchoRunner(depth, vocab_size=VOCAB), budget=4)
    first = session_of(engine, [1, 2, 3])
    first.next(1)
    second = first.fork()
    first.append(5, 6, 7, 8)
    second.append(9)
    first.next(1)
    second.append(10)
    state = expected_states([1, 2, 3, 9, 10])[-1]
    assert second.next(5).ids == fake_top(state, 0, 5, VOCAB).ids


def test_a_branch_that_others_wait_for_is_computed_before_it_is_freed() -> None:
    engine = engine_of(EchoRunner(1, vocab_size=VOCAB), budget=4, name="uncached")
    first = session_of(engine, list(range(1, 13)))
    first.next(1)
    second = first.fork()
    first.append(20)
    second.append(21)
    engine.scheduler._preempt_by_recompute(next(iter(engine.scheduler.running)))
    engine.step()
    first.free()
    state = expected_states([*range(1, 13), 21])[-1]
    assert second.next(5).ids == fake_top(state, 0, 5, VOCAB).ids
    engine.scheduler.memory.check()


class Faulty(EchoRunner):
    """The second row of the third step has faulty logits."""

    steps = 0

    def collect(self, ticket: int) -> StepResult:
        result = super().collect(ticket)
        self.steps += 1
        if self.steps != 3:
            return result
        samples = list(result.slice_results)
        samples[1] = samples[1]._replace(tokens=(0,), top_logprobs=(), error="faulty")
        return result._replace(slice_results=tuple(samples))


def test_best_of_returns_a_failed_branch_last() -> None:
    engine = engine_of(Faulty(1, vocab_size=VOCAB))
    engine.add("best", [1, 2, 3], SamplingParams(n=1, best_of=4, max_tokens=8, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert [(len(output.tokens), output.finish_reason, output.done) for output in outputs] == [(8, "length", True)]


def test_releasing_an_unknown_prefix_leaves_a_request_of_that_name_alone() -> None:
    engine = engine_of(EchoRunner(1, vocab_size=VOCAB))
    engine.add("prefix:doc", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    assert not engine.release_prefix("doc")
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("differs", [0, 1, 7, 30, 31, None])
def test_common_prefixes(differs: int | None) -> None:
    a, b = list(range(32)), list(range(32))
    if differs is not None:
        b[differs] = -1
    expected = 32 if differs is None else differs
    assert common_prefix_len(a, b, 99) == expected
    assert common_prefix_len(a, b, 8) == min(expected, 8)
    assert common_prefix_len(a, b[:5], 99) == min(expected, 5)
