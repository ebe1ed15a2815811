"""The host, its turns taken by hand: what fronts send in one turn, in every order, leaves nothing behind."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import echo_service
import pytest
from echo_service import Echo
from hosts import Told

from quire.core.snapshot import take_snapshot
from quire.errors import EngineDead, InputError, Overloaded
from quire.ipc.engine_loop import ClientLeft
from quire.ipc.messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    EngineExited,
    NewRequest,
    SnapshotRequest,
    StepOutputs,
    StopBranch,
)
from quire.ipc.pixel_store import PixelStore
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan, StepResult

LONG = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, n=2)


def hosted(fronts: int = 1, **settings: Any) -> Told:
    return Told(echo_service.built(Echo(), **settings), fronts)


def _collected(told: Told) -> tuple[StepPlan, StepResult]:
    plan, ticket = told.engine.in_flight.popleft()
    return plan, told.engine.runner.collect(ticket)


def test_a_runner_that_ends_while_nothing_is_done_ends_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ipc.engine_loop.RUNNER_CHECK_INTERVAL", 0.01)
    runner = Echo()
    runner.check = Mock(side_effect=[None, None, EngineDead("rank 1 was ended by signal 9")])  # type: ignore[attr-defined]
    told = Told(echo_service.built(runner))
    assert isinstance(told.host.run(), EngineDead)
    _, last = told.messages[-1]
    assert isinstance(last, EngineExited)
    assert "rank 1 was ended" in str(last.error)


@pytest.mark.parametrize("first", [1, 4, 9])
def test_stops_and_aborts_in_one_turn(first: int) -> None:
    """An abort's output comes with the next step, also when a stop of the same request follows it."""
    messages: list[ClientMessage] = [
        StopBranch(7, 0, "so"),
        StopBranch(7, 1, "so"),
        AbortRequests((7,)),
        StopBranch(7, 0, "again"),
    ]
    for order in itertools.permutations(messages):
        told = hosted()
        told.turns((0, AddRequests(0, (NewRequest(7, "a", [1, 2]),), LONG)), most=first)
        told.turns(*((0, message) for message in order))
        assert told.empty(), order
        assert told.done().count(7) <= 1


@pytest.mark.parametrize("branch", [0, 1])
def test_a_stop_waits_for_those_who_wait_for_its_branch(branch: int) -> None:
    """After a preemption one branch recomputes the prompt for all: ended before, it would leave the others waiting."""
    told = hosted(max_num_batched_tokens=16, preemption="recompute", enable_prefix_caching=False)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1)
    told.turns((0, AddRequests(0, (NewRequest(1, "a", list(range(1, 101))),), params)), most=14)
    request = told.engine.requests["a"]
    while any(not seq.not_in_flight for seq in request.live_seqs):  # a victim has nothing in flight
        told.engine.scheduler.update(*_collected(told))
    told.engine.scheduler._preempt(request)
    told.turns(most=2)
    assert any(seq.prefix_source is not None for seq in request.live_seqs)
    told.turns((0, StopBranch(1, branch, "so")), most=1)
    told.turns()
    assert told.empty()
    assert told.done() == [1]


def test_outputs_beyond_a_frames_rows_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ipc.engine_loop.MAX_STEP_SLICES", 5)
    told = hosted()
    told.turns((0, AddRequests(0, tuple(NewRequest(at, f"r{at}", [1, 2]) for at in range(8)), LONG)), most=3)
    told.turns((0, AbortRequests(None)))
    stepped = [message for _, message in told.messages if isinstance(message, StepOutputs)]
    assert max(len(message.outputs) for message in stepped) == 5
    assert sorted(told.done()) == list(range(8))
    assert told.empty()


def test_a_front_that_leaves_ends_its_requests() -> None:
    """In the next step: they would compute for nobody. Others' go on."""
    told = hosted(fronts=2)
    told.turns(
        (0, AddRequests(0, (NewRequest(1, "mine", [1, 2]),), LONG)),
        (1, AddRequests(0, (NewRequest(1, "theirs", [1, 2]),), LONG)),
        most=3,
    )
    told.turns((1, ClientLeft()))
    assert told.engine.stats.finished == {"abort": 2, "length": 2}  # of two branches each
    assert told.done(0) == [1]
    assert told.empty()
    assert told.host.client_indices == [0]


def test_ids_and_numbers_in_use_are_refused() -> None:
    told = hosted(fronts=2)
    told.turns((0, AddRequests(0, (NewRequest(1, "a", [1]),), LONG)), most=2)
    for front, asked in ((0, NewRequest(1, "b", [1])), (1, NewRequest(5, "a", [1]))):
        told.messages.clear()
        told.turns((front, AddRequests(3, (asked,), LONG)), most=1)
        [answer] = told.answers()
        assert isinstance(answer.error, InputError)
        assert "in use" in str(answer.error)
    told.turns()
    assert told.empty()


class Shown:
    """In an engine's place for what it is given with pictures: a stand-in for its `add_all`."""

    def __init__(self, told: Told) -> None:
        self._add, self.pixels = told.engine.add_all, list[ImagePixels]()
        told.engine.add_all = self  # type: ignore[method-assign,assignment]

    def __call__(self, prompts: Any, params: Any, *, images: Any = (), pixels: Any = (), **more: Any) -> None:
        self._add(prompts, params, **more)
        self.pixels += pixels


