"""Launches through Quick: what was compiled is found again exactly where Triton itself would take it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.knobs import HookChain
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton import fast_launch

STORE = torch.zeros(4096, dtype=torch.uint8)
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)
INTS = st.one_of(
    st.integers(-40, 40), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63 - 1])
)
ARGS = st.one_of(
    INTS,
    st.floats(allow_nan=False),
    st.none(),
    st.builds(
        lambda at, dtype: STORE[at * dtype.itemsize : 64 * dtype.itemsize].view(dtype)[:8],
        st.integers(0, 20),
        st.sampled_from(TYPES),
    ),
    st.builds(
        lambda dtype, shape, block: TensorDescriptor.from_tensor(STORE.view(dtype)[:256].view(shape), list(block)),
        st.sampled_from(TYPES),
        st.sampled_from([(16, 16), (8, 32)]),
        st.sampled_from([(4, 16), (8, 16)]),
    ),
)


@given(ARGS, ARGS, st.booleans(), st.booleans())
def test_arguments_of_one_kind_are_specialised_alike(one: Any, other: Any, value: bool, alignment: bool) -> None:
    """By Triton's own rule, whatever a kernel asks not to be specialised by."""
    from triton._C.libtriton import native_specialize_impl

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    if fast_launch.argument_kind(one) == fast_launch.argument_kind(other):
        first, second = (native_specialize_impl(type(backend), x, False, value, alignment) for x in (one, other))
        assert first == second


class Kernel:
    """In place of one of Triton's: says what it was launched with, and by which way."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "n", "A", "B")]
        self.compiled: list[tuple[Any, ...]] = []
        self.run: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            which = len(self.compiled)
            return SimpleNamespace(
                run=lambda *given: self.run.append((which, *given)), function="f", packed_metadata="m"
            )

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    runtime = SimpleNamespace(launch_enter_hook=HookChain(), launch_exit_hook=HookChain())
    fake = SimpleNamespace(
        runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)), knobs=SimpleNamespace(runtime=runtime)
    )
    monkeypatch.setattr(fast_launch, "triton", fake)
    return Kernel()


def test_a_second_launch_goes_straight_to_what_was_compiled(kernel: Kernel) -> None:
    launched = fast_launch.FastLauncher(kernel)
    x, y = torch.zeros(16), torch.ones(16)
    launched[(3,)](x, 32, B=5, A=4, num_warps=2)
    launched[(7, 2)](y, 48, B=5, A=4, num_warps=2)
    assert len(kernel.compiled) == 1
    which, *given, first, n, a, b = kernel.run[0]
    assert (which, given, n, a, b) == (1, [7, 2, 1, 77, "f", "m", None, None, None], 48, 4, 5)
    assert first is y


SAME = {"A": 4, "B": 5}


@pytest.mark.parametrize(
    ("x", "more", "options"),
    [
        (torch.zeros(17)[1:], (32,), SAME),
        (torch.zeros(16, dtype=torch.int64), (32,), SAME),
        *((torch.zeros(16), (number,), SAME) for number in (33, 1, 2**32)),
        (torch.zeros(16), (32,), {"A": 5, "B": 4}),
        (torch.zeros(16), (32,), {**SAME, "num_warps": 4}),
        (torch.zeros(16), (32, 3), {"B": 5}),
    ],
)
def test_another_kind_is_compiled_anew(
    kernel: Kernel, x: torch.Tensor, more: tuple[int, ...], options: dict[str, int]
) -> None:
    launched = fast_launch.FastLauncher(kernel)
    for run in ([], [1, 2]):
        launched[(1,)](torch.zeros(16), 32, **SAME)
        launched[(1,)](x, *more, **options)
        assert len(kernel.compiled) == 2
        assert [given[0] for given in kernel.run] == run


def test_a_profiler_is_told_of_every_launch(kernel: Kernel) -> None:
    launched = fast_launch.FastLauncher(kernel)
    launched[(1,)](torch.zeros(16), 32, A=4, B=5)
    fast_launch.triton.knobs.runtime.launch_enter_hook.add(print)
    launched[(1,)](torch.zeros(16), 32, A=4, B=5)
    assert (len(kernel.compiled), kernel.run) == (2, [])


def test_other_types_are_refused(kernel: Kernel) -> None:
    launched = fast_launch.FastLauncher(kernel)
    with pytest.raises(TypeError, match="str"):
        launched[(1,)]("x", 32, A=4, B=5)
