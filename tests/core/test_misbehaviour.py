"""A caller's method does what its contract forbids: its own request ends with an error that names it and the limit, and
those beside it get the tokens that they get without it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from memories import MEMORIES, Build

from bench.echo_runner import EchoRunner
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.core.scheduler import Scheduler
from quire.core.step_history import MAX_STEPS, StepRecord
from quire.core.validation import EngineLimits
from quire.errors import EngineDead, InputError
from quire.protocol.method import Advance, Branch, Choice, Context, Ending
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepResult
from quire.text.session import session_params

VOCAB, WIDTH, MAX_TOKENS = 64, 3, 12
Answer = Callable[[Sequence[Branch], Context], Any]
NEIGHBOURS = {
    "samples": ([1, 2, 3, 4], SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True, frequency_penalty=0.5)),
    "beams": ([5, 6, 7], SamplingParams(n=2, beam_width=3, max_tokens=18, ignore_eos=True)),
}


class Two:
    """Two candidates, and two results."""

    def top(self, context: Context) -> int:
        return 2

    def keep(self) -> int:
        return 2


class Rogue(Two):
    """Well-behaved for some steps, with one branch at first, then two."""

    def __init__(self, answer: Answer, after: int = 0) -> None:
        self.width, self.answer, self.after = WIDTH, answer, after

    def advance(self, branches: Sequence[Branch], context: Context) -> Any:
        self.after -= 1
        if self.after < 0:
            return self.answer(branches, context)
        parents = (0, 0) if len(branches) == 1 else (0, 1)
        return Advance(tuple(Choice(p, branches[p].top.ids[i], -1.0) for i, p in enumerate(parents)), (an_ending(),))


def a_choice(parent: Any = 0, token: Any = 1, logprob: Any = -1.0) -> Choice:
    return Choice(parent, token, logprob)


def an_ending(token: Any = 1, score: Any = 0.0, reason: Any = "stop", stop_reason: Any = None) -> Ending:
    return Ending(0, token, -1.0, score, reason, stop_reason)


def choosing(*choices: Any) -> Answer:
    return lambda branches, context: Advance(choices)


def ending(**wrong: Any) -> Answer:
    return lambda branches, context: Advance((), (an_ending(**wrong),))


def failing(branches: Sequence[Branch], context: Context) -> Advance:
    raise KeyError("mine")


def writing(branches: Sequence[Branch], context: Context) -> Advance:
    branches[0].tokens.append(1)  # type: ignore[attr-defined]
    return Advance((a_choice(),))


class Unspeakable(Exception):
    """An error that can't even be shown."""

    def __str__(self) -> str:
        raise ValueError


def unspeakable(branches: Sequence[Branch], context: Context) -> Advance:
    raise Unspeakable


ANSWERS: dict[str, tuple[Answer, str]] = {
    "a parent too many": (choosing(a_choice(parent=5)), r"names branch 5, but the live ones are 0 to [01]$"),
    "a negative parent": (choosing(a_choice(parent=-1)), r"names branch -1,"),
    "a parent that is no integer": (choosing(a_choice(parent=0.0)), r"names branch 0\.0,"),
    "an ending's parent": (lambda b, c: Advance((), (Ending(9, 1, 0.0, 0.0, "stop"),)), r"names branch 9,"),
    "a token too many": (choosing(a_choice(token=VOCAB)), r"chose token 64: token ids are integers from 0 to 63$"),
    "a negative token": (choosing(a_choice(token=-1)), r"chose token -1:"),
    "a token that is true": (choosing(a_choice(token=True)), r"chose token a bool:"),
    "a huge token": (choosing(a_choice(token=10**5000)), r"chose token an int:"),
    "a text as token": (choosing(a_choice(token="t")), r"chose token 't':"),
    "no log-probability": (choosing(a_choice(logprob=math.nan)), r"log-probability nan: it must be a finite number"),
    "an infinite log-probability": (choosing(a_choice(logprob=-math.inf)), r"log-probability -inf:"),
    "a huge log-probability": (choosing(a_choice(logprob=10**400)), r"log-probability an int:"),
    "more than its width": (choosing(*[a_choice()] * 4), r"continues 4 branches, but its width is 3$"),
    "after max_tokens": (lambda b, c: Advance((a_choice(),)), r"goes on after max_tokens, which is 12$"),
    "an unknown reason": (ending(reason="done"), r"""ended a branch for 'done': the reason is "stop" or "length"$"""),
    "a reason of another type": (ending(reason=[]), r"ended a branch for a list:"),
    "a score": (ending(score=math.inf), r"gave the score inf:"),
    "a score of another type": (ending(score="1"), r"gave the score '1':"),
    "a stop reason": (ending(stop_reason="t"), r"gave the stop_reason 't': it must be a token id or None"),
    "an answer of another type": (lambda b, c: [a_choice()], r"answered with a list: it must be an Advance$"),
    "choices of another type": (lambda b, c: Advance(a_choice), r"gave a function in place of a tuple of Choice"),  # type: ignore[arg-type]
    "a choice of another type": (choosing((0, 1, -1.0)), r"gave a tuple in place of a Choice$"),
    "an ending of another type": (lambda b, c: Advance((), (None,)), r"gave None in place of an Ending$"),  # type: ignore[arg-type]
    "no answer": (lambda b, c: None, r"answered None, and nobody else continues its branches"),
    "an exception": (failing, r"failed in advance\(\): KeyError: 'mine' \(test_misbehaviour\.py:\d+\)$"),
    "an exception without a text": (unspeakable, r"failed in advance\(\): Unspeakable \("),
    "a branch's tokens changed": (writing, r"failed in advance\(\): AttributeError: 'ReadOnlyTokens' object"),
}


