"""The memory checker sees what leaves a tensor by one number, in every way; and lets everything else pass."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; a GPU has compute-sanitizer")


@triton.jit
def _add_one(source, target, start, to, count, N: tl.constexpr, ATOMIC: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(source + start + at, mask=at < count, other=0.0) + 1.0
    if ATOMIC:
        tl.atomic_add(target + to + at, x, mask=at < count)
    else:
        tl.store(target + to + at, x, mask=at < count)


def add_one(source: torch.Tensor, target: torch.Tensor, start: int, to: int, count: int, atomic: bool = False) -> None:
    _add_one[(1,)](source, target, start, to, count, N=16, ATOMIC=atomic)


def test_one_number_beyond_is_refused() -> None:
    whole = torch.zeros(100)  # memory that is there, but wasn't given
    for start, to, count, what, size in (
        (1, 0, 10, r"load of 4 bytes at \+40", 10),
        (-1, 0, 4, r"load of 4 bytes at -4", 10),
        (0, 3, 10, r"store of 4 bytes at \+48", 12),
        (0, -1, 3, r"store of 4 bytes at -4", 12),
    ):
        with pytest.raises(TritonError, match=rf"a {what} bytes from the start of a tensor of \({size},\)"):
            add_one(whole[20:30], whole[60:72], start, to, count)
    assert not whole.any()
    with pytest.raises(TritonError, match="an atomic operation"):
        add_one(torch.zeros(10), torch.zeros(8), 0, 0, 10, atomic=True)


def test_what_lies_between_the_numbers_of_a_view_is_not_its_own() -> None:
    whole = torch.zeros(4, 16)
    add_one(torch.zeros(4), whole[:, 3:7], 0, 16, 4)  # the second row's
    assert whole[1, 3:7].tolist() == [1] * 4
    with pytest.raises(TritonError, match=r"a store of 4 bytes at \+16 bytes from the start of a tensor of \(4, 4\)"):
        add_one(torch.zeros(5), whole[:, 3:7], 0, 0, 5)
    with pytest.raises(TritonError, match="a load"):
        add_one(whole.T[3:7], torch.zeros(16), 3, 0, 2)


@triton.jit
def _mark_if(target, to, flag, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + to + at, at.to(tl.float32), mask=(at < N) & (flag > 1))


def test_a_mask_that_one_number_decides_is_a_mask() -> None:
    """The interpreter has it as integers."""
    target = torch.zeros(16)
    _mark_if[(1,)](target, -100, 0, N=16)
    assert not target.any()
    with pytest.raises(TritonError, match="a store of 4 bytes at -4 bytes"):
        _mark_if[(1,)](target, -1, 2, N=16)


@triton.jit
def _swap_first(target, at):
    tl.atomic_cas(target + at, 0, 1)


def test_atomic_operations_are_checked() -> None:
    target = torch.zeros(3, dtype=torch.int32)
    _swap_first[(1,)](target, 2)
    assert target.tolist() == [0, 0, 1]
    with pytest.raises(TritonError, match="an atomic operation"):
        _swap_first[(1,)](target, 3)
