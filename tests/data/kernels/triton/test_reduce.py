"""Sums and gathers over ranks: as one process would have them, bit for bit, in one phase and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("reduce_ranks.py")


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (3, 4, 8))])
def test_ranks_have_the_sums_and_norms_of_one(ranks: int) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(ranks)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