def engine_of(
    runner: EchoRunner | int, preemption: str = "recompute", tokens: int = 512, host: int = 0, budget: int = 64
) -> Engine:
    """Over a runner, or one of so many steps in flight."""
    memory = MEMORIES["paged-4"](Build(tokens, budget, 8, host=host))
    runner = EchoRunner(runner, vocab_size=VOCAB) if isinstance(runner, int) else runner
    runner.bind(memory.kv_config)
    scheduler = Scheduler(memory, token_budget=budget, max_seqs=8, max_len=48, preemption=preemption)
    return Engine(scheduler, runner, EngineLimits(VOCAB, 48, 8), clock=time.monotonic)


def drive(engine: Engine) -> dict[str, list[BranchOutput]]:
    """All outputs, by request; at the end nothing is left anywhere."""
    outputs: dict[str, list[BranchOutput]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.memory.check()
    assert not engine.requests
    assert not engine.scheduler.by_slot
    assert engine.scheduler.memory.account().usage.used == 0
    return outputs


def tokens_of(outputs: list[BranchOutput]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.branch, []).extend(output.tokens)
    return found


def asked(method: Callable[[], Any], n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, method=method, max_tokens=MAX_TOKENS, ignore_eos=True)


def alone(depth: int) -> dict[str, dict[int, list[int]]]:
    engine = engine_of(depth)
    for id, (prompt, params) in NEIGHBOURS.items():
        engine.add(id, prompt, params)
    return {id: tokens_of(outputs) for id, outputs in drive(engine).items()}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("name", ANSWERS)
def test_only_its_own_request_ends(name: str, after: int, depth: int) -> None:
    answer, message = ANSWERS[name]
    engine = engine_of(depth)
    (first, one), (second, other) = NEIGHBOURS.items()
    engine.add(first, *one)
    engine.add("rogue", [8, 9], asked(lambda: Rogue(answer, after), n=2))
    engine.add(second, *other)
    outputs = drive(engine)
    told = outputs.pop("rogue")
    assert [(output.branch, output.finish_reason) for output in told[-2:]] == [(0, "error"), (1, "error")]
    assert [output.done for output in told] == [False] * (len(told) - 1) + [True]
    reason = told[-1].stop_reason
    assert isinstance(reason, str)
    assert reason.startswith("the method Rogue ")
    assert re.search(message, reason), reason
    assert {id: tokens_of(found) for id, found in outputs.items()} == alone(depth)
    assert engine.stats.finished["error"] == 2


def test_an_end_without_a_result() -> None:
    engine = engine_of(1)
    engine.add("a", [1, 2], asked(lambda: Rogue(choosing())))
    [output] = drive(engine)["a"]
    assert (output.finish_reason, output.stop_reason) == ("error", "the method Rogue ends without a result")


def test_it_may_fail_while_memory_is_short() -> None:
    """Its branches are preempted, swapped and recomputed before it fails; its neighbours too."""
    for way in ("swap", "recompute"):
        for after in range(9):
            engine = engine_of(2, way, tokens=72, host=200)
            for id, (prompt, params) in NEIGHBOURS.items():
                engine.add(id, prompt, params)
            engine.add("rogue", [8, 9], asked(lambda: Rogue(failing, after)))  # noqa: B023  # called by `add`
            outputs = drive(engine)
            assert outputs.pop("rogue")[-1].finish_reason == "error"
            assert {id: tokens_of(found) for id, found in outputs.items()} == alone(2)


def test_its_width_and_what_it_keeps_are_asked_once() -> None:
    """Saying something else later has no effect: not on the slots that it may take, nor on its results."""
    moody = Rogue(lambda b, c: Advance((), tuple(an_ending(score=float(i)) for i in range(4))), 3)
    top, keep = Mock(return_value=2), Mock(return_value=3)

    def advance(branches: Sequence[Branch], context: Context) -> Any:
        moody.width += 100
        return Rogue.advance(moody, branches, context)

    vars(moody).update(top=top, keep=keep, advance=advance)
    engine = engine_of(2)
    engine.add("moody", [8, 9], asked(lambda: moody, n=3))
    for id, (prompt, params) in NEIGHBOURS.items():
        engine.add(id, prompt, params)
    outputs = drive(engine)
    assert (top.call_count, keep.call_count) == (1, 1)
    assert [output.finish_reason for output in outputs.pop("moody")[-3:]] == ["stop"] * 3
    assert {id: tokens_of(found) for id, found in outputs.items()} == alone(2)


def with_(**members: Any) -> Callable[[], Any]:
    return lambda: type("Odd", (Rogue,), {"width": WIDTH, "__init__": lambda self: None, **members})()


def broken(*_: object) -> int:
    raise ZeroDivisionError("none")


FACTORIES: dict[str, tuple[Any, str]] = {
    "raises": (lambda: 1 // 0, r"method\(\) failed: ZeroDivisionError: .*test_misbehaviour"),
    "no factory": (7, r"method\(\) failed: TypeError: 'int' object is not callable"),
    "None": (lambda: None, r"method\(\) returned None"),
    "a class": (lambda: Rogue, r"the method type failed in width: AttributeError"),
    "no method": (lambda: object(), r"the method object failed in width: AttributeError"),
    "no advance": (with_(advance=None), r"the method Odd has no advance"),
    "no width": (with_(width=0), r"the method Odd has a width of 0: it must be an integer of at least 1"),
    "a width of another type": (with_(width=2.0), r"has a width of 2\.0:"),
    "a width that fails": (with_(width=property(broken)), r"failed in width: ZeroDivisionError: none"),
    "too wide": (with_(width=9), r"the width of the method is 9, but at most 8 sequences run at once"),
    "keeps nothing": (with_(keep=lambda self: 0), r"has a keep\(\) of 0: it must be an integer of at least 1"),
    "keep fails": (with_(keep=broken), r"failed in keep\(\): ZeroDivisionError: none"),
    "no top": (with_(top=lambda self, context: -1), r"has a top\(\) of -1: it must be an integer of at least 0"),
    "top fails": (with_(top=broken), r"failed in top\(\): ZeroDivisionError: none"),
    "top of another type": (with_(top=lambda self, context: "many"), r"has a top\(\) of 'many':"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_no_method_is_refused_and_nothing_is_queued(name: str) -> None:
    factory, message = FACTORIES[name]
    made = 0

    def second() -> Any:
        nonlocal made
        made += 1
        return Rogue(ending()) if made == 1 or not callable(factory) else factory()

    engine = engine_of(1)
    with pytest.raises(InputError, match=message) as raised:
        engine.add("bad", [1, 2], asked(factory))
    assert raised.value.param == "method"
    if callable(factory):
        with pytest.raises(InputError, match=message):
            engine.add_all([("a", [1, 2]), ("b", [1, 2])], asked(second))
    assert (engine.num_added, engine.scheduler.last_seq_id, len(engine.requests)) == (0, 0, 0)
    assert not engine.has_unfinished_requests


def test_more_candidates_than_tokens() -> None:
    engine = engine_of(1)
    engine.add("a", [1, 2], asked(with_(top=lambda self, context: 10**30, advance=lambda s, b, c: ending()(b, c))))
    [output] = drive(engine)["a"]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_session_may_wait_for_its_caller(depth: int) -> None:
    """Its steps bring nothing then; its neighbours' go on."""
    engine = engine_of(depth)
    engine.add("session", [1, 2, 3], session_params(2, 20, 5), may_wait=True)
    assert [engine.step() for _ in range(3)] == [[]] * 3
    for id, (prompt, params) in NEIGHBOURS.items():
        engine.add(id, prompt, params)
    outputs: dict[str, list[BranchOutput]] = {id: [] for id in NEIGHBOURS}
    while len(engine.requests) > 1:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert {id: tokens_of(found) for id, found in outputs.items()} == alone(depth)
    assert engine.has_unfinished_requests
    assert engine.step() == []
    engine.abort("session")
    assert [output.finish_reason for output in drive(engine)["session"]] == ["abort"]


def test_nothing_to_do_and_nobody_to_wait_for_is_a_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(1)
    engine.add("a", [1, 2], SamplingParams())
    monkeypatch.setattr(engine.scheduler.memory, "admit", lambda *_: None)
    with pytest.raises(EngineDead, match="no progress: 1 requests wait"):
        engine.step()


def test_an_interrupt_in_a_method_is_an_interrupt() -> None:
    def interrupted(branches: Sequence[Branch], context: Context) -> Advance:
        raise KeyboardInterrupt

    engine = engine_of(1)
    engine.add("a", [1, 2], asked(lambda: Rogue(interrupted)))
    with pytest.raises(KeyboardInterrupt):
        drive(engine)


# The engine's own: counts of seconds, and stops that its readers find


class Timed(EchoRunner):
    """Its n-th step takes n/8 seconds, counted from when the step before it ended."""

    def collect(self, ticket: int) -> StepResult:
        return super().collect(ticket)._replace(seconds=ticket / 8)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_seconds_that_do_not_overlap_are_added_as_they_are(depth: int) -> None:
    """With steps in flight too, each step's seconds count once and when it is collected."""
    runner = Timed(depth, vocab_size=VOCAB)
    engine = engine_of(runner)
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
        assert engine.stats.step_seconds == sum(n / 8 for n in range(1, runner.collected + 1))
    assert runner.collected == engine.stats.steps == 9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_steps_are_noted_from_when_somebody_watches(depth: int) -> None:
    """What each did adds up to what the engine counted since; steps that were planned before aren't noted."""
    engine = engine_of(Timed(depth, vocab_size=VOCAB), "auto", tokens=96, host=24, budget=16)
    scheduler = engine.scheduler
    for name in "abcdef":
        engine.add(name, [ord(name) % VOCAB] * 9, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(2):
        engine.step()
    begun, computed = engine.stats.steps, engine.stats.computed_tokens
    under_way = sum(len(row.tokens) for plan, _ in engine.in_flight for row in plan.slices)
    before = dict(scheduler.preemption_counts)
    engine.watch_steps(True)
    assert engine.step_history is not None
    engine.add("g", [7] * 12, SamplingParams(max_tokens=2))
    steps = list[StepRecord]()
    while engine.has_unfinished_requests:
        engine.step()
        steps += [step for step in engine.step_history.steps if not steps or step.number > steps[-1].number]
        assert len(engine.step_history.steps) <= MAX_STEPS
    assert [step.number for step in steps] == list(range(begun + 1, engine.stats.steps + 1))
    assert [step.ms for step in steps] == [125.0 * step.number for step in steps]
    told = sum(step.prefill_tokens + step.decode_slices for step in steps)
    assert told == engine.stats.computed_tokens - computed - under_way
    assert max(step.prefill_tokens for step in steps) > 8
    assert sum(step.swapped for step in steps) == scheduler.preemption_counts["swap"] - before["swap"]
    assert sum(step.recomputed for step in steps) == scheduler.preemption_counts["recompute"] - before["recompute"]
    assert scheduler.num_preemptions > sum(before.values())


class Second(Two):
    """Two branches, of which the second goes on, until both that it becomes do: what readers call 0 never has that
    index here, and then two have one text."""

    width = 2

    def __init__(self) -> None:
        self.steps = 0

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance:
        self.steps += 1
        parents = {1: [0, 0], 2: [1], 3: [0], 4: [0, 0]}.get(self.steps, range(len(branches)))
        return Advance(tuple(Choice(parent, 7 if self.steps > 1 else at, -1.0) for at, parent in enumerate(parents)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", [3, 4, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_in_a_methods_text_ends_all_of_its_branches(depth: int, steps: int, n: int) -> None:
    """Readers see what all branches agree on, under numbers that aren't the branches' own."""
    engine = engine_of(depth)
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True, method=Second, n=n))
    told = [output for _ in range(steps) for output in engine.step()]
    assert {output.branch for output in told if output.tokens} == set(range(n))
    ended = [engine.stop("a", branch, "so") for branch in range(n)]
    assert ended[0] is True
    assert not any(ended[1:])
    assert engine.requests == {}
    for _ in range(depth):
        assert engine.step() == []
    assert not engine.has_unfinished_requests
    assert engine.stats.finished == {"stop": n}
    assert engine.stats.steps <= steps + depth
    engine.scheduler.memory.check()
