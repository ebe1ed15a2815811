"""Measure the read and multiply rates of this machine's cores by threads, in plain torch: the ceilings of `quire bench
limits`.

The fastest of several attempts counts: disturbances only make one slower. One thread's clock is the process's own time,
which other processes don't lengthen.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

ATTEMPTS = 5
SMALLEST, LARGEST = 2**28, 2**31  # bytes of a buffer larger than any cache
ROW = 2048  # columns of the matrix that is read
SIDE = 2048  # rows of the square matrices


class CoreLimits(NamedTuple):
    """Measurements with `threads` threads. `read`: bytes a second over a `buffer` of that many bytes, larger than the
    caches. `read_weights`: the same, repeated over as many bytes as a model's weights, which a large cache may hold
    (None: not measured). `bf16`, `fp32`, `int8`: operations a second in products of square matrices; `int8` is None if
    torch has no such product."""

    threads: int
    buffer: int
    read: float
    read_weights: float | None
    bf16: float
    fp32: float
    int8: float | None

    def multiply(self, itemsize: int) -> float:
        """Return operations a second on numbers of `itemsize` bytes. Two bytes are bf16."""
        return {1: self.int8 or self.bf16, 2: self.bf16}.get(itemsize, self.fp32)

    def better(self, other: CoreLimits) -> CoreLimits:
        """Return the larger of each pair of measurements: disturbances only make them smaller."""
        return CoreLimits._make(
            one if one is None or other is None else max(one, other) for one, other in zip(self, other)
        )


def core_limits(threads: Iterable[int], weights: int | None = None) -> list[CoreLimits]:
    """Measure with each number of threads, then restore torch's own number."""
    kept, size = torch.get_num_threads(), buffer_bytes()
    buffer = torch.ones(size // 4)
    found = []
    try:
        for count in threads:
            torch.set_num_threads(count)
            again = None if weights is None else reading(buffer[: min(weights, size) // 4])
            found.append(CoreLimits(
                count, size, reading(buffer), again, multiplying(torch.bfloat16), multiplying(torch.float32), _int8(),
            ))  # fmt: skip
    finally:
        torch.set_num_threads(kept)
    return found


def buffer_bytes() -> int:
    """Return twice the size of the largest cache, but at most an eighth of the memory."""
    return min(max(2 * largest_cache(), SMALLEST), LARGEST, int(psutil.virtual_memory().total) // 8)


def largest_cache() -> int:
    """Return the bytes of the first core's largest cache according to Linux; 0 if unknown. A virtual machine may report
    a cache that it shares with others."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip()):
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes)


def reading(buffer: torch.Tensor) -> float:
    """Return bytes a second of the faster of two operations that read fp32 numbers once and write almost nothing: the
    dot product of a vector with itself, and a product of a matrix and a vector."""
    matrix = buffer[: len(buffer) // ROW * ROW].view(-1, ROW)
    vector = torch.ones(ROW)
    calls: list[Callable[[], Any]] = [lambda: torch.dot(buffer, buffer)]
    if len(matrix):
        calls.append(lambda: torch.mv(matrix, vector))
    return buffer.nbytes / min(map(quickest, calls))


def multiplying(dtype: torch.dtype) -> float:
    """Return operations a second of a product of square matrices; a multiplication and an addition count as two."""
    left = torch.randn(SIDE, SIDE).to(dtype)
    return 2 * SIDE**3 / quickest(lambda: torch.mm(left, left))


def _int8() -> float | None:
    left = torch.ones((SIDE, SIDE), dtype=torch.int8)
    try:
        return 2 * SIDE**3 / quickest(lambda: torch._int_mm(left, left))
    except (AttributeError, RuntimeError):  # private to torch, and not available on every machine
        return None


def quickest(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of ATTEMPTS calls, after one that warms up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    seconds = []
    for _ in range(ATTEMPTS):
        began = clock()
        call()
        seconds.append(clock() - began)
    return min(seconds)


def thread_counts(most: int) -> list[int]:
    """Return 1, the powers of two, and `most`, which is at most the number of cores that this process may use."""
    most = min(most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return sorted({*(1 << i for i in range(most.bit_length()) if 1 << i < most), most})
