"""Agents of nodes as processes of this host, without Ray: for tests, and to measure what their connections cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from quire.distributed.node_messages import HELLO, KINDS
from quire.distributed.rank_handle import RANK_PROGRAM
from quire.distributed.remote_host import AcceptedAgent, RemoteHost, start_hosts
from quire.distributed.secure_channel import ChannelListener
from quire.ipc.child_process import program_arguments
from quire.protocol.parallel_layout import ParallelLayout

ADDRESS = "127.0.0.1"
AGENT = program_arguments("quire.distributed.node_agent")
CONNECT_SECONDS = 60.0
END_SECONDS = 5.0


class LocalNodes:
    """A HostOpener (quire.distributed.remote_runner): an agent for each of `stages`, the ranges of stages by node."""

    def __init__(
        self,
        stages: Sequence[range],
        program: Sequence[str] = RANK_PROGRAM,
        checkpoints: Sequence[str] = (),
        **task: Any,
    ) -> None:
        """`task` replaces fields of what the agents read at start."""
        self.stages, self.program, self.checkpoints, self.task = stages, program, checkpoints, task
        self.agents: list[subprocess.Popen[bytes]] = []
        self.listener: ChannelListener | None = None

    def __call__(self, layout: ParallelLayout) -> list[RemoteHost]:
        """Start the agents and the ranks of a layout."""
        try:
            return self._start(layout)
        except BaseException:
            self.close()
            raise

    def _start(self, layout: ParallelLayout) -> list[RemoteHost]:
        self.listener = listener = ChannelListener(ADDRESS, len(self.stages), KINDS, HELLO)
        for number in range(len(self.stages)):
            self.start_agent(number, "" if number == 0 else ADDRESS)
        end = time.monotonic() + CONNECT_SECONDS
        while len(listener.accepted) < len(self.stages):
            assert time.monotonic() < end, "an agent does not connect"
            time.sleep(0.01)
        agents = [
            AcceptedAgent(f"node-{number}", ADDRESS, stages, *listener.accepted.pop(number))
            for number, stages in enumerate(self.stages)
        ]
        return start_hosts(layout, agents, self.checkpoints, lambda number: "", self.close, self.program)

    def start_agent(self, number: int, host: str) -> None:
        """Start an agent as Ray's actor does."""
        assert self.listener is not None, "it is open"
        task = {
            "address": ADDRESS, "port": self.listener.port, "certificate": self.listener.certificate,
            "token": self.listener.token, "number": number, "host": host, "gpus": [],
            "parent": os.getpid(), **self.task,
        }  # fmt: skip
        agent = subprocess.Popen([sys.executable, *AGENT], stdin=subprocess.PIPE, cwd="/")
        self.agents.append(agent)
        assert agent.stdin is not None, "a pipe"
        agent.stdin.write(json.dumps(task).encode() + b"\n")
        agent.stdin.close()

    def close(self) -> None:
        """End the agents."""
        assert self.listener is not None, "it was opened"
        self.listener.close()
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(END_SECONDS)
            agent.kill()
            agent.wait()
