"""What fronts of one server share, part by part: counts that are added up, turns at accepting, and questions."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_guards import accept, status

from quire.protocol.columns import WireError
from quire.server.accept_slots import AcceptSlots, OpenConnections, create_slots_file
from quire.server.answer_size import MAX_HELD_LOGPROBS, MAX_LOGPROBS, AnswerBudget, AnswerSize
from quire.server.control_channel import MAX_FRAME_BYTES, ControlChannel, receive_blocking, send_blocking
from quire.server.counters import PLAIN_COUNTERS, PROMPT_SOURCES, ServerCounters, read_counters
from quire.server.guards import MAX_BODIES, MAX_BODY, BodyLimitMiddleware

BOUNDS = {"first": (1.0, 2.0, 5.0), "second": (10.0,)}


def counting(seed: int, *counts: ServerCounters) -> None:
    """Have all of these count the same, by chance."""
    draw = random.Random(seed)
    for one in counts:
        draw.seed(seed)
        for histogram in one.histograms.values():
            for _ in range(draw.randrange(20)):
                histogram.observe(draw.choice((0.5, 1.0, 3.0, 20.0)))
        for name in PLAIN_COUNTERS:
            setattr(one, name, getattr(one, name) + draw.randrange(10))
        for source in PROMPT_SOURCES:
            one.prompt_sources[source] += draw.randrange(1000)
        one.finished[draw.choice(("stop", "length"))] += draw.randrange(1, 9)
        for _ in range(draw.randrange(1, 6)):
            one.http.add(draw.choice(("/a", "/b")), "POST", draw.choice((200, 404)), 0.5)
        one.cpu_seconds += draw.randrange(8) / 8


def test_counts_add_up_after_a_journey() -> None:
    whole, wanted = ServerCounters(BOUNDS), ServerCounters(BOUNDS)
    for seed in range(5):
        part = ServerCounters(BOUNDS)
        counting(seed, part, wanted)
        whole.add(read_counters(json.loads(json.dumps(part.to_json())), BOUNDS))
    assert whole.to_json() == wanted.to_json()
    others = {"sources", "finished", "histograms", "http", "http_seconds", "seconds"}
    assert others.union(PLAIN_COUNTERS) <= wanted.to_json().keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"invalid": -1}, {"invalid": 1.5}, {"invalid": True}, {"finished": []}, {"sources": {}}, {"seconds": "soon"},
        {"histograms": {"first": [[1, 2], 0.0]}}, {"histograms": {"third": [[1], 0.0]}}, {"http": [["/a", "POST"]]},
        {"histograms": {"second": [[1, "1"], 0.0]}}, {"http_seconds": [["/a", "POST", [1], 0.0]]},
    ],
)  # fmt: skip
def test_what_are_no_counts_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=r"^counts: "):
        read_counters({**ServerCounters(BOUNDS).to_json(), **wrong}, BOUNDS)
    with pytest.raises(WireError):
        read_counters([wrong], BOUNDS)


def test_fronts_take_turns() -> None:
    file = create_slots_file(3)
    places = [AcceptSlots(file, 3, number, 5) for number in range(3)]
    os.close(file)
    held = [OpenConnections(places[number]) for number in range(3)]
    assert [one.is_my_turn() for one in places] == [True, True, True]
    held[0].add("a")
    assert [one.is_my_turn() for one in places] == [False, True, True]
    held[1].add("b")
    held[2].add("c")
    held[2].add("d")
    assert [one.is_my_turn() for one in places] == [True, True, False]
    assert not places[0].is_full()
    held[1].add("e")
    assert all(one.is_full() for one in places)
    held[2].discard("c")
    held[2].discard("c")
    assert not any(one.is_full() for one in places)


def test_a_front_has_its_share_in_which_one_answer_fits() -> None:
    held = AnswerBudget(4)
    held.reserve(AnswerSize(0, MAX_HELD_LOGPROBS // 4))
    with pytest.raises(Exception, match=f"more than {MAX_HELD_LOGPROBS // 4}$"):
        held.reserve(AnswerSize(0, 1))
    AnswerBudget(64).reserve(AnswerSize(0, MAX_LOGPROBS))
    told = []
    for share, holds in ((1, MAX_BODIES // 4), (4, MAX_BODIES // 4), (64, 0)):
        bound = BodyLimitMiddleware(accept, num_frontends=share)
        bound.held_bytes = holds
        told.append(asyncio.run(status(bound, b"x" * MAX_BODY)))
    assert told == [200, 503, 200]


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_questions_and_answers() -> None:
    async def work(ours: socket.socket, theirs: socket.socket) -> None:
        told: list[Any] = []

        async def double(value: int) -> int:
            return 2 * value

        async def never(value: None) -> None:
            await asyncio.Event().wait()

        async def note(value: Any) -> None:
            told.append(value)

        one, other = ControlChannel(ours, {}), ControlChannel(theirs, {"double": double, "never": never, "note": note})
        await one.connect()
        await other.connect()
        serving = [asyncio.ensure_future(side.serve()) for side in (one, other)]
        assert await asyncio.gather(*(one.request("double", i, 60) for i in range(20))) == [2 * i for i in range(20)]
        with pytest.raises(TimeoutError):
            await one.request("never", None, 0.05)
        one.notify("note", ["x" * 1000])
        assert await one.request("double", 4, 60) == 8
        assert told == [["x" * 1000]]
        waits = asyncio.ensure_future(one.request("never", None, 60))
        await asyncio.sleep(0)
        one.notify("nothing that is asked")
        await asyncio.wait(serving, timeout=30)
        with pytest.raises(ConnectionError):
            await waits
        with pytest.raises(ConnectionError):
            one.notify("note", 1)

    with pair() as (ours, theirs):
        asyncio.run(work(ours, theirs))


@pytest.mark.parametrize(
    "data",
    [(MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\2[]", b"\0\0\0\2{]", b"\0\0\0\2{}", b'\0\0\0\x0a{"what":1}'],
)
def test_what_is_no_frame_ends_it(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def work(theirs: socket.socket) -> None:
        control = ControlChannel(theirs, {})
        await control.connect()
        await asyncio.wait_for(control.serve(), 30)

    with pair() as (ours, theirs):
        ours.sendall(data)
        asyncio.run(work(theirs))
        assert ours.recv(10) == b""
    assert "another frontend sent an invalid frame" in caplog.text
    with pair() as (ours, theirs):
        ours.sendall(data)
        with pytest.raises(WireError):
            receive_blocking(theirs)


def test_what_is_said_before_there_is_a_loop() -> None:
    with pair() as (ours, theirs):
        send_blocking(ours, "settings", {"text": "ä\ud800", "list": [1, None]})
        assert receive_blocking(theirs) == ("settings", {"text": "ä\ud800", "list": [1, None]})
        with pytest.raises(WireError):
            send_blocking(ours, "settings", "x" * MAX_FRAME_BYTES)
        ours.close()
        with pytest.raises(EOFError):
            receive_blocking(theirs)
