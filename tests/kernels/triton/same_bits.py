"""Whether rows have the same bits wherever they lie in a tile. A GPU's products do; NumPy's, which the interpreter
takes, do on some CPUs only, and are nearly the same on others."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor


def check_same(got: Tensor, want: Tensor) -> None:
    """Bit for bit where products don't depend on places, else but for the rounding of fp32."""
    if torch.cuda.is_available() or alike_anywhere():
        assert torch.equal(got, want)
    else:
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * max(1.0, largest))


@functools.cache
def alike_anywhere() -> bool:
    """NumPy's products have the same bits for a row at every place."""
    random = np.random.default_rng(0)
    for rows, depth, columns in ((64, 32, 32), (16, 64, 16), (128, 64, 64)):
        x = random.standard_normal((rows, depth), dtype=np.float32)
        w = random.standard_normal((depth, columns), dtype=np.float32)
        every = x @ w
        if not all(np.array_equal(np.roll(x, by, 0) @ w, np.roll(every, by, 0)) for by in range(1, rows)):
            return False
    return True
