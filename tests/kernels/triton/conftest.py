"""Kernels run in Triton's interpreter where there is no GPU; there every access to memory is checked.

The interpreter is slow: without a GPU `make test` takes an eighth of each test's cases, always the same ones, its first
among them. The others belong to the soak."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    import memory_checker

    memory_checker.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen, here = set(), str(Path(__file__).parent)
    for item in items if INTERPRETED else ():
        if str(item.path).startswith(here):
            test = item.nodeid.partition("[")[0]
            if test in seen and zlib.crc32(item.nodeid.encode()) % 8:
                item.add_marker(pytest.mark.soak)
            seen.add(test)
