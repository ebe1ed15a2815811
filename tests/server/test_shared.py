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

from quire.server.control import MOST, Control, hear, tell
from quire.server.counted import NUMBERS, SOURCES, Counted, read_counted
from quire.server.guards import MAX_BODIES, MAX_BODY, BoundBody
from quire.server.places import Open, Places, shared_file
from quire.server.size import MAX_HELD, MAX_LOGPROBS, Held, Size
from quire.vocabulary.columns import WireError

BOUNDS = {"first": (1.0, 2.0, 5.0), "second": (10.0,)}


def counting(seed: int, *counts: Counted) -> None:
    """Have all of these count the same, by chance."""
    draw = random.Random(seed)
    for one in counts:
        draw.seed(seed)
        for histogram in one.histograms.values():
            for _ in range(draw.randrange(20)):
                histogram.observe(draw.choice((0.5, 1.0, 3.0, 20.0)))
        for name in NUMBERS:
            setattr(one, name, getattr(one, name) + draw.randrange(10))
        for source in SOURCES:
            one.sources[source] += draw.randrange(1000)
        one.finished[draw.choice(("stop", "length"))] += draw.randrange(1, 9)
        for _ in range(draw.randrange(1, 6)):
            one.http.add(draw.choice(("/a", "/b")), "POST", draw.choice((200, 404)), 0.5)
        one.seconds += draw.randrange(8) / 8


def test_counts_add_up_after_a_journey() -> None:
    whole, wanted = Counted(BOUNDS), Counted(BOUNDS)
    for seed in range(5):
        part = Counted(BOUNDS)
        counting(seed, part, wanted)
        whole.add(read_counted(json.loads(json.dumps(part.said())), BOUNDS))
    assert whole.said() == wanted.said()
    assert {*NUMBERS, "sources", "finished", "histograms", "http", "http_seconds", "seconds"} <= wanted.said().keys()


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
        read_counted({**Counted(BOUNDS).said(), **wrong}, BOUNDS)
    with pytest.raises(WireError):
        read_counted([wrong], BOUNDS)


def test_fronts_take_turns() -> None:
    file = shared_file(3)
    places = [Places(file, 3, number, 5) for number in range(3)]
    os.close(file)
    held = [Open(places[number]) for number in range(3)]
    assert [one.mine() for one in places] == [True, True, True]
    held[0].add("a")
    assert [one.mine() for one in places] == [False, True, True]
    held[1].add("b")
    held[2].add("c")
    held[2].add("d")
    assert [one.mine() for one in places] == [True, True, False]
    assert not places[0].full()
    held[1].add("e")
    assert all(one.full() for one in places)
    held[2].discard("c")
    held[2].discard("c")
    assert not any(one.full() for one in places)


def test_a_front_has_its_share_in_which_one_answer_fits() -> None:
    held = Held(4)
    held.add(Size(0, MAX_HELD // 4))
    with pytest.raises(Exception, match=f"more than {MAX_HELD // 4}$"):
        held.add(Size(0, 1))
    Held(64).add(Size(0, MAX_LOGPROBS))
    told = []
    for share, holds in ((1, MAX_BODIES // 4), (4, MAX_BODIES // 4), (64, 0)):
        bound = BoundBody(accept, share=share)
        bound.held = holds
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

        one, other = Control(ours, {}), Control(theirs, {"double": double, "never": never, "note": note})
        await one.open()
        await other.open()
        serving = [asyncio.ensure_future(side.serve()) for side in (one, other)]
        assert await asyncio.gather(*(one.ask("double", i, 60) for i in range(20))) == [2 * i for i in range(20)]
        with pytest.raises(TimeoutError):
            await one.ask("never", None, 0.05)
        one.say("note", ["x" * 1000])
        assert await one.ask("double", 4, 60) == 8
        assert told == [["x" * 1000]]
        waits = asyncio.ensure_future(one.ask("never", None, 60))
        await asyncio.sleep(0)
        one.say("nothing that is asked")
        await asyncio.wait(serving, timeout=30)
        with pytest.raises(ConnectionError):
            await waits
        with pytest.raises(ConnectionError):
            one.say("note", 1)

    with pair() as (ours, theirs):
        asyncio.run(work(ours, theirs))


@pytest.mark.parametrize(
    "data", [(MOST + 1).to_bytes(4, "big"), b"\0\0\0\2[]", b"\0\0\0\2{]", b"\0\0\0\2{}", b'\0\0\0\x0a{"what":1}']
)
def test_what_is_no_frame_ends_it(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def work(theirs: socket.socket) -> None:
        control = Control(theirs, {})
        await control.open()
        await asyncio.wait_for(control.serve(), 30)

    with pair() as (ours, theirs):
        ours.sendall(data)
        asyncio.run(work(theirs))
        assert ours.recv(10) == b""
    assert "another front sent what is no frame" in caplog.text
    with pair() as (ours, theirs):
        ours.sendall(data)
        with pytest.raises(WireError):
            hear(theirs)


def test_what_is_said_before_there_is_a_loop() -> None:
    with pair() as (ours, theirs):
        tell(ours, "settings", {"text": "ä\ud800", "list": [1, None]})
        assert hear(theirs) == ("settings", {"text": "ä\ud800", "list": [1, None]})
        with pytest.raises(WireError):
            tell(ours, "settings", "x" * MOST)
        ours.close()
        with pytest.raises(EOFError):
            hear(theirs)
