"""A model divided among three nodes of a real Ray cluster, which are network namespaces of this host: the tokens of one
process, and what becomes of it when a node, a process or a link fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_namespaces import NamespaceCluster, can_make_namespaces
from waiting import wait_until

TESTS = Path(__file__).parents[1]
SECONDS = 280.0  # of one run

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed: pip install 'quire[ray]'"),
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and ip"),
    pytest.mark.xdist_group(name="namespaces"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[NamespaceCluster]:
    """Yield a cluster of three nodes of 2 CPUs each."""
    made = NamespaceCluster([2, 2, 2])
    try:
        yield made
    finally:
        made.close()


def begin(cluster: NamespaceCluster, do: str, **task: Any) -> subprocess.Popen[str]:
    """Start the program of `ray_workload.py` on node 0."""
    program = [sys.executable, str(TESTS / "ray_workload.py"), cluster.cluster, json.dumps({"do": do, **task})]
    return subprocess.Popen(cluster.inside(0, *program), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=cluster.environment())  # fmt: skip


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the program reports in its last line."""
    said, errors = process.communicate(timeout=SECONDS)
    assert said.strip(), errors
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize(
    "layout",
    [{"pp": 3, "preemption": "recompute"}, {"tp": 2, "pp": 2, "preemption": "swap"},
     {"pp": 3, "tp": 2, "preemption": "swap"}],
    ids=str,
)  # fmt: skip
def test_nodes_give_the_tokens_of_one_process(cluster: NamespaceCluster, layout: dict[str, Any]) -> None:
    """1,000 requests with hits, preemption, branches, beams, grammars and speculation."""
    found = ended(begin(cluster, "compare", count=1000, **layout))
    assert found["differ"] == []
    assert found["preemptions"] > 0
    assert found["hits"] > 0
    ranks = sum(count for _, count in found["nodes"])
    assert ranks == layout["pp"] * layout.get("tp", 1)
    assert len(found["nodes"]) == -(-ranks // 2)


def serving(cluster: NamespaceCluster, **task: Any) -> tuple[subprocess.Popen[str], list[str]]:
    """Start ranks on two nodes, and return the program and the nodes' addresses when they answer."""
    process = begin(cluster, "serve", tp=2, pp=2, **task)
    assert process.stdout is not None, "a pipe"
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, [name for name, _ in json.loads(line)["nodes"]]


def number_of(cluster: NamespaceCluster, address: str) -> int:
    return next(node for node in range(3) if cluster.address(node) == address)


def test_a_node_that_dies_is_named_and_its_ranks_are_placed_anew(cluster: NamespaceCluster) -> None:
    process, addresses = serving(cluster, on_rank_failure="restart", rank_timeout=120.0)
    lost = number_of(cluster, addresses[1])
    cluster.kill(lost)
    found = ended(process)
    assert found.get("restarts") == 1, found
    assert found["right"]
    cluster.start_node(lost, 2)


def test_without_a_restart_the_end_of_a_raylet_is_one_error(cluster: NamespaceCluster) -> None:
    process, addresses = serving(cluster)
    lost = number_of(cluster, addresses[1])
    [raylet] = [one for one in cluster.processes(lost) if one.name() == "raylet"]
    raylet.kill()
    found = ended(process)
    assert "was ended with Ray's actor" in found["error"], found
    cluster.kill(lost)
    cluster.start_node(lost, 2)


def test_the_end_of_the_driver_is_one_error(cluster: NamespaceCluster) -> None:
    process, _ = serving(cluster)
    [driver] = [one for one in cluster.processes(0) if "quire.distributed.ray_driver" in cmdline(one)]
    os.kill(driver.pid, signal.SIGKILL)
    assert "was ended with Ray's driver, which was ended by signal 9 (SIGKILL)" in ended(process)["error"]


def cmdline(process: psutil.Process) -> list[str]:
    """Return a process's arguments, none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_link_that_is_cut_is_one_error_in_time(cluster: NamespaceCluster) -> None:
    process, addresses = serving(cluster)
    lost = number_of(cluster, addresses[1])
    cluster.cut(lost)
    try:
        found = ended(process)
    finally:
        cluster.cut(lost, down=False)
    assert "lost with the connection to node" in found["error"] or "Ray's actor" in found["error"], found
    assert found["seconds"] < 60.0
    cluster.kill(lost)
    cluster.start_node(lost, 2)


def test_a_link_that_fails_for_moments_loses_nothing(cluster: NamespaceCluster) -> None:
    process, addresses = serving(cluster, rank_timeout=20.0)
    slow = number_of(cluster, addresses[1])
    for _ in range(5):
        for down in (True, False):
            cluster.cut(slow, down)
            time.sleep(1.0)  # TCP sends what was lost again
    found = ended(process)
    assert found["right"], found
    assert not found["restarts"]


def test_agents_listen_on_their_nodes_address_alone(cluster: NamespaceCluster) -> None:
    process, addresses = serving(cluster, rank_timeout=30.0)
    agents = {}
    for node in range(3):
        for one in cluster.processes(node):
            if "quire.distributed.node_agent" in cmdline(one) or "quire.startup.rank_program" in cmdline(one):
                agents[one.pid] = node
    listed = [
        (line.split()[3].rpartition(":")[0], int(line.split("pid=")[1].split(",")[0]))
        for node in range(3)
        for line in subprocess.run(
            cluster.inside(node, "ss", "-Hltnp"), capture_output=True, text=True
        ).stdout.splitlines()
        if "pid=" in line
    ]
    ours = [(address, pid) for address, pid in listed if pid in agents or pid == process.pid]
    assert all(address == cluster.address(agents.get(pid, 0)) for address, pid in ours), ours
    assert ended(process)["right"]
    wait_until(lambda: not any(map(psutil.pid_exists, agents)), "the agents have ended")
    assert len(addresses) == 2
