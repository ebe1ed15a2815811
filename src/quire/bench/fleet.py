"""Client processes (quire.client) that send one load to a server: they are started once and get a plan for each run.

They share a file of request bodies and, for a closed loop, a queue. Plans and results are JSON lines over pipes. They
end when their stdin closes.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from quire.bench.drive import Load
from quire.client.connection_pool import Address
from quire.client.load_run import QUEUE_RECORD
from quire.errors import QuireError

MOST = 64  # client processes
EACH = 128  # concurrent requests of a process, above which another one is started
BEFORE = 0.1  # seconds from the start command to the start of a run
LOOK = 0.2  # seconds between two checks for processes that have ended
LEAVE = 5.0  # seconds within which a process must end


def clients_for(requests: int, load: Load) -> int:
    """Return the number of clients: what the load needs, but at most half of the cores, since the server may run
    here."""
    at_once = requests if load.times is not None else min(requests, load.concurrency)
    return max(1, min(-(-at_once // EACH), (os.cpu_count() or 1) // 2, 16))


class Sent(NamedTuple):
    """The outcome of one request. In seconds since the start of the run: when it was `due`, when it was `sent`, and
    when each chunk arrived. `counts` are the tokens after each chunk, if the server reports them. `prompt` and `tokens`
    are its usage."""

    number: int
    due: float
    sent: float
    times: list[float]
    counts: list[int]
    prompt: int
    tokens: int
    status: int
    error: str | None


class Fleet:
    """`count` client processes, which run until `close`."""

    def __init__(self, count: int) -> None:
        assert 1 <= count <= MOST, count
        self.count = count
        self._stack = ExitStack()
        self._bodies = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._queue = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._spans: list[tuple[int, int]] = []
        self._held: Sequence[bytes] = ()
        self._processes = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(count):
                self._processes.append(self._start())
            undo.pop_all()

    def _start(self) -> subprocess.Popen[bytes]:
        files = (self._bodies.fileno(), self._queue.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", "quire.client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=files,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches this process alone
        )  # fmt: skip

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None, "it was started with pipes"
                with suppress(OSError):  # buffered data can't be written to a process that has ended
                    pipe.close()
        for process in self._processes:
            try:
                process.wait(LEAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()

    def run(
        self, address: Address, head: str, bodies: Sequence[bytes], load: Load
    ) -> tuple[list[Sent], list[dict[str, Any]]]:
        """Send every body at the times of `load`. Return the outcomes, in order, and the CPU use of each client."""
        self._hold(bodies)
        plans = self._plans(len(bodies), load)
        for process, plan in zip(self._processes, plans):
            files = {"bodies": self._bodies.fileno(), "queue": self._queue.fileno()}
            self._tell(process, {"address": address, "head": head, **plan, **files})
        for process in self._processes:
            self._hear(process)
        start = time.monotonic() + BEFORE
        for process in self._processes:
            self._tell(process, {"start": start})
        sent, clients = list[Sent](), list[dict[str, Any]]()
        for process in self._processes:
            self._await(process)
            while "load" not in (said := self._hear(process)):
                sent.append(_sent(said["answer"], load))
            clients.append(said["load"])
        sent.sort()
        if [one.number for one in sent] != list(range(len(bodies))):
            raise QuireError(f"the clients lost requests: {len(sent)} answers to {len(bodies)}")
        return sent, clients

    def _hold(self, bodies: Sequence[bytes]) -> None:
        """Write the bodies to the file that the clients read."""
        if bodies is self._held:
            return
        self._bodies.seek(0)
        self._bodies.truncate()
        self._spans, at = [], 0
        for body in bodies:
            self._spans.append((at, len(body)))
            self._bodies.write(body)
            at += len(body)
        self._bodies.flush()
        self._held = bodies

    def _plans(self, count: int, load: Load) -> list[dict[str, Any]]:
        clients = len(self._processes)
        if load.times is not None:
            timed = [(index, *self._spans[index], load.times[index]) for index in range(count)]
            return [{"requests": timed[client::clients], "slots": 0} for client in range(clients)]
        queue = self._queue.fileno()
        os.ftruncate(queue, 0)
        os.pwrite(queue, b"".join(QUEUE_RECORD.pack(index, *self._spans[index]) for index in range(count)), 0)
        os.lseek(queue, 0, os.SEEK_SET)  # also for the clients: they inherited this position
        slots = min(load.concurrency, count)
        return [{"requests": [], "slots": (slots + client) // clients} for client in range(clients)]

    def _tell(self, process: subprocess.Popen[bytes], what: Mapping[str, Any]) -> None:
        assert process.stdin is not None, "it was started with a pipe"
        try:
            process.stdin.write(json.dumps(what, separators=(",", ":")).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._ended(process)

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a message of `process`. Raise an error if any process has ended."""
        assert process.stdout is not None, "it was started with a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not selector.select(LOOK):
                for one in self._processes:
                    if one.poll() is not None:
                        self._ended(one)

    def _hear(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None, "it was started with a pipe"
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            self._ended(process)
        said: dict[str, Any] = json.loads(line)
        return said

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        number = self._processes.index(process) + 1
        status = process.wait(LEAVE)
        raise QuireError(f"client process {number} of {len(self._processes)} ended with status {status}: see above")


def _sent(said: Mapping[str, Any], load: Load) -> Sent:
    sent = at = said["sent"]
    times = []
    for gap in said["times"]:
        at += gap
        times.append(at / 1e6)
    due = sent / 1e6 if load.times is None else load.times[said["number"]]
    return Sent(said["number"], due, sent / 1e6, times, said["counts"], said["prompt"], said["tokens"],
                said["status"], said["error"])  # fmt: skip
