"""What each rank is told to build."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
from echo_ranks import FaultyEcho, threaded
from waiting import IDLE, wait_until
from wired import drain, open_engine

from quire.config import EngineConfig
from quire.distributed import rank_host, rank_startup
from quire.distributed.rank_messages import STEP_RESULT
from quire.distributed.remote_runner import RemoteRunner
from quire.distributed.rendezvous import RankRendezvous
from quire.distributed.shared_ring import RingWriter
from quire.errors import EngineDead, StartupError
from quire.ipc.child_process import ChildProcess
from quire.ipc.frames import Frame
from quire.kernels.cpu import cores
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.startup import build
from quire.text.input_processor import engine_config


def test_each_rank_has_its_part_and_its_share_of_threads() -> None:
    host = Mock(ranks=[0, 1, 2], cores=None)
    ranks = Mock(seconds=60.0, layout=ParallelLayout(3), hosts=[host])
    rank_startup.build_ranks(ranks, EngineConfig(model="x", tp=3, threads=8, revision="r"), "/folder", (5,), 99, True)
    [hellos] = ranks.send_init.call_args.args
    assert [hello.part for hello in hellos] == [Shard(0, 3), Shard(1, 3), Shard(2, 3)]
    assert [hello.progress for hello in hellos] == [True, False, False]
    for hello in hellos:
        assert (hello.config.model, hello.config.revision, hello.config.threads) == ("/folder", None, 2)
        assert (hello.eos_ids, hello.max_len, hello.seconds) == ((5,), 99, 60.0)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over ranks are, too; an unused remainder of threads is reported."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "available_cores", lambda: cores.Cores(16, 8, None))
    assert [rank_startup.threads_per_rank(None, ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert rank_startup.threads_per_rank(2, 4) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rank_startup.threads_per_rank(None, 2) is None
    assert rank_startup.threads_per_rank(4, 2) == 2
    assert rank_startup.unused_threads_notice(3, 2) == ["--threads is 3, and 2 ranks use 1 each: 2"]
    assert rank_startup.unused_threads_notice(2, 4) == ["--threads is 2, and 4 ranks use 1 each: 4"]
    assert rank_startup.unused_threads_notice(4, 2) == rank_startup.unused_threads_notice(None, 2) == []
    nodes = Mock(ranks=range(4), hosts=[Mock(ranks=range(2))] * 2, notices=())
    assert build._hardware_notices(EngineConfig(threads=2), None, nodes, "cpu") == ()
    config = EngineConfig(tp=4, kv_gib=8.0, swap_gib=2.0).per_rank()
    assert (config.kv_gib, config.swap_gib) == (2.0, 0.5)
    assert EngineConfig(tp=4, kv_tokens=8).per_rank().kv_gib is None


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor and no thread is left, and the error names what the system lacked."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def refused(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def none_is_started(rank: int, inherited: Sequence[int]) -> Any:
        raise StartupError("no process can be started")

    there, threads = descriptors(), threading.active_count()
    make, event = os.memfd_create, os.eventfd
    for most in range(0, 9, 2):  # three ranks have nine
        left = iter(range(most))
        with monkeypatch.context() as patched:
            patched.setattr(
                os, "eventfd", lambda *given, left=left: (refused if next(left, None) is None else event)(*given)
            )
            with pytest.raises(StartupError, match="for 3 ranks: Too many open files"):
                RemoteRunner(3, 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", lambda name, flags: (refused if "ring" in name else make)(name, flags))
        with pytest.raises(StartupError, match="for 3 ranks: Too many open files"):
            RemoteRunner(3, 60.0)
    with pytest.raises(StartupError, match="no process"):
        RemoteRunner(3, 60.0, none_is_started)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(StartupError, match="has no thread to start ranks: can't start new thread"):
            RemoteRunner(3, 60.0)
    wait_until(lambda: threading.active_count() <= threads, "the threads have ended")
    assert descriptors() <= there  # others' connections may have ended


def test_an_interrupt_once_they_are_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[ChildProcess] = []

    def start(rank: int, inherited: Sequence[int]) -> ChildProcess:
        children.append(ChildProcess(1, IDLE, f"rank {rank}", inherited))
        return children[-1]

    monkeypatch.setattr(rank_host, "RankHandle", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        RemoteRunner(2, 60.0, start)
    wait_until(lambda: [child.has_exited() for child in children] == [True, True], "both ranks have ended")


def test_an_interrupt_while_they_end_leaves_nothing() -> None:
    """All resources are released, also those that do not end with the processes, as with Ray."""
    children = [Mock(connections=[Mock()]) for _ in range(3)]
    children[0].wait_or_kill.side_effect = KeyboardInterrupt
    host = object.__new__(rank_host.LocalHost)
    ring, meeting, keeper = Mock(), Mock(), Mock()
    host.__dict__.update(_children=children, ring=ring, _rendezvous=meeting, _launch_thread=keeper)
    with pytest.raises(KeyboardInterrupt):
        host.kill()
    for child in children:
        child.process.kill.assert_called_once()
        child.wait_or_kill.assert_called_once()
        child.connections[0].close.assert_called_once()
    for one in (ring.close, meeting.close, keeper.may_exit.set):
        one.assert_called_once()


def test_what_was_let_go_of_is_not_closed_again() -> None:
    """The number of a closed descriptor may be in use again."""
    for made in (RankRendezvous(ParallelLayout(2)), RingWriter(2)):
        made.close()
        others = [os.eventfd(0) for _ in range(16)]
        made.close()
        for one in others:
            os.close(one)  # OSError if it was closed


def test_who_looks_into_a_runner_that_is_elsewhere_is_told_so() -> None:
    with closing(threaded(2, lambda rank: FaultyEcho())) as runner:
        with pytest.raises(StartupError, match="reads store of the runner"):
            runner.store  # noqa: B018
        assert not hasattr(runner, "anything")


def test_layouts_by_vllms_names() -> None:
    assert engine_config("x", {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}) == EngineConfig(model="x", tp=2)
    with pytest.raises(StartupError, match="two names"):
        engine_config("x", {"tensor_parallel_size": 2, "tp": 2})


def test_an_answer_that_is_none_ends_all_ranks() -> None:
    runner = threaded(2, lambda rank: FaultyEcho())
    engine = open_engine(runner)
    runner._receive_all = lambda *_: [Frame(STEP_RESULT, memoryview(b"none"))] * 2  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="result of step 1 is malformed"):
        drain(engine)
    with pytest.raises(EngineDead, match="result of step 1 is malformed"):
        runner.query("depth")
