"""For pytest -p: the kernels are those in the folder that QUIRE_TEST_KERNELS names, and each packed weight has memory
of its own, with what watches addresses on both sides."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quire.data.kernels.cpu import loading, memory

loading.BUILT = Path(os.environ["QUIRE_TEST_KERNELS"])
assert hasattr(memory, "BLOCK_BYTES"), "large weights have blocks of their own"
assert hasattr(memory, "_map_block"), "it makes them"
memory.BLOCK_BYTES = 0
memory._map_block = lambda size: torch.empty(size, dtype=torch.uint8).numpy()
