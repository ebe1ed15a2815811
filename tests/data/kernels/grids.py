"""What kernels' tests have in common: the device, the types and kinds of launches it has, numbers and how near results
are to be."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
HALVES = DTYPES[1:] or DTYPES
PDL = (False, True) if CUDA and torch.cuda.get_device_capability()[0] >= 9 else (False,)
TYPES = pytest.mark.parametrize("dtype", DTYPES)
LAUNCHES = pytest.mark.parametrize(("dtype", "pdl"), [*product(DTYPES, PDL)])
# Infinite values on the way are wanted; NumPy warns of them in the interpreter.
INFINITE = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_rounded(got: Tensor, want: Tensor, atol: float = 2e-6) -> None:
    """got is want (fp64) rounded to got's dtype, but for fp32's own errors on the way."""
    half_ulp = 0.5 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=1.01 * half_ulp + 2e-6, atol=atol, equal_nan=True)
