"""Time kernels by replaying a CUDA graph of many calls, so that the host's time is excluded. Inputs are used in turn,
so that none is in the cache. The ceilings of the results are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from quire.errors import StartupError

REPLAYS = 7
BEYOND_CACHE = 2**28  # bytes: several times the L2 cache of any GPU
MOST_INPUTS = 64

Call = Callable[[], object]


class Case(NamedTuple):
    """One point of a kernel's grid: each of `calls` does the same on its own inputs. `amount` is in bytes read and
    written, or in operations if `bound` is "compute". `bound` "link" means PCIe; those calls are timed one by one."""

    kernel: str
    case: str
    calls: Sequence[Call]
    amount: float
    bound: str = "memory"


class Ceilings(NamedTuple):
    """Measured rates of this device: bytes/s of a device copy (read and written), operations/s of a bf16 product of
    8192^3, and bytes/s out to pinned host memory and in."""

    memory: float
    compute: float
    link_out: float
    link_in: float

    def of(self, case: Case) -> float:
        """Return the ceiling that limits the case."""
        if case.bound == "link":
            return self.link_out if "out" in case.kernel else self.link_in
        return self.compute if case.bound == "compute" else self.memory


def need_gpu(what: str) -> None:
    """Raise StartupError without a GPU."""
    if not torch.cuda.is_available():
        raise StartupError(f"{what} measures a GPU, and torch finds none", "Run it beside a GPU")


def inputs(count: int) -> int:
    """Return how many inputs of `count` bytes are needed so that none stays in the cache."""
    return max(1, min(MOST_INPUTS, -(-BEYOND_CACHE // max(count, 1))))


def replayed(calls: Sequence[Call], rounds: int = 1) -> float:
    """Return the seconds of one call: all calls in turn, `rounds` times, as one graph; the median of replays."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return _median(graph.replay, REPLAYS) / (rounds * len(calls))


def _median(work: Call, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(float(start.elapsed_time(end)) / 1000)
    return median(seconds)


def timed(case: Case) -> float:
    """Return the seconds of one call."""
    if case.bound != "link":
        return replayed(case.calls, max(1, 8 // len(case.calls)))
    for call in case.calls:
        call()
    return _median(lambda: [call() for call in case.calls], REPLAYS) / len(case.calls)


def ceilings() -> Ceilings:
    """Measure the ceilings of this device. Needs 6 GiB for a moment."""
    device = torch.device("cuda")
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory = 2 * len(source) / _median(partial(target.copy_, source), REPLAYS)  # a graph uses a slower copy engine
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    part = target[: len(pinned)]
    out = len(pinned) / _median(partial(pinned.copy_, part, non_blocking=True), REPLAYS)
    back = len(pinned) / _median(partial(part.copy_, pinned, non_blocking=True), REPLAYS)
    del source, target, part
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    compute = 2 * 8192**3 / replayed([partial(torch.mm, a, b, out=product)], 8)
    return Ceilings(memory, compute, out, back)


def result(case: Case, seconds: float, ceiling: float) -> dict[str, Any]:
    """Return one point for the document: microseconds, TB/s or TFLOP/s, and the share of the ceiling."""
    rate = case.amount / seconds
    unit = "TFLOP/s" if case.bound == "compute" else "TB/s"
    return {
        "kernel": case.kernel, "case": case.case, "us": seconds * 1e6, "rate": rate / 1e12, "unit": unit,
        "bound": case.bound, "share": rate / ceiling,
    }  # fmt: skip
