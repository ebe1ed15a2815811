"""Measure the all-reduce of tensor-parallel ranks and the norm that follows it (bench.exchange_rank). For each
size the slowest rank counts, and the bits of all ranks must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from quire.config import EngineConfig
from quire.distributed import rank_startup
from quire.distributed.rank_handle import launch_rank_process
from quire.distributed.rank_messages import InitMessage
from quire.distributed.remote_runner import RemoteRunner
from quire.errors import QuireError
from quire.ipc.child_process import program_arguments
from quire.protocol.parallel_layout import ParallelLayout

ROWS = (1, 32, 128, 512)
PROGRAM = program_arguments("bench.exchange_rank", str(Path(__file__).parents[1]))
MORE = (768, 1024, 1536)  # rows of 12 to 24 MiB, and 512 rows of 8 MiB, where one-shot and two-shot sums are compared
PROMPTS = (4096, 8192)  # rows of a product that are exchanged while it is computed
WAYS = (
    "quire", "beside a product", "replays", "one-shot", "two-shot", "NCCL", "gloo", "torch one-shot", "torch two-shot",
)  # fmt: skip
SHOTS = {"one-shot": 1, "two-shot": 2}  # quire's algorithms, measured at all sizes
OURS = ("quire", "beside a product", "replays", *SHOTS)  # whose bits are compared
PATIENCE = 60.0  # seconds that a rank has to measure one algorithm


def measured(ranks: int, device: str, end: float) -> Iterator[dict[str, Any]]:
    """Yield the result of each way and size, ours first. Ways that are unavailable are left out. If a rank fails, the
    rest is not measured and the last result has the reason. None is started after `end` (time.monotonic)."""
    config = EngineConfig(tp=ranks, device=device)
    runner = RemoteRunner(ranks, PATIENCE, partial(launch_rank_process, program=PROGRAM))
    try:
        if device == "cuda":
            rank_startup.open_devices(runner, config)
        threads = rank_startup.threads_per_rank(None, ranks) if device == "cpu" else None
        said = EngineConfig(tp=ranks, device=device, threads=threads)
        runner.send_init([InitMessage(said, part, (), 1, PATIENCE) for part in ParallelLayout(ranks).shards()])
        runner.wait_until_built()
        for number, way in enumerate(WAYS):
            for rows in sizes(way):
                if time.monotonic() > end:
                    yield {"way": way, "rows": rows, "left_out": "no time was left"}
                    continue
                runner.warm_up(rows, number)
                found = runner.query("found")
                if "missing" not in found[0]:
                    yield {"way": way, "rows": rows, **_joined(found)}
    except QuireError as error:
        yield {"way": "the rest", "rows": 0, "left_out": str(error)}
    finally:
        runner.close()


def sizes(way: str) -> tuple[int, ...]:
    """Return the numbers of rows that a way is measured with."""
    if way == "beside a product":
        return PROMPTS
    return (*ROWS, *MORE) if way in SHOTS or way == "NCCL" else ROWS


def _joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of all ranks."""
    same = len({one["bits"] for one in found}) == 1
    said: dict[str, Any] = {"same_bits": same, "exact": all(one["exact"] for one in found)}
    if "calls" in found[0]:
        wrong = sum(one["wrong"] for one in found)
        return {**said, "wrong": wrong, **{name: found[0][name] for name in ("calls", "gathers", "carried", "seconds")}}
    if "hidden" in found[0]:
        said["hidden"] = min(one["hidden"] for one in found)
        said["parts_us"] = found[0]["parts_us"]
    by_rank = [median(one["us"]) for one in found]
    return {**said, "us": max(by_rank), "by_rank_us": by_rank, "best_us": max(min(one["us"]) for one in found)}
