"""A Ray cluster of a head with one CPU and three nodes with one CPU each, on the loopback interface: `ray_nodes.py
FOLDER`. Says its address. For every line of its standard input that says `kill` it kills the raylet of a node that
has an engine and not the API server, and says how many it killed. It ends with its standard input."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil


def has_engine_alone(node: Any) -> bool:
    """Return True if a node has an engine, and not the API server."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    commands = [" ".join(child.cmdline()) for child in raylet.children(recursive=True)]
    return any("quire.startup.engine_program" in command for command in commands) and not any(
        "ServeReplica:quire:api" in command for command in commands
    )


def main() -> None:
    os.setsid()
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    os.makedirs(os.path.join(sys.argv[1], "ray"))
    from ray.cluster_utils import Cluster

    from quire.distributed.ray_driver import end_session

    alike = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=alike)
    try:
        for _ in range(3):
            cluster.add_node(**alike)
        print(cluster.address, flush=True)
        for _ in sys.stdin:
            there = next((node for node in cluster.worker_nodes if has_engine_alone(node)), None)
            if there is not None:
                cluster.remove_node(there, allow_graceful=False)
            print(int(there is not None), flush=True)
    finally:
        end_session(os.getpid())


if __name__ == "__main__":
    main()
