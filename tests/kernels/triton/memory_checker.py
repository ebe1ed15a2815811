"""A memory checker for Triton's interpreter: every address that a kernel reads or writes must be one of a number of the
tensors that this launch was given. Of a view those numbers count that it has, not what lies between them.

It doesn't know which tensor an address was meant for: one that lands in another argument passes, as does a wrong page
of the right pool. Tests that compare results are for these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel read or wrote where none of its arguments is."""


class Bounds:
    """The numbers that the launch under way may use."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def check(self, what: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        wanted = np.broadcast_to(addresses, shape)[np.broadcast_to(mask, shape).astype(np.bool_)].astype(np.int64)
        for tensor in self.tensors:
            if wanted.size:
                wanted = wanted[~_within(tensor, wanted, size)]
        if wanted.size:
            near = min(self.tensors, key=lambda tensor: abs(int(wanted[0]) - tensor.data_ptr()))
            raise OutOfBounds(
                f"{what} of {size} bytes at {int(wanted[0]) - near.data_ptr():+} bytes from the start of a tensor of "
                f"{tuple(near.shape)} {near.dtype} with strides {near.stride()}"
            )


def _within(tensor: torch.Tensor, addresses: np.ndarray, size: int) -> np.ndarray:
    """Which of these are the addresses of `size` bytes of its numbers. For views whose numbers don't overlap."""
    left, odd = np.divmod(addresses - tensor.data_ptr(), tensor.element_size())
    inside = (left >= 0) & (odd == 0) & (tensor.numel() > 0) & (size <= tensor.element_size())
    for stride, many in sorted(zip(tensor.stride(), tensor.shape), reverse=True):
        if stride:
            left = left - np.clip(left // stride, 0, many - 1) * stride
    return inside & (left == 0)


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
            bounds.tensors.append(argument)
        return convert(argument)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return launch(self, *args, **kwargs)
        finally:
            bounds.tensors.clear()  # nobody's memory is kept from going

    interpreter._interpreter = Checked(interpreter._interpreter, bounds)
    interpreter._implicit_cvt = noted
    interpreter.GridExecutor.__call__ = launched
