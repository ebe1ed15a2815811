"""A Ray cluster of nodes that are network namespaces of this host, joined by a bridge: each has an address of its own,
and its link can be cut. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from waiting import wait_until

from quire.distributed.ray_driver import OBJECT_STORE_BYTES

PORT = 6379
COMMAND_SECONDS = 120.0


def can_make_namespaces() -> bool:
    """Return True if this process may make network namespaces."""
    if os.getuid() or shutil.which("ip") is None:
        return False
    name = f"quire-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


class NamespaceCluster:
    """Nodes 0, 1, ... with the given numbers of CPUs. Node 0 has the cluster's head."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """Make the namespaces and start the cluster."""
        self.prefix = f"q{os.getpid() % 10000}"
        self.count = len(cpus)
        self.folder = Path(tempfile.mkdtemp(prefix="quire-ns-", dir="/tmp"))  # paths of sockets are short
        self.token = secrets.token_hex(32)
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": self.token}
        self.raylets: list[subprocess.Popen[bytes]] = []
        try:
            self._make_links()
            for node, count in enumerate(cpus):
                self.start_node(node, count)
        except BaseException:
            self.close()
            raise

    def name(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"{self.prefix}n{node}"

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"10.77.0.{node + 1}"

    @property
    def cluster(self) -> str:
        """The cluster's address."""
        return f"{self.address(0)}:{PORT}"

    def _make_links(self) -> None:
        hub = f"{self.prefix}hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for node in range(self.count):
            name, port = self.name(node), f"port{node}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def environment(self) -> dict[str, str]:
        """Return the environment of a node's processes."""
        path = os.pathsep.join(filter(None, sys.path))
        return {**os.environ, **self.variables, "PYTHONPATH": path}

    def inside(self, node: int, *command: str) -> list[str]:
        """Return a command that runs in a node's namespace."""
        return ["ip", "netns", "exec", self.name(node), *command]

    def start_node(self, node: int, cpus: int) -> None:
        """Start Ray on a node, and wait until it has joined the cluster."""
        log = self.folder / f"node{node}.log"
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder / 'r'}"]
        role = head if node == 0 else [f"--address={self.cluster}"]
        command = self.inside(
            node, sys.executable, "-m", "ray.scripts.scripts", "start", *role,
            f"--node-ip-address={self.address(node)}",
            f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats", "--block",
        )  # fmt: skip
        with log.open("wb") as out:
            self.raylets.append(
                subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.environment(),
                                 start_new_session=True)
            )  # fmt: skip
        wait_until(lambda: "Ray runtime started" in log.read_text(), lambda: log.read_text()[-500:], COMMAND_SECONDS)

    def cut(self, node: int, down: bool = True) -> None:
        """Cut a node's link, or join it again."""
        _ip("-n", f"{self.prefix}hub", "link", "set", f"port{node}", "down" if down else "up")

    def processes(self, node: int) -> list[psutil.Process]:
        """Return the processes of a node."""
        listed = subprocess.run(["ip", "netns", "pids", self.name(node)], capture_output=True, text=True)
        found = []
        for pid in map(int, listed.stdout.split()):
            with suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return found

    def kill(self, node: int) -> None:
        """Kill all processes of a node."""
        for process in self.processes(node):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End everything."""
        for node in range(self.count):
            self.kill(node)
        for raylet in self.raylets:
            raylet.kill()
            raylet.wait()
        for name in (*map(self.name, range(self.count)), f"{self.prefix}hub"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=COMMAND_SECONDS)
