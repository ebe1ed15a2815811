"""Kernels run in Triton's interpreter where there is no GPU; there every access to memory is checked."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    import memory_checker

    memory_checker.install()
