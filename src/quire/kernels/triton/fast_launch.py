"""Kernel launches with less overhead in Python: the compiled kernel, which Triton selects anew at each launch, is
cached by all properties of the arguments on which it depends. This matters where kernels are launched one by one: in
steps of more tokens than graphs are captured for, and during capture.

If Triton's version is not in VERSIONS, or kernels are interpreted, Triton launches them.
"""

from __future__ import annotations

from functools import partial
from numbers import Integral
from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

VERSIONS = ("3.6", "3.7")
"""Versions of Triton in which a launch returns the compiled kernel, whose `run` takes the arguments passed here."""

INTEGERS: Any = (int, Integral)
"""Types of integers, NumPy's included."""


class FastLauncher:
    """Wraps a kernel: `launcher[grid](...)` launches it as `kernel[grid](...)` does. Arguments given by name must be
    constexpr. Launches whose arguments have equal constants and the same kinds share a compiled kernel; `argument_kind`
    distinguishes more kinds than Triton does, never fewer."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = [param.name for param in kernel.params]
        self.is_constant = [param.is_constexpr for param in kernel.params]
        self.compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        kinds = [x if constant else argument_kind(x) for x, constant in zip(args, self.is_constant)]
        key = (device, *kinds, *options.items())
        cached = self.compiled.get(key)
        if cached is None:
            # Threads that compile the same kernel at once store equal entries.
            self.compiled[key] = self.kernel[grid](*args, **options), self._constants(len(args), options)
            return
        knobs = triton.knobs.runtime
        if knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls:  # only Triton's launch calls profilers
            self.kernel[grid](*args, **options)
            return
        (x, y, z), (compiled, constants) = (*grid, 1, 1)[:3], cached
        stream = driver.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)

    def _constants(self, given: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """Return the values of the parameters after the first `given` ones."""
        rest = self.names[given:]
        assert all(self.is_constant[given:]), f"{self.kernel.__name__}: only constexpr parameters are given by name"
        return tuple(options[name] for name in rest)


def argument_kind(x: Any) -> Any:
    """Return all properties of an argument, not constexpr, on which a compiled kernel may depend: for a tensor its type
    and whether its address is a multiple of 16, for a tensor descriptor its type and block shape, for an integer
    whether it is 1 or a multiple of 16, and its width."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    if x is None or x is True or x is False:
        return x
    if isinstance(x, float):
        return float
    if isinstance(x, INTEGERS):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    raise TypeError(f"fast_launch does not take arguments of type {type(x).__name__}")


def fast_launch(kernel: Any) -> Any:
    """Return the kernel with faster launches, or the kernel itself if Triton's version is not in VERSIONS or it is
    interpreted."""
    supported = ".".join(triton.__version__.split(".")[:2]) in VERSIONS
    return FastLauncher(kernel) if supported and isinstance(kernel, JITFunction) else kernel
