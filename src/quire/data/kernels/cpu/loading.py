"""Finds the kernels' library that suits this machine."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

from quire.data.kernels.cpu.library import Library
from quire.data.kernels.cpu.variants import features, variants

BUILT = Path(__file__).parent / "built"


def suited(only: str | None = None) -> Path | None:
    """The best library that is built and that this machine runs; `only`: that one, "off" none."""
    has = features()
    for variant in variants():
        path = BUILT / f"{variant.name}.so"
        if variant.needs <= has and path.exists() and only in (None, "", variant.name):
            return path
    return None


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The process's own, with as many threads as torch; None where there is none. QUIRE_CPU_KERNELS names one, or is
    "off"."""
    path = suited(os.environ.get("QUIRE_CPU_KERNELS"))
    return None if path is None else Library(path, torch.get_num_threads())
