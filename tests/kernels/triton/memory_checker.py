"""A memory checker for Triton's interpreter: every address that a kernel reads or writes must lie within one of the
tensors that this launch was given, between the first and the last number of each (views too: not their whole storage).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel read or wrote where none of its arguments is."""


class Bounds:
    """The addresses that the launch under way may use: starts and ends of disjoint ranges, ascending."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.starts = self.ends = np.zeros(0, dtype=np.uint64)

    def clear(self) -> None:
        self.ranges = []

    def add(self, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            self.ranges.append((start, start + (last + 1) * tensor.element_size()))
        merged: list[list[int]] = []
        for low, high in sorted(self.ranges):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.starts, self.ends = (np.array([pair[i] for pair in merged], dtype=np.uint64) for i in range(2))

    def check(self, what: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        wanted = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, mask.shape))
        wanted = wanted[np.broadcast_to(mask, wanted.shape)].astype(np.uint64)
        if not wanted.size:
            return
        at = np.searchsorted(self.starts, wanted, side="right")
        inside = (at > 0) & (wanted + np.uint64(size) <= self.ends[np.maximum(at, 1) - 1] if len(self.ends) else False)
        if not inside.all():
            bad = int(wanted[~inside][0])
            near = min(self.ranges, key=lambda r: min(abs(bad - r[0]), abs(bad - r[1])), default=(0, 0))
            raise OutOfBounds(f"{what} of {size} bytes at {bad - near[0]:+} of a tensor of {near[1] - near[0]} bytes")


class Checked:
    """Triton's own memory operations behind the check."""

    def __init__(self, native: Any, bounds: Bounds) -> None:
        self._native, self._bounds = native, bounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def load(self, ptr: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self._bounds.check("a load", ptr, mask, np.dtype(dtype).itemsize)
        return self._native.load(ptr, mask, other, dtype)

    def store(self, ptr: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self._bounds.check("a store", ptr, mask, value.dtype.itemsize)
        return self._native.store(ptr, value, mask)

    def atomic_rmw(self, op: Any, ptr: np.ndarray, value: np.ndarray, mask: np.ndarray, sem: Any) -> Any:
        self._bounds.check("an atomic operation", ptr, mask, value.dtype.itemsize)
        return self._native.atomic_rmw(op, ptr, value, mask, sem)

    def atomic_cas(self, ptr: np.ndarray, expected: np.ndarray, value: np.ndarray, sem: Any) -> Any:
        self._bounds.check("an atomic operation", ptr, np.ones_like(ptr, dtype=bool), value.dtype.itemsize)
        return self._native.atomic_cas(ptr, expected, value, sem)


def install() -> None:
    """For all launches of this process from now on."""
    bounds = Bounds()
    convert, launch = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def noted(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            bounds.add(argument)
        return convert(argument)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        bounds.clear()
        return launch(self, *args, **kwargs)

    interpreter._interpreter = Checked(interpreter._interpreter, bounds)
    interpreter._implicit_cvt = noted
    interpreter.GridExecutor.__call__ = launched
