"""A front that lags: what waits for it is merged, and comes to the same as if it had been told step by step."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import echo_service
import pytest

from quire.control.outcomes import Output
from quire.errors import EngineDead
from quire.link.backlog import Backlog
from quire.link.frames import Frames, read_engine
from quire.link.messages import Answer, Died, FromEngine, Progress, Queues, Stepped
from quire.link.program import Side
from quire.text.transcript import Transcript
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Top

TOPS = (Top(5, -0.5, 1, (), ()),)


def output(branch: int, *tokens: int, finish: str | None = None, done: bool = False, **more: Any) -> Output:
    return Output("", branch, tokens, "", (), finish, None, done, 0.0)._replace(**more)


def stepped(*outputs: tuple[int, Output], now: float = 1.0, computed: int = 0) -> Stepped:
    return Stepped(now, Queues(1), computed, (), list(outputs))


def test_outputs_of_a_branch_become_one() -> None:
    backlog = Backlog()
    assert backlog.add(stepped((1, output(0, 5)), (1, output(1, 6)), (2, output(0, 7)))) is None
    assert backlog.add(stepped((1, output(0, 8, 9)), (2, output(0, 3, finish="length", done=True)), now=2.0)) is None
    ends = [(1, output(0, finish="stop", stop_reason=4, done=True))]
    assert backlog.add(stepped((1, output(1, 4, finish="length")), *ends, now=3.0)) is None
    assert backlog
    [message] = backlog.take()
    assert message.now == 3.0
    assert message.outputs == [
        (1, output(1, 6, 4, finish="length")),
        (1, output(0, 5, 8, 9, finish="stop", stop_reason=4, done=True)),  # whoever ends the request comes last
        (2, output(0, 7, 3, finish="length", done=True)),
    ]
    assert not backlog
    assert backlog.take() == []


def test_what_is_not_merged_is_told_at_once() -> None:
    backlog = Backlog()
    progress = [Progress(1, 5, None, None, 0, 0)]
    scored = output(0, 5, tops=TOPS)
    message = stepped((1, scored), (2, output(0, 6)), computed=7)._replace(progress=progress)
    assert backlog.add(message) == message._replace(outputs=[(1, scored)])
    embedded = stepped((3, output(0, finish="stop", done=True, pooled=(0.5, -1.0))))
    assert backlog.add(embedded) == embedded
    assert backlog.add(stepped((2, output(0, 6, tops=TOPS)))) is None  # others of its request wait
    assert backlog.take()[0].outputs == [(2, output(0, 6, 6, tops=TOPS))]


@contextmanager
def side() -> Iterator[tuple[socket.socket, Side]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Side(3, theirs)


def read(connection: socket.socket, until: type[FromEngine]) -> list[FromEngine]:
    frames, found = Frames(), list[FromEngine]()
    connection.settimeout(20)
    while not (found and isinstance(found[-1], until)):
        data = connection.recv(1 << 18)
        assert data, "the front was left"
        found += map(read_engine, frames.feed(data))
    return found


def test_a_front_that_lags_is_not_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What comes to 18 MB step by step waits in 5, whole."""
    monkeypatch.setattr("quire.link.channel.MOST_WAITING", 6_000_000)
    monkeypatch.setattr("quire.link.program.LAGS", 100_000)
    steps, rows = 10_000, 100
    with side() as (front, engine):
        for step in range(steps):
            engine.tell(stepped(*((row, output(0, step)) for row in range(rows)), computed=1))
            if step == 150:
                engine.tell(Died(EngineDead("so")))
        assert engine.channel.held < 800_000
        assert engine._backlog
        said: dict[int, list[int]] = {row: [] for row in range(rows)}
        computed, frames = 0, Frames()
        front.settimeout(20)
        while (
            sum(map(len, said.values())) < steps * rows
        ):  # what was merged is sent once the front reads, also when the engine says nothing more
            for message in map(read_engine, frames.feed(front.recv(1 << 18))):
                if isinstance(message, Died):
                    assert computed == 151, "what waited comes before"
                    continue
                computed += message.computed
                for number, found in message.outputs:
                    said[number] += found.tokens
        assert all(tokens == list(range(steps)) for tokens in said.values())
        assert computed == steps
        engine.tell(Answer(1))
        [frame] = frames.feed(front.recv(1 << 18))
        assert read_engine(frame) == Answer(1)
        assert not engine._backlog
    assert caplog.text.count("front 3 lags: ") == 2  # before the engine said so and behind it


def test_what_waits_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are merged until nothing waits, not only as long as much does."""
    with side() as (front, engine):
        monkeypatch.setattr("quire.link.program.LAGS", -1)
        engine.tell(stepped((1, output(0, 5))))
        monkeypatch.setattr("quire.link.program.LAGS", 1000)
        engine.tell(stepped((1, output(0, 6))))
        engine._caught_up()
        engine.tell(Answer(1))
        steps = [message for message in read(front, Answer) if isinstance(message, Stepped)]
    assert [token for step in steps for _, found in step.outputs for token in found.tokens] == [5, 6]


def test_a_front_that_never_reads_is_left_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.link.program.MOST_WAITING", 300_000)
    monkeypatch.setattr("quire.link.program.LAGS", 100_000)
    with side() as (_, engine):
        for step in range(20_000):
            engine.tell(stepped(*((row, output(0, step)) for row in range(20))))
        assert engine._backlog.size == 0
        assert engine.channel.held == 0
    assert "front 3 is left: more waits for it than 300000 bytes" in caplog.text


def test_the_text_before_an_abort_is_read() -> None:
    prompts, params = echo_service.prompts(), SamplingParams(stop=["never"])
    ids = prompts.encode("once upon a time")
    transcript = Transcript(prompts.text, [1], params, lambda branch, reason: None)
    found = transcript.read(output(0, *ids, finish="abort", done=True))
    assert (found.text, found.finish_reason, found.tokens) == ("once upon a time", "abort", tuple(ids))
