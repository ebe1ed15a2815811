"""For pytest -p: the kernels are those in the folder that QUIRE_TEST_KERNELS names, and each packed weight has memory
of its own, with what watches addresses on both sides."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quire.data.kernels.cpu import linear, loading

loading.BUILT = Path(os.environ["QUIRE_TEST_KERNELS"])
linear.MAPPED = 0
linear._mapped = lambda size: torch.empty(size, dtype=torch.uint8)
