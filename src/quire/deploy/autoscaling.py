"""The number of replicas that the present requests need: a policy of Ray Serve's autoscaler. It imports nothing of
quire, because Serve sends this module to its controller."""

from __future__ import annotations

from math import ceil
from typing import Any


class RoomPolicy:
    """Starts replicas if more than `target_waiting` requests wait for each, and ends those that the others have room
    for. How many requests a replica has room for is at first `max_num_seqs`; it is measured when requests wait.

    Serve calls it with means over look_back_period_s of what the replicas report, and applies the bounds and delays of
    its autoscaling_config to the result."""

    def __init__(self, target_waiting: float, max_num_seqs: int) -> None:
        self.target_waiting, self.room = target_waiting, float(max_num_seqs)

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, and no state for Serve to keep."""
        metrics, count = context.aggregated_metrics or {}, max(context.current_num_replicas, 1)
        waiting, running = (sum(metrics.get(name, {}).values()) for name in ("waiting", "running"))
        return self.choose(count, waiting, running), {}

    def choose(self, count: int, waiting: float, running: float) -> int:
        """Return the number of replicas for these requests, of which `count` replicas run `running`."""
        if waiting > self.target_waiting * count:
            self.room = max(running / count, 1.0)
            return ceil((running + waiting) / (self.room + self.target_waiting))
        self.room = max(self.room, running / count)
        return min(max(ceil((running + waiting) / self.room), 1), count)
