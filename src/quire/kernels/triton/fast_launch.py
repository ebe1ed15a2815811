"""Launches without most of their price in Python: what Triton works out anew at each one, which compiled kernel the
arguments are for, is kept by all that it depends on. It matters where kernels are launched one by one: in steps of more
tokens than graphs are captured for, and while graphs are captured.

Where Triton isn't a version whose internals these are, or interprets kernels, launches are Triton's own.
"""

from __future__ import annotations

from functools import partial
from numbers import Integral
from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

VERSIONS = ("3.6", "3.7")
"""Versions of Triton in which a launch returns the compiled kernel, whose `run` takes what is given here."""


class FastLauncher:
    """A kernel: `fast_launch[grid](...)` launches it as `kernel[grid](...)` does. Parameters given by name are
    constants of the compiler. What was compiled for one launch serves all that differ from it only in numbers and
    addresses of the same kind: kept apart are more kinds than Triton tells apart, never fewer."""

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
        found = self.compiled.get(key)
        if found is None:
            # Threads that compile the same at once keep the same.
            self.compiled[key] = self.kernel[grid](*args, **options), self._constants(len(args), options)
            return
        knobs = triton.knobs.runtime
        if knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls:  # a profiler is told of every launch
            self.kernel[grid](*args, **options)
            return
        (x, y, z), (compiled, constants) = (*grid, 1, 1)[:3], found
        stream = driver.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)

    def _constants(self, given: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """What parameters behind the first `given` ones are."""
        rest = self.names[given:]
        assert all(self.is_constant[given:]), f"{self.kernel.__name__}: what isn't constant is given by place"
        return tuple(options[name] for name in rest)


def argument_kind(x: Any) -> Any:
    """All of an argument that a compiled kernel may depend on, where it isn't a constant: of a tensor its type and
    whether it begins at a multiple of 16 bytes, of an integer whether it is 1, a multiple of 16, and its width."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if x is None or x is True or x is False:
        return x
    if isinstance(x, float):
        return float
    if isinstance(x, (int, Integral)):  # NumPy's too
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    raise TypeError(f"a kernel isn't launched quickly with {type(x).__name__}")


def fast_launch(kernel: Any) -> Any:
    """The kernel, for launches of many kinds but few of each."""
    known = ".".join(triton.__version__.split(".")[:2]) in VERSIONS
    return FastLauncher(kernel) if known and isinstance(kernel, JITFunction) else kernel
