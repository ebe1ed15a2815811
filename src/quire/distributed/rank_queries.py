"""Questions about a rank's runner, by name. The answers are JSON."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psutil

MAX_KINDS = 60  # kinds of kernels that are reported, those with the most time


class KernelProfiler:
    """Profiles the kernels of this process's GPU by torch's profiler, one profile at a time. For benchmarks."""

    def __init__(self) -> None:
        self._profile: Any = None

    def begin(self) -> None:
        """Start the profile, after all kernels launched before have finished."""
        import torch

        torch.cuda.synchronize()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.__enter__()

    def end(self) -> dict[str, Any]:
        """Stop the profile and return, in milliseconds, `busy_ms` in which any kernel ran, `span_ms` from the first
        start to the last end, and `kernels`: count and time by kind (see `divide_time`)."""
        import torch

        profile, self._profile = self._profile, None
        assert profile is not None, "`begin` was called"
        torch.cuda.synchronize()
        profile.__exit__(None, None, None)
        spans = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # not in its stubs
        ]
        kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        times = divide_time([(start, end) for start, end, _ in spans])
        for (_, _, name), own in zip(spans, times):
            kinds[kernel_kind(name)][0] += 1
            kinds[kernel_kind(name)][1] += own / 1e3
        most = sorted(kinds.items(), key=lambda item: -item[1][1])[:MAX_KINDS]
        reach = max((end for _, end, _ in spans), default=0.0) - min((start for start, _, _ in spans), default=0.0)
        return {
            "busy_ms": sum(times) / 1e3,
            "span_ms": reach / 1e3,
            "kernels": {name: {"count": int(count), "ms": ms} for name, (count, ms) in most},
        }


def divide_time(spans: list[tuple[float, float]]) -> list[float]:
    """Divide the time in which any kernel runs among the kernels, whose starts and ends are `spans`. Return the time of
    each, in the same unit. While several run, the time is that of the one that ends first: the others were launched
    early and wait for it."""
    times, divided = [0.0] * len(spans), list[tuple[float, float]]()  # disjoint intervals, ascending
    for i in sorted(range(len(spans)), key=lambda i: spans[i][1]):
        start, end = spans[i]
        first, times[i] = start, end - start
        while divided and divided[-1][1] > start:
            earlier_start, earlier_end = divided.pop()
            times[i] -= earlier_end - max(earlier_start, start)
            first = min(first, earlier_start)
        divided.append((first, end))
    return times


def kernel_kind(name: str) -> str:
    """Return a kernel's name without its template arguments."""
    return re.split(r"[<(]", re.sub(r"^void ", "", name))[0][:60]


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
