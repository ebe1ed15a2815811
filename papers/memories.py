"""Simulate a model of unlike layers in every memory. Memory that running or later tokens read is used; the rest of the
allocated memory is internal waste: KV outside a layer's window too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from papers.serving import shares
from papers.unlike_serving import Case, simulated
from quire.memory.answers import Usage


def windows(memories: Sequence[str], case: Case) -> list[dict[str, Any]]:
    """Serve a case's requests, which come at once, in each memory."""
    points = []
    for memory in memories:
        print(f"{memory}, windows, simulated", file=sys.stderr)
        run = simulated(case, "jenga", sampled=0.5, memory=memory)
        full, window, wasted, free = (
            sum(getattr(moment, kind) for moment in run.memory) // len(run.memory)
            for kind in ("full", "window", "wasted", "free")
        )
        points.append({
            "run": "windows", "memory": memory, **shares(Usage(full + window, 0, 0, wasted, 0, free)),
            "running": run.batch, "latency": run.normalised, "requests_per_s": run.requests_per_s,
            "preemptions": run.preemptions,
        })  # fmt: skip
    return points
