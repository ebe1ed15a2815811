"""The lane of forms in the engine's process: a grammar that takes its time holds up what is about its own request, in
order, and nothing else. Makers wait here until they are let."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import echo_service
import pytest
from loop_driver import LoopDriver
from waiting import wait_until

from quire.errors import EngineDead, InputError
from quire.ipc import grammar_queue as lanes
from quire.ipc.engine_loop import ClientLeft
from quire.ipc.grammar_queue import GrammarQueue
from quire.ipc.messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    ListPrefixes,
    NewRequest,
    RegisterPrefix,
    ReleasePrefix,
    SnapshotRequest,
    StopBranch,
)
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import Structured
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler

FORM = Structured("regex", "[a-z]{20}")
PLAIN = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
MADE = GrammarCompiler(echo_service.tokenizer(), echo_service.VOCAB, (0,), trusted=True)


class Maker:
    """Makes grammars once it is let; those that it has made are held, unless it is `forgetful`."""

    def __init__(self, forgetful: bool = False) -> None:
        self.forgetful, self.let, self.begun = forgetful, threading.Semaphore(0), threading.Semaphore(0)
        self.made: set[str] = set()
        self.failure: BaseException | None = None

    def get_cached(self, asked: Structured) -> CompiledGrammar | None:
        return MADE.get(asked) if asked.source in self.made else None

    def get(self, asked: Structured) -> CompiledGrammar:
        self.begun.release()
        assert self.let.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        if not self.forgetful:
            self.made.add(asked.source)
        return MADE.get(asked)


class Front(LoopDriver):
    """A client of a loop that is run by hand, and the queue between them."""

    def __init__(self, forgetful: bool = False) -> None:
        super().__init__(echo_service.built())
        self.sent: list[ClientMessage | ClientLeft] = []  # what the host got
        self.maker = Maker(forgetful)
        send = self.loop.enqueue

        def record(front: int, message: ClientMessage | ClientLeft) -> bool:
            self.sent.append(message)
            return send(front, message)

        self.loop.enqueue = record  # type: ignore[method-assign]
        self.lane = GrammarQueue(0, self.loop, self.maker, partial(self.receive, 0))

    def go(self, until: Callable[[], bool] = lambda: True) -> None:
        """Run the loop until `until` returns True; other threads may work for that meanwhile."""

        def rests() -> bool:
            self.run()
            return until() and not self.loop._incoming  # which others may have filled meanwhile

        wait_until(rests, "it is so", 20)

    def quiet(self) -> bool:
        """Return True if no message waits in the queue."""
        with self.lane._condition:
            return not self.lane._messages

    def errors(self) -> dict[int, Exception | None]:
        return {answer.key: answer.error for answer in self.replies()}

    def is_empty(self) -> bool:
        return super().is_empty() and not self.lane._waiting_requests


@pytest.fixture
def front() -> Iterator[Front]:
    made = Front()
    yield made
    made.lane.close()
    made.maker.let.release(1000)


def add(number: int, form: Structured | None = FORM) -> AddRequests:
    params = PLAIN if form is None else SamplingParams(max_tokens=30, seed=1, structured=form)
    return AddRequests(number, (NewRequest(number, f"r{number}", [1, 2, 3]),), params)


def test_others_go_on_and_those_of_a_held_grammar_too(front: Front) -> None:
    front.lane.submit(add(1))
    assert front.maker.begun.acquire(timeout=20)
    front.lane.submit(add(2, None))
    front.lane.submit(SnapshotRequest(9))
    front.go()
    assert front.outputs(2)[-1].done
    assert front.errors() == {2: None, 9: None}
    front.maker.let.release()
    front.go(front.quiet)
    assert front.outputs(1)[-1].finish_reason == "stop"
    front.lane.submit(add(3))
    assert front.quiet(), "its grammar is held"
    front.go()
    assert front.outputs(3)[-1].done
    assert front.is_empty()


def test_a_grammar_that_is_made_holds_up_none_that_is_there(front: Front) -> None:
    front.maker.made.add("b")
    front.lane.submit(add(1))
    front.lane.submit(there := add(2, Structured("regex", "b")))
    assert [message.requests[0].number for message in front.sent if isinstance(message, AddRequests)] == [2]
    assert there.params.structured is not None
    front.maker.let.release()
    front.go(front.quiet)
    assert front.errors() == {1: None, 2: None}
    assert front.is_empty()


@pytest.mark.parametrize(
    ("message", "now"),
    [
        (AbortRequests((1,)), None),
        (AbortRequests(None), AbortRequests(None)),
        (AbortRequests((7, 1, 2)), AbortRequests((7, 2))),
    ],
)
def test_an_abort_waits_for_its_request(front: Front, message: AbortRequests, now: AbortRequests | None) -> None:
    """An abort of all requests waits, too; other requests that it names end at once."""
    other = AddRequests(4, (NewRequest(4, "r4", [1]),), SamplingParams(max_tokens=200, ignore_eos=True))
    front.lane.submit(other)
    front.lane.submit(add(1))
    front.lane.submit(message)
    front.lane.submit(StopBranch(1, 0, "so"))
    assert front.sent == [other, *([now] if now is not None else [])]
    front.go()
    front.maker.let.release()
    front.go(front.quiet)
    assert front.outputs(4)[-1].finish_reason == ("abort" if message.numbers is None else "length")
    assert front.outputs(1)[-1].finish_reason == "abort"
    assert front.is_empty()


def test_prefixes_keep_their_order(front: Front) -> None:
    front.lane.submit(add(1))
    late: list[ClientMessage] = [
        RegisterPrefix(2, 2, "p", [1, 2]),
        ReleasePrefix(3, "p"),
        RegisterPrefix(4, 4, "p", [1, 2]),
        ListPrefixes(5),
    ]
    for message in late:
        front.lane.submit(message)
    assert front.sent == []
    front.maker.let.release()
    front.go(front.quiet)
    assert [type(message) for message in front.sent] == [AddRequests, *map(type, late)]
    assert list(front.errors()) == [1, 2, 3, 4, 5]
    front.lane.submit(ListPrefixes(6))
    assert front.sent[-1] == ListPrefixes(6), "nothing waits"


@pytest.mark.parametrize("made_late", [False, True])
def test_a_front_that_left_asks_for_nothing_any_more(front: Front, made_late: bool) -> None:
    front.lane.submit(add(1))
    front.lane.submit(add(2, Structured("regex", "b")))
    assert front.maker.begun.acquire(timeout=20)
    if not made_late:
        front.maker.let.release(2)
        front.go(front.quiet)
    front.lane.close()
    front.loop.enqueue(0, ClientLeft())
    front.maker.let.release(2)
    front.lane._thread.join(20)
    assert not front.lane._thread.is_alive()
    assert isinstance(front.sent[-1], ClientLeft)
    assert len(front.sent) == (1 if made_late else 3)


@pytest.mark.parametrize(("failure", "kind"), [(InputError("no", "x"), InputError), (RuntimeError("no"), EngineDead),
                                               (SystemExit("no"), EngineDead)])  # fmt: skip
def test_a_grammar_that_fails_fails_its_own_request(front: Front, failure: BaseException, kind: type) -> None:
    front.maker.failure = failure
    front.lane.submit(add(1))
    front.lane.submit(AbortRequests((1,)))
    front.maker.let.release()
    front.go(front.quiet)
    assert type(front.errors()[1]) is kind
    front.maker.failure = None
    front.lane.submit(add(2))
    front.maker.let.release()
    front.go(front.quiet)
    assert front.errors()[2] is None
    assert front.is_empty()


def test_without_a_maker_there_are_no_forms(front: Front) -> None:
    with pytest.raises(InputError, match="does not support structured output"):
        GrammarQueue(0, front.loop, None, partial(front.receive, 0)).submit(add(1))


def test_the_reader_waits_where_very_many_wait(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING_MESSAGES", 3)
    front.maker.forgetful = True

    def read() -> None:
        for number in range(8):
            front.lane.submit(add(number))

    reader = threading.Thread(target=read)
    reader.start()
    for left in range(8, 3, -1):
        wait_until(lambda: len(front.lane._messages) >= 3, "three wait")
        assert len(front.lane._messages) == 3
        assert reader.is_alive() == (left > 3)
        front.maker.let.release()
        front.go(lambda number=8 - left: number in front.errors())  # type: ignore[misc]
    reader.join(20)
    front.maker.let.release(3)
    front.go(front.quiet)
    assert list(front.errors()) == list(range(8))
    assert front.is_empty()


def test_random_messages_leave_nothing() -> None:
    """Each request is answered once, and ends."""
    for seed in range(15):
        rng, front = random.Random(seed), Front(forgetful=True)
        live, stopped = list[int](), set[int]()
        for _ in range(40):
            what = rng.random()
            if what < 0.4:
                live.append(len(live))
                front.lane.submit(add(live[-1], FORM if rng.random() < 0.5 else None))
            elif what < 0.7 and live:
                numbers = None if rng.random() < 0.1 else tuple(rng.sample(live, min(len(live), rng.randrange(1, 4))))
                front.lane.submit(AbortRequests(numbers))
            elif what < 0.8 and live:
                stopped.add(number := rng.choice(live))
                front.lane.submit(StopBranch(number, 0, "so"))
            elif front.loop._incoming or front.engine.has_unfinished_requests:
                front.loop._run_once()
            if rng.random() < 0.5:
                front.maker.let.release()
        front.maker.let.release(100)
        front.go(front.quiet)
        assert front.is_empty()
        assert sorted(front.errors()) == live
        assert not any(front.errors().values())
        for number in {*live} - stopped:  # of those that a stop ended nothing more is told
            assert front.outputs(number)[-1].done
        front.lane.close()
