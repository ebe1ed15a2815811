"""What kernels' tests have in common: the device, the types and kinds of launches it has, numbers and how near results
are to be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
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


def check_masks(mask_logits: Callable[[Tensor, Tensor, Tensor], None], rows: int, vocab: int, dtype: torch.dtype,
                device: torch.device) -> None:  # fmt: skip
    """Masked logits equal what unpacked bits let through, row by row, and nothing beside them is touched."""
    rng, words = np.random.default_rng(vocab), -(-vocab // 32)
    bits = rng.integers(-(2**31), 2**31, (3, words), dtype=np.int64).astype(np.int32)
    bits[0, : words // 2], bits[1, : words // 3] = 0, -1
    places = rng.integers(-1, 3, rows)
    places[0] = 0
    whole = torch.randn(rows, vocab + 5, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    logits, before = whole[:, :vocab], whole.clone()
    mask_logits(logits, torch.from_numpy(places).to(device), torch.from_numpy(bits).to(device))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    kept = torch.from_numpy(np.stack([allowed[p] if p >= 0 else np.ones(vocab, bool) for p in places])).to(device)
    assert torch.equal(logits, torch.where(kept, before[:, :vocab], -torch.inf))
    assert torch.equal(whole[:, vocab:], before[:, vocab:])
