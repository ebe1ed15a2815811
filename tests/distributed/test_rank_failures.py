"""What becomes of all ranks when one is killed, stopped, hangs or raises: named, in time, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from echo_ranks import FaultyEcho, processes, threaded
from memories import MEMORIES, Build
from waiting import has_ended, wait_until
from wired import drain, open_engine

from quire.distributed.remote_runner import RemoteRunner
from quire.errors import EngineDead, StartupError

TESTS = Path(__file__).parents[1]
KILLED = r"rank 1 was ended by signal 9 \(SIGKILL\)"
RAISED = "rank 1 failed: RuntimeError: the device is gone"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the state of silent ranks read after 0.2 s instead of 2."""
    monkeypatch.setattr("quire.distributed.remote_runner.SILENCE_SECONDS", 0.2)


def descriptors() -> set[str]:
    return {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if os.path.lexists(one)}


def ranks_left() -> list[psutil.Process]:
    """Return the children of this process that are ranks."""
    children = (one for one in psutil.process_iter(["ppid", "cmdline"]) if one.info["ppid"] == os.getpid())
    return [one for one in children if "echo_ranks" in " ".join(one.info["cmdline"] or ())]


def used(runner: RemoteRunner) -> None:
    """Run some steps."""
    engine = open_engine(runner)
    runner.warm_up(64, 48)
    drain(engine)


def used_once(**faults: dict[str, Any]) -> None:
    """Start, use and close two ranks in processes."""
    with closing(processes(2, **faults)) as runner:
        used(runner)


ENDS = {
    "kill": KILLED, "exit": "rank 1 ended with status 3", "stop": r"rank 1 was stopped \(SIGSTOP\)", "raise": RAISED,
}  # fmt: skip
PLACES = {
    "start": (StartupError, "at start"), "bind": (StartupError, "at start"), "warm": (StartupError, "at start"),
    "submit": (EngineDead, "in step 3"), "collect": (EngineDead, "in step 3"),
}  # fmt: skip


SOON = {("kill", "start"), ("stop", "start"), ("kill", "bind"), ("exit", "collect"), ("stop", "collect"),
        *(("raise", place) for place in PLACES)}  # fmt: skip


@pytest.mark.parametrize(
    ("how", "place"),
    [
        pytest.param(how, place, marks=() if (how, place) in SOON else pytest.mark.soak)
        for how in ENDS
        for place in PLACES
    ],
)
def test_whatever_becomes_of_a_rank_wherever(how: str, place: str) -> None:
    error, when = PLACES[place]
    fault = {"how": how, "place": place, "step": 3 if place in ("submit", "collect") else 0}
    before = descriptors()
    with pytest.raises(error, match=f"^{ENDS[how]} {when}"):
        used_once(rank1=fault)
    assert not ranks_left()
    assert descriptors() <= before


@pytest.mark.parametrize("how", [*ENDS, "hang"])
def test_a_rank_that_goes_at_its_end_leaves_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.distributed.remote_runner.CLOSE_SECONDS", 0.5)
    before = descriptors()
    used_once(rank1={"how": how, "place": "close"})
    assert not ranks_left()
    assert descriptors() <= before


def test_a_ranks_traceback_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDead, match=RAISED):
        used_once(rank1={"how": "raise", "place": "collect", "step": 3})
    said = capfd.readouterr().err
    assert said.count("Traceback (most recent call last)") == 1
    assert "in collect" in said
    assert "RuntimeError: the device is gone" in said


def test_ranks_open_no_port_and_nothing_of_theirs_has_a_name() -> None:
    with closing(processes(2)) as runner:
        used(runner)
        for pid in (side.child.process.pid for side in runner.ranks):
            process = psutil.Process(pid)
            assert not [one for one in process.net_connections("all") if one.laddr]
            maps = {mapped.path for mapped in process.memory_maps()}
            assert any("memfd:" in path for path in maps), "the ring is mapped"
            links = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(one)}
            assert not [path for path in maps | links if path.startswith("/dev/shm/")]


def test_a_rank_that_hangs_is_given_up_after_the_limit() -> None:
    runner = threaded(2, lambda rank: FaultyEcho(pause=1.0 * rank), 0.5)
    with pytest.raises(EngineDead, match=r"rank 1 has not answered for 0\.5 s in step 1 \(--rank-timeout\)"):
        drain(open_engine(runner))
    runner.close()


def test_a_rank_that_is_slow_has_all_of_its_time() -> None:
    with closing(threaded(2, lambda rank: FaultyEcho(pause=1.0 * rank), 5.0)) as runner:
        open_engine(runner).step()
        assert runner.collected == 1


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(60.0, r"rank 0 was stopped \(SIGSTOP\) at start"), (0.01, r"rank \d has not taken what it was sent for 0\.05 s")],
)
def test_without_room_in_the_ring_nothing_starts(seconds: float, told: str) -> None:
    runner = processes(2)
    runner.seconds = seconds
    for side in runner.ranks:
        side.child.process.send_signal(signal.SIGSTOP)
        wait_until(side.child.is_stopped, "the rank is stopped: else it makes room")
    ring = runner.hosts[0].ring  # type: ignore[attr-defined]
    ring.write(bytes(4 * ring.max_record_bytes), 0.0)
    with pytest.raises(StartupError, match=told):
        runner.bind(MEMORIES["paged-4"](Build(256, 64)).kv_config)
    assert not ranks_left()


def test_a_rank_that_can_not_wake_up_ends_all() -> None:
    """The other ranks are awake by then."""
    runner = threaded(2, lambda rank: FaultyEcho(1, **({"how": "raise", "place": "wake"} if rank else {})))
    engine = open_engine(runner)
    drain(engine)
    engine.sleep(1)
    with pytest.raises(EngineDead, match=f"{RAISED} waking up"):
        engine.wake()
    runner.close()


def failing(how: Callable[[int], dict[str, Any]], ranks: int = 3) -> None:
    """Use ranks on threads, each with the fault that `how` returns for it."""
    with closing(threaded(ranks, lambda rank: FaultyEcho(**how(rank)))) as runner:
        drain(open_engine(runner))


def test_the_cause_is_named_and_not_its_echoes() -> None:
    """The failures that follow arrive before the cause."""
    echo = {"how": "echo", "place": "collect", "step": 3}
    late = {"how": "raise", "place": "collect", "step": 3, "pause": 0.1}
    with pytest.raises(EngineDead, match=f"^{RAISED.replace('1', '2')} in step 3$"):
        failing(lambda rank: late if rank == 2 else echo)


def test_where_only_echoes_are_heard_the_one_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.distributed.remote_runner.CAUSE_SECONDS", 0.1)
    echo = {"how": "echo", "place": "collect", "step": 2}
    told = "^rank 1 doesn't answer the other ranks in step 2: PeerLost: connection closed by peer$"
    with pytest.raises(EngineDead, match=told):
        failing(lambda rank: {"pause": 0.6} if rank == 1 else echo)


def test_ranks_end_with_their_engine_also_those_that_are_stopped() -> None:
    code = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from echo_ranks import processes\n"
        "runner = processes(2)\n"
        "pids = [side.child.process.pid for side in runner.ranks]\n"
        "os.kill(pids[0], 19)\n"
        "print(*pids, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(TESTS)], capture_output=True, text=True, timeout=100)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until(lambda: all(map(has_ended, pids)), "the ranks have ended")
