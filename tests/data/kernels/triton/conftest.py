"""Kernels run in Triton's interpreter where there is no GPU; it must be told before Triton is imported. There every
access to memory is checked."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import memory_checker

    memory_checker.install()
