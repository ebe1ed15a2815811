"""A Ray cluster of two nodes on the loopback interface, with GPUs that aren't there: `ray_cluster.py FOLDER`, until
its standard input ends. Says its address."""

from __future__ import annotations

import os
import sys


def main() -> None:
    os.setsid()
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    os.makedirs(os.path.join(sys.argv[1], "ray"))
    from ray.cluster_utils import Cluster

    from quire.distributed.ray_driver import OBJECT_STORE_BYTES, end_session

    alike = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, **alike})
    try:
        cluster.add_node(num_cpus=4, **alike)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        end_session(os.getpid())


if __name__ == "__main__":
    main()
