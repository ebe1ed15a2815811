"""The engine loop, run iteration by iteration: what clients send at once, in every order, leaves nothing behind."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import echo_service
import pytest
from echo_service import Echo
from loop_driver import LoopDriver

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


def hosted(clients: int = 1, **settings: Any) -> LoopDriver:
    return LoopDriver(echo_service.built(Echo(), **settings), clients)


def _collected(driver: LoopDriver) -> tuple[StepPlan, StepResult]:
    plan, ticket = driver.engine.in_flight.popleft()
    return plan, driver.engine.runner.collect(ticket)


def test_a_runner_that_ends_while_nothing_is_done_ends_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ipc.engine_loop.RUNNER_CHECK_INTERVAL", 0.01)
    runner = Echo()
    runner.check = Mock(side_effect=[None, None, EngineDead("rank 1 was ended by signal 9")])  # type: ignore[attr-defined]
    driver = LoopDriver(echo_service.built(runner))
    assert isinstance(driver.loop.run(), EngineDead)
    _, last = driver.messages[-1]
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
        driver = hosted()
        driver.run((0, AddRequests(0, (NewRequest(7, "a", [1, 2]),), LONG)), most=first)
        driver.run(*((0, message) for message in order))
        assert driver.is_empty(), order
        assert driver.done().count(7) <= 1


@pytest.mark.parametrize("branch", [0, 1])
def test_a_stop_waits_for_those_who_wait_for_its_branch(branch: int) -> None:
    """After a preemption one branch recomputes the prompt for all: ended before, it would leave the others waiting."""
    driver = hosted(max_num_batched_tokens=16, preemption="recompute", enable_prefix_caching=False)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1)
    driver.run((0, AddRequests(0, (NewRequest(1, "a", list(range(1, 101))),), params)), most=14)
    request = driver.engine.requests["a"]
    while any(not seq.not_in_flight for seq in request.live_seqs):  # a victim has nothing in flight
        driver.engine.scheduler.update(*_collected(driver))
    driver.engine.scheduler._preempt(request)
    driver.run(most=2)
    assert any(seq.prefix_source is not None for seq in request.live_seqs)
    driver.run((0, StopBranch(1, branch, "so")), most=1)
    driver.run()
    assert driver.is_empty()
    assert driver.done() == [1]


def test_outputs_beyond_a_frames_rows_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ipc.engine_loop.MAX_STEP_SLICES", 5)
    driver = hosted()
    driver.run((0, AddRequests(0, tuple(NewRequest(at, f"r{at}", [1, 2]) for at in range(8)), LONG)), most=3)
    driver.run((0, AbortRequests(None)))
    stepped = [message for _, message in driver.messages if isinstance(message, StepOutputs)]
    assert max(len(message.outputs) for message in stepped) == 5
    assert sorted(driver.done()) == list(range(8))
    assert driver.is_empty()


def test_a_front_that_leaves_ends_its_requests() -> None:
    """They end in the next step; other clients' requests go on."""
    driver = hosted(clients=2)
    driver.run(
        (0, AddRequests(0, (NewRequest(1, "mine", [1, 2]),), LONG)),
        (1, AddRequests(0, (NewRequest(1, "theirs", [1, 2]),), LONG)),
        most=3,
    )
    driver.run((1, ClientLeft()))
    assert driver.engine.stats.finished == {"abort": 2, "length": 2}  # of two branches each
    assert driver.done(0) == [1]
    assert driver.is_empty()
    assert driver.loop.client_indices == [0]


def test_ids_and_numbers_in_use_are_refused() -> None:
    driver = hosted(clients=2)
    driver.run((0, AddRequests(0, (NewRequest(1, "a", [1]),), LONG)), most=2)
    for front, asked in ((0, NewRequest(1, "b", [1])), (1, NewRequest(5, "a", [1]))):
        driver.messages.clear()
        driver.run((front, AddRequests(3, (asked,), LONG)), most=1)
        [answer] = driver.replies()
        assert isinstance(answer.error, InputError)
        assert "in use" in str(answer.error)
    driver.run()
    assert driver.is_empty()


class Shown:
    """In an engine's place for what it is given with pictures: a stand-in for its `add_all`."""

    def __init__(self, driver: LoopDriver) -> None:
        self._add, self.pixels = driver.engine.add_all, list[ImagePixels]()
        driver.engine.add_all = self  # type: ignore[method-assign,assignment]

    def __call__(self, prompts: Any, params: Any, *, images: Any = (), pixels: Any = (), **more: Any) -> None:
        self._add(prompts, params, **more)
        self.pixels += pixels


def seeing(number: int, *keys: int) -> NewRequest:
    media = tuple(ImageItem(bytes([key]) * 32, at, 1, 1) for at, key in enumerate(keys))
    return NewRequest(number, f"r{number}", (5,) * 8, media)


