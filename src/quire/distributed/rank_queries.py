"""What may be asked of a rank's runner: each question by its name, with an answer of JSON."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.distributed.kernel_profiler import KernelProfiler

RankQuery = Callable[[Any], Any]


def _query_mapping(runner: Any) -> list[float] | None:
    mapped = getattr(runner, "mapping_stats", None)
    return None if mapped is None else list(mapped)


def _query_usage(runner: Any) -> list[float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [time.process_time(), pages * mmap.PAGESIZE]


def _query_graphs(runner: Any) -> dict[str, list[Any]]:
    graphs, mixed = getattr(runner, "decode_graphs", None), getattr(runner, "mixed_graphs", None)
    found = {} if graphs is None else {"decode steps": list(graphs.capture_sizes)}
    return found if mixed is None else {**found, "steps with prompts": [*map(list, mixed.half_sizes()[0])]}


_profiler = KernelProfiler()

RANK_QUERIES: dict[str, RankQuery] = {
    "depth": lambda runner: runner.depth,
    "attention": lambda runner: getattr(runner, "attention", ""),
    "device": lambda runner: str(getattr(runner, "device", "")),
    "notices": lambda runner: list(getattr(runner, "notices", ())),
    "graphs": _query_graphs,  # the sizes that it captures, by the kind of step
    "mapped": _query_mapping,  # where memory is virtual, the fields of vocabulary.plan.Mapped
    "read_bytes": lambda runner: getattr(getattr(runner, "model", None), "read_bytes", 0),  # of the checkpoint
    "profile": lambda runner: _profiler.begin(),
    "profiled": lambda runner: _profiler.end(),  # since it was last told to
    "used": _query_usage,  # the fields of vocabulary.plan.RankUse
}
