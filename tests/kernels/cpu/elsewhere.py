"""For pytest -p: the kernels are those in the folder that QUIRE_TEST_KERNELS names, and each packed weight has memory
of its own, with what watches addresses on both sides."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quire.kernels.cpu import library_loader, weight_arena

library_loader.BUILT = Path(os.environ["QUIRE_TEST_KERNELS"])
assert hasattr(weight_arena, "BLOCK_BYTES"), "large weights have blocks of their own"
assert hasattr(weight_arena, "_map_block"), "it makes them"
weight_arena.BLOCK_BYTES = 0
weight_arena._map_block = lambda size: torch.empty(size, dtype=torch.uint8).numpy()