def pixels(*keys: int) -> tuple[ImagePixels, ...]:
    return tuple(ImagePixels(bytes([key]) * 32, (1, 2, 2, 3), bytes(12)) for key in keys)


def test_pictures_stay_as_long_as_their_requests() -> None:
    driver = hosted()
    shown = Shown(driver)
    first = AddRequests(0, (seeing(1, 1, 2),), LONG, "", pixels(1, 2))
    driver.run((0, first), (0, AddRequests(1, (seeing(2, 2, 2), seeing(3, 2)), LONG, "", pixels(2))), most=2)
    driver.run(
        (0, AddRequests(9, (seeing(1, 3),), LONG, "", pixels(3))), most=1
    )  # a number in use keeps its own pictures
    assert isinstance(driver.replies()[-1].error, InputError)
    assert driver.loop.pixels.total_bytes == 24
    assert shown.pixels[2] is shown.pixels[[one.key for one in shown.pixels[:2]].index(shown.pixels[2].key)]
    driver.run((0, AbortRequests((1,))), most=3)
    assert driver.loop.pixels.total_bytes == 12
    driver.run()
    assert sorted(driver.done()) == [1, 2, 3]
    assert driver.is_empty()
    assert (driver.loop.pixels.total_bytes, len(driver.loop.pixels)) == (0, 0)


def test_refused_requests_leave_no_pictures() -> None:
    driver = hosted(max_num_queued_reqs=1)
    Shown(driver)
    bad = (
        AddRequests(0, (seeing(1, 1, 2),), LONG, "", pixels(1)),  # the other one's are missing
        AddRequests(1, tuple(seeing(2 + i, 1) for i in range(17)), LONG, "", pixels(1)),  # more than may wait
        AddRequests(2, (seeing(4, 1)._replace(prompt=(5, 10**6)),), LONG, "", pixels(1)),
        AddRequests(3, (seeing(6, 1),), LONG),  # there are none at all
    )
    driver.run(*[(0, message) for message in bad])
    assert [str(answer.error)[:20] for answer in driver.replies()] == [
        "the pixels of an ima", "there are 17 prompts", "prompt token 1 is 10", "the pixels of an ima",
    ]  # fmt: skip
    assert driver.loop.pixels.total_bytes == len(driver.loop.pixels) == 0
    driver.loop.pixels.max_bytes = 20
    driver.run((0, AddRequests(4, (seeing(5, 1, 2),), LONG, "", pixels(1, 2))))
    assert isinstance(driver.replies()[-1].error, Overloaded)
    assert driver.is_empty()


def test_steps_are_noted_while_somebody_looks_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = hosted()
    ask = AddRequests(1, (NewRequest(1, "a", [1, 2, 3]),), LONG)
    driver.run((0, ask), most=3)
    assert driver.engine.step_history is None
    driver.run((0, SnapshotRequest(2)), most=4)
    driver.run((0, SnapshotRequest(3)), most=1)
    texts = {answer.key: answer.value for answer in driver.replies()}
    assert json.loads(str(texts[2]))["last"] == []
    noted = json.loads(str(texts[3]))["last"]
    assert len(noted) == 3
    assert noted[-1][:3] == [noted[0][0] + 2, 0, 2]  # no tokens of prompts, a row for each of two branches
    monkeypatch.setattr("quire.ipc.engine_loop.HISTORY_IDLE_SECONDS", -1.0)
    monkeypatch.setattr("quire.ipc.engine_loop.METRICS_INTERVAL", -1.0)
    driver.run(most=1)
    assert driver.engine.step_history is None


def test_what_a_look_took_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time includes the snapshot, its JSON, and sending the previous one."""
    driver, clock = hosted(), [0.0]

    def taking(seconds: float, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            clock[0] += seconds
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr("quire.ipc.engine_loop.take_snapshot", taking(3.0, take_snapshot))
    # Modules of its own: event loops of other tests' servers read the clock of the real one.
    monkeypatch.setattr("quire.ipc.engine_loop.json", SimpleNamespace(dumps=taking(5.0, json.dumps)))
    monkeypatch.setattr(driver.loop, "_send_to_client", taking(7.0, driver.loop._send_to_client))
    fake = SimpleNamespace(thread_time=lambda: clock[0], monotonic=lambda: 2 * clock[0])
    monkeypatch.setattr("quire.ipc.engine_loop.time", fake)
    monkeypatch.setattr(driver.loop, "_cpu_seconds", lambda: clock[0])
    for key in range(3):
        driver.loop._snapshot(0, SnapshotRequest(key))
    answers = [json.loads(str(answer.value)) for answer in driver.replies()]
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
