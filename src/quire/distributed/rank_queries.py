"""Questions about a rank's runner, by name. The answers are JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

from quire.distributed.kernel_profiler import KernelProfiler


def _query_mapping(runner: Any) -> list[float] | None:
    mapped = getattr(runner, "mapping_stats", None)
    return None if mapped is None else list(mapped)


def _query_usage(runner: Any) -> list[float]:
    return [time.process_time(), psutil.Process().memory_info().rss]


def _query_graphs(runner: Any) -> dict[str, list[Any]]:
    graphs, mixed = getattr(runner, "decode_graphs", None), getattr(runner, "mixed_graphs", None)
    sizes = {} if graphs is None else {"decode steps": list(graphs.capture_sizes)}
    return sizes if mixed is None else {**sizes, "steps with prompts": [*map(list, mixed.half_sizes()[0])]}


_profiler = KernelProfiler()

RANK_QUERIES: dict[str, Callable[[Any], Any]] = {
    "depth": lambda runner: runner.depth,
    "attention": lambda runner: getattr(runner, "attention", ""),
    "device": lambda runner: str(getattr(runner, "device", "")),
    "notices": lambda runner: list(getattr(runner, "notices", ())),
    "graphs": _query_graphs,  # the captured sizes, by kind of step
    "mapped": _query_mapping,  # the fields of a MappingStats, if memory is virtual
    "profile": lambda runner: _profiler.begin(),
    "profiled": lambda runner: _profiler.end(),  # since "profile"
    "used": _query_usage,  # the fields of a RankUsage
}
