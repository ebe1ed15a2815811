"""A front that lags: what waits for it is merged, and comes to the same as if it had been told step by step."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import echo_service
import pytest
from echo_service import VOCAB, Echo
from test_same import some_params

from quire.control.outcomes import Output
from quire.errors import EngineDead
from quire.link.backlog import Backlog
from quire.link.frames import Frames, read_engine
from quire.link.host import Host
from quire.link.messages import Add, Answer, Asked, Died, FromEngine, Progress, Queues, Stepped, Stop
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
        assert engine.channel.held < 800_000
        engine.tell(Died(EngineDead("so")))
        said: dict[int, list[int]] = {row: [] for row in range(rows)}
        told = read(front, Died)
        for message in told[:-1]:
            for number, found in message.outputs:
                said[number] += found.tokens
        assert all(tokens == list(range(steps)) for tokens in said.values())
        assert sum(message.computed for message in told[:-1]) == steps
    assert caplog.text.count("front 3 lags: ") == 1


def test_what_was_merged_is_sent_once_the_front_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the engine says nothing more; and then step by step again."""
    monkeypatch.setattr("quire.link.program.LAGS", 100_000)
    with side() as (front, engine):
        for step in range(2000):
            engine.tell(stepped(*((row, output(0, step)) for row in range(100))))
        assert engine._backlog
        front.settimeout(20)
        frames, tokens = Frames(), 0
        while tokens < 200_000:
            for message in map(read_engine, frames.feed(front.recv(1 << 18))):
                tokens += sum(len(found.tokens) for _, found in message.outputs)
        engine.tell(Answer(1))
        [frame] = frames.feed(front.recv(1 << 18))
        assert read_engine(frame) == Answer(1)
        assert not engine._backlog


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


def run(requests: list[tuple[list[int], SamplingParams]], lagging: random.Random | None) -> Any:
    """What readers see of each branch: step by step, or through a backlog that is emptied now and then."""
    told: list[Stepped] = []

    def tell(_: int, message: FromEngine) -> None:
        if isinstance(message, Stepped):
            told.append(message)

    built = echo_service.built(Echo(), kv_tokens=4096, max_num_seqs=32)
    host, prompts = Host(built.engine, tell), echo_service.prompts()
    transcripts, seen, done = {}, dict[tuple[int, int], list[Any]](), list[int]()
    for number, (prompt, given) in enumerate(requests):
        params = prompts.resolve(given)
        host.send(0, Add(number, (Asked(number, f"r{number}", prompt),), params))

        def stop(branch: int, reason: str, number: int = number) -> None:
            host.send(0, Stop(number, branch, reason))

        transcripts[number] = Transcript(prompts.text, prompt, params, stop)
    backlog = Backlog()
    while len(done) < len(requests):
        if host._sent or host.engine.unfinished:
            host._turn()
        if lagging is not None:
            told = [rest for message in told if (rest := backlog.add(message)) is not None]
            told += backlog.take() if lagging.random() < 0.1 else []
        for number, found in [pair for message in told for pair in message.outputs if pair[0] not in done]:
            text = transcripts[number].read(found)
            if text is not None:
                branch = seen.setdefault((number, found.branch), [[], "", [], None, None])
                branch[0] += text.tokens
                branch[1] += text.text
                branch[2] += text.tops
                branch[3:] = text.finish_reason, text.stop_reason
                done += [number] * text.done
        told.clear()
    return seen


def test_readers_of_a_lagging_front_see_the_same() -> None:
    """Tokens behind a stop string are dropped, whether or not they came with those before it."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(120)]
    plain = run([(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in prompts[:20]], None)
    said = [text for _, text, *_ in plain.values() if len(text) > 9]
    words = [text[at : at + rng.randrange(1, 5)] for text in said for at in (rng.randrange(len(text) - 5),)]
    requests = [(prompt, SamplingParams(**some_params(rng, words))) for prompt in prompts]
    wanted = run(requests, None)
    assert sum(isinstance(reason, str) for *_, reason in wanted.values()) > 20
    assert run(requests, random.Random(1)) == wanted
