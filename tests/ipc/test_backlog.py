"""A front that lags: what waits for it is merged, and comes to the same as if it had been told step by step."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import echo_service
import pytest

from quire.core.outputs import BranchOutput
from quire.errors import EngineDead
from quire.ipc.engine_server import ClientConnection
from quire.ipc.frames import FrameCodec, read_engine_message
from quire.ipc.messages import EngineExited, EngineMessage, QueueSizes, Reply, RequestProgress, StepOutputs
from quire.ipc.output_buffer import OutputBuffer
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import TopLogprobs
from quire.text.request_detokenizer import RequestDetokenizer

TOPS = (TopLogprobs(5, -0.5, 1, (), ()),)


def output(branch: int, *tokens: int, finish: str | None = None, done: bool = False, **more: Any) -> BranchOutput:
    return BranchOutput("", branch, tokens, "", (), finish, None, done, 0.0)._replace(**more)


def stepped(*outputs: tuple[int, BranchOutput], now: float = 1.0, computed: int = 0) -> StepOutputs:
    return StepOutputs(now, QueueSizes(1), computed, (), list(outputs))


def test_outputs_of_a_branch_become_one() -> None:
    backlog = OutputBuffer()
    assert backlog.add(stepped((1, output(0, 5)), (1, output(1, 6)), (2, output(0, 7)))) is None
    assert backlog.add(stepped((1, output(0, 8, 9)), (2, output(0, 3, finish="length", done=True)), now=2.0)) is None
    ends = [(1, output(0, finish="stop", stop_reason=4, done=True))]
    assert backlog.add(stepped((1, output(1, 4, finish="length")), *ends, now=3.0)) is None
    assert backlog
    [message] = backlog.drain()
    assert message.now == 3.0
    assert message.outputs == [
        (1, output(1, 6, 4, finish="length")),
        (1, output(0, 5, 8, 9, finish="stop", stop_reason=4, done=True)),  # whoever ends the request comes last
        (2, output(0, 7, 3, finish="length", done=True)),
    ]
    assert not backlog
    assert backlog.drain() == []


def test_what_is_not_merged_is_told_at_once() -> None:
    backlog = OutputBuffer()
    progress = [RequestProgress(1, 5, None, None, 0, 0)]
    scored = output(0, 5, top_logprobs=TOPS)
    message = stepped((1, scored), (2, output(0, 6)), computed=7)._replace(progress=progress)
    assert backlog.add(message) == message._replace(outputs=[(1, scored)])
    embedded = stepped((3, output(0, finish="stop", done=True, pooled=(0.5, -1.0))))
    assert backlog.add(embedded) == embedded
    assert backlog.add(stepped((2, output(0, 6, top_logprobs=TOPS)))) is None  # others of its request wait
    assert backlog.drain()[0].outputs == [(2, output(0, 6, 6, top_logprobs=TOPS))]


@contextmanager
def side() -> Iterator[tuple[socket.socket, ClientConnection]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, ClientConnection(3, theirs)


def read(connection: socket.socket, until: type[EngineMessage]) -> list[EngineMessage]:
    frames, found = FrameCodec(), list[EngineMessage]()
    connection.settimeout(20)
    while not (found and isinstance(found[-1], until)):
        data = connection.recv(1 << 18)
        assert data, "the front was left"
        found += map(read_engine_message, frames.decode(data))
    return found


def test_a_front_that_lags_is_not_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Outputs that would take 4.5 MB step by step take less than 1.5 MB, and are complete."""
    monkeypatch.setattr("quire.ipc.channel.MAX_QUEUED_BYTES", 1_500_000)
    monkeypatch.setattr("quire.ipc.engine_server.LAG_BYTES", 100_000)
    steps, rows = 2500, 100
    with side() as (front, engine):
        for step in range(steps):
            engine.send(stepped(*((row, output(0, step)) for row in range(rows)), computed=1))
            if step == 150:
                engine.send(EngineExited(EngineDead("so")))
        assert engine.channel.queued_bytes < 800_000
        assert engine._output_buffer
        said: dict[int, list[int]] = {row: [] for row in range(rows)}
        computed, frames = 0, FrameCodec()
        front.settimeout(20)
        while (
            sum(map(len, said.values())) < steps * rows
        ):  # what was merged is sent once the front reads, also when the engine says nothing more
            for message in map(read_engine_message, frames.decode(front.recv(1 << 18))):
                if isinstance(message, EngineExited):
                    assert computed == 151, "what waited comes before"
                    continue
                computed += message.computed
                for number, found in message.outputs:
                    said[number] += found.tokens
        assert all(tokens == list(range(steps)) for tokens in said.values())
        assert computed == steps
        engine.send(Reply(1))
        [frame] = frames.decode(front.recv(1 << 18))
        assert read_engine_message(frame) == Reply(1)
        assert not engine._output_buffer
    assert caplog.text.count("client 3 lags: ") == 2  # before the engine said so and behind it


def test_what_waits_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are merged until nothing waits, not only as long as much does."""
    with side() as (front, engine):
        monkeypatch.setattr("quire.ipc.engine_server.LAG_BYTES", -1)
        engine.send(stepped((1, output(0, 5))))
        monkeypatch.setattr("quire.ipc.engine_server.LAG_BYTES", 1000)
        engine.send(stepped((1, output(0, 6))))
        engine._flush_output_buffer()
        engine.send(Reply(1))
        steps = [message for message in read(front, Reply) if isinstance(message, StepOutputs)]
    assert [token for step in steps for _, found in step.outputs for token in found.tokens] == [5, 6]


def test_a_front_that_never_reads_is_left_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.ipc.engine_server.MAX_QUEUED_BYTES", 300_000)
    monkeypatch.setattr("quire.ipc.engine_server.LAG_BYTES", 100_000)
    with side() as (_, engine):
        for step in range(20_000):
            engine.send(stepped(*((row, output(0, step)) for row in range(20))))
        assert engine._output_buffer.held_bytes == 0
        assert engine.channel.queued_bytes == 0
    assert "client 3 is disconnected: more than 300000 bytes wait for it" in caplog.text


def test_the_text_before_an_abort_is_read() -> None:
    prompts, params = echo_service.prompts(), SamplingParams(stop=["never"])
    ids = prompts.encode("once upon a time")
    transcript = RequestDetokenizer(prompts.text_backend, [1], params, lambda branch, reason: None)
    found = transcript.process(output(0, *ids, finish="abort", done=True))
    assert (found.text, found.finish_reason, found.tokens) == ("once upon a time", "abort", tuple(ids))
