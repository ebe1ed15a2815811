"""Ranks with an echo in the model's place: on threads, or in processes: `echo_ranks.py RECIPE RANK FD ...`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from bench.echo_runner import EchoRunner
from quire.config import EngineConfig
from quire.distributed.rank_handle import launch_rank_process
from quire.distributed.rank_messages import InitMessage
from quire.distributed.rank_worker import RunnerBuilder, serve
from quire.distributed.remote_runner import RemoteRunner
from quire.distributed.shared_ring import RingReader
from quire.errors import PeerLost
from quire.ipc.child_process import ChildProcess
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import PageCopy, PageOp, SliceResult, StepPlan, StepResult
from quire.startup.rank_program import main

VOCAB = 512


def hit(number: int) -> None:
    """By a signal, which may take a moment to arrive: this process does nothing more."""
    os.kill(os.getpid(), number)
    time.sleep(1000)


FAULTS: dict[str, Callable[[], None]] = {
    "exit": lambda: os._exit(3),
    "kill": lambda: hit(signal.SIGKILL),
    "stop": lambda: hit(signal.SIGSTOP),
    "hang": lambda: time.sleep(1000),  # until the process is killed
}


class FaultyEcho(EchoRunner):
    """An EchoRunner that does `how` at `place`: "start", "bind", "warm", "close", or as step `step` is submitted or
    collected."""

    def __init__(
        self, depth: int = 1, vocab_size: int = VOCAB, how: str = "", place: str = "", step: int = 0, pause: float = 0.0
    ) -> None:
        super().__init__(depth, vocab_size=vocab_size)
        self.how, self.place, self.step, self.pause, self.skipped = how, place, step, pause, False
        self._at("start")

    def _at(self, place: str, step: int = 0) -> None:
        if place != self.place or step != self.step:
            return
        if self.how == "raise":
            raise RuntimeError("the device is gone")
        if self.how == "echo":
            raise PeerLost("connection closed by peer")
        if self.how in FAULTS:
            FAULTS[self.how]()

    def bind(self, geometry: KVCacheConfig) -> None:
        self._at("bind")
        super().bind(geometry)

    def warm_up(self, tokens: int, max_len: int) -> None:
        self._at("warm")

    def wake(self, tags: Sequence[str]) -> None:
        self._at("wake")
        super().wake(tags)

    def submit(self, plan: StepPlan) -> int:
        self._at("submit", self.submitted + 1)
        return super().submit(plan)

    def collect(self, ticket: int) -> StepResult:
        time.sleep(self.pause)  # a device whose step takes time
        self._at("collect", ticket)
        result = super().collect(ticket)
        if self.how == "draw" and ticket >= self.step and result.slice_results:
            return result._replace(slice_results=(SliceResult((1,)), *result.slice_results[1:]))
        return result

    def apply(self, entry: PageOp) -> None:
        if self.how == "skip" and isinstance(entry, PageCopy) and not self.skipped:
            self.skipped = True
            return
        super().apply(entry)

    def close(self) -> None:
        self._at("close")
        super().close()


class ThreadRank(ChildProcess):
    """A rank on a thread of this process."""

    def __init__(self, build: RunnerBuilder, rank: int, inherited: Sequence[int]) -> None:
        ours, self.theirs = socket.socketpair()
        self.connections, self.process = [ours], self  # type: ignore[assignment]
        descriptors = [os.dup(descriptor) for descriptor in inherited]
        reader = RingReader(*descriptors[:2], rank)
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run, args=(build, reader, descriptors), daemon=True)
        self.thread.start()

    def _run(self, build: RunnerBuilder, reader: RingReader, descriptors: list[int]) -> None:
        try:
            met = tuple(descriptors[2:])

            def built(hello: InitMessage) -> Any:
                return build(hello._replace(meeting=hello.meeting._replace(descriptors=met)))

            self.code = serve(built, self.theirs, reader, lambda: None)
        finally:
            reader.close()
            for descriptor in descriptors:
                os.close(descriptor)
            self.theirs.close()

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        if self.thread.is_alive() or self.code is None:
            raise subprocess.TimeoutExpired("a thread", timeout or 0)
        return self.code

    def kill(self) -> None:
        self.connections[0].close()

    def poll(self) -> int | None:
        return self.code

    def is_stopped(self) -> bool:
        return False


def started(runner: RemoteRunner) -> RemoteRunner:
    """Ranks that have built what they are to."""
    hellos = [InitMessage(EngineConfig(), part, (), 128, 60.0) for part in runner.layout.shards()]
    try:
        runner.send_init(hellos)
        runner.wait_until_built()
    except BaseException:
        runner.kill()
        raise
    return runner


def threaded(ranks: int, build: Callable[[int], Any], seconds: float = 60.0) -> RemoteRunner:
    """Ranks on threads, each with the runner that `build` makes for it."""
    return started(RemoteRunner(ranks, seconds, partial(ThreadRank, lambda hello: build(hello.part.tp_rank))))


def processes(ranks: int, seconds: float = 60.0, **faults: dict[str, Any]) -> RemoteRunner:
    """Ranks in processes; `faults` by their numbers ("rank1"), as FaultyEcho has them."""
    program = (str(Path(__file__)), json.dumps(faults))
    return started(RemoteRunner(ranks, seconds, partial(launch_rank_process, program=program)))


if __name__ == "__main__":
    RECIPE = json.loads(sys.argv.pop(1))
    main(lambda hello: FaultyEcho(**RECIPE.get(f"rank{hello.part.tp_rank}", RECIPE.get("all", {}))))