def seeing(number: int, *keys: int) -> NewRequest:
    media = tuple(ImageItem(bytes([key]) * 32, at, 1, 1) for at, key in enumerate(keys))
    return NewRequest(number, f"r{number}", (5,) * 8, media)


def pixels(*keys: int) -> tuple[ImagePixels, ...]:
    return tuple(ImagePixels(bytes([key]) * 32, (1, 2, 2, 3), bytes(12)) for key in keys)


def test_pictures_stay_as_long_as_their_requests() -> None:
    told = hosted()
    shown = Shown(told)
    first = AddRequests(0, (seeing(1, 1, 2),), LONG, "", pixels(1, 2))
    told.turns((0, first), (0, AddRequests(1, (seeing(2, 2, 2), seeing(3, 2)), LONG, "", pixels(2))), most=2)
    told.turns(
        (0, AddRequests(9, (seeing(1, 3),), LONG, "", pixels(3))), most=1
    )  # a number in use keeps its own pictures
    assert isinstance(told.answers()[-1].error, InputError)
    assert told.host.pixels.total_bytes == 24
    assert shown.pixels[2] is shown.pixels[[one.key for one in shown.pixels[:2]].index(shown.pixels[2].key)]
    told.turns((0, AbortRequests((1,))), most=3)
    assert told.host.pixels.total_bytes == 12
    told.turns()
    assert sorted(told.done()) == [1, 2, 3]
    assert told.empty()
    assert (told.host.pixels.total_bytes, len(told.host.pixels)) == (0, 0)


def test_refused_requests_leave_no_pictures() -> None:
    told = hosted(max_num_queued_reqs=1)
    Shown(told)
    bad = (
        AddRequests(0, (seeing(1, 1, 2),), LONG, "", pixels(1)),  # the other one's are missing
        AddRequests(1, tuple(seeing(2 + i, 1) for i in range(17)), LONG, "", pixels(1)),  # more than may wait
        AddRequests(2, (seeing(4, 1)._replace(prompt=(5, 10**6)),), LONG, "", pixels(1)),
        AddRequests(3, (seeing(6, 1),), LONG),  # there are none at all
    )
    told.turns(*[(0, message) for message in bad])
    assert [str(answer.error)[:20] for answer in told.answers()] == [
        "the pixels of an ima", "there are 17 prompts", "prompt token 1 is 10", "the pixels of an ima",
    ]  # fmt: skip
    assert told.host.pixels.total_bytes == len(told.host.pixels) == 0
    told.host.pixels.max_bytes = 20
    told.turns((0, AddRequests(4, (seeing(5, 1, 2),), LONG, "", pixels(1, 2))))
    assert isinstance(told.answers()[-1].error, Overloaded)
    assert told.empty()


def test_steps_are_noted_while_somebody_looks_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    told = hosted()
    ask = AddRequests(1, (NewRequest(1, "a", [1, 2, 3]),), LONG)
    told.turns((0, ask), most=3)
    assert told.engine.step_history is None
    told.turns((0, SnapshotRequest(2)), most=4)
    told.turns((0, SnapshotRequest(3)), most=1)
    texts = {answer.key: answer.value for answer in told.answers()}
    assert json.loads(str(texts[2]))["last"] == []
    noted = json.loads(str(texts[3]))["last"]
    assert len(noted) == 3
    assert noted[-1][:3] == [noted[0][0] + 2, 0, 2]  # no tokens of prompts, a row for each of two branches
    monkeypatch.setattr("quire.ipc.engine_loop.HISTORY_IDLE_SECONDS", -1.0)
    monkeypatch.setattr("quire.ipc.engine_loop.METRICS_INTERVAL", -1.0)
    told.turns(most=1)
    assert told.engine.step_history is None


def test_what_a_look_took_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages, the text of them, and sending the one before."""
    told, clock = hosted(), [0.0]

    def taking(seconds: float, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            clock[0] += seconds
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr("quire.ipc.engine_loop.take_snapshot", taking(3.0, take_snapshot))
    # Modules of its own: event loops of other tests' servers read the clock of the real one.
    monkeypatch.setattr("quire.ipc.engine_loop.json", SimpleNamespace(dumps=taking(5.0, json.dumps)))
    monkeypatch.setattr(told.host, "_send_to_client", taking(7.0, told.host._send_to_client))
    fake = SimpleNamespace(thread_time=lambda: clock[0], monotonic=lambda: 2 * clock[0])
    monkeypatch.setattr("quire.ipc.engine_loop.time", fake)
    monkeypatch.setattr(told.host, "_cpu_seconds", lambda: clock[0])
    for key in range(3):
        told.host._snapshot(0, SnapshotRequest(key))
    answers = [json.loads(str(answer.value)) for answer in told.answers()]
    assert [answer["took"] for answer in answers] == [8.0, 15.0, 15.0]
    assert [answer["busy"] for answer in answers] == [0.0, 0.5, 0.5]
    assert all(answer["groups"] for answer in answers)


def test_pixels_are_bounded_and_all_of_the_room_can_be_used() -> None:
    held = PixelStore(max_bytes=24)
    held.incref(pixels(1))
    held.incref(pixels(2))
    with pytest.raises(Overloaded, match="have 24 bytes; with the 12 of this request they exceed 24"):
        held.incref(pixels(1, 3))
    held.incref(pixels(1))
    assert (len(held), held.total_bytes) == (2, 24)
    held.decref([pixels(1)[0].key] * 2)
    held.incref(pixels(3))
    assert held.total_bytes == 24
