"""Sums and gathers over ranks: as one process would have them, bit for bit, in one phase and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton

pytestmark = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="Triton's interpreter before 3.7 takes no loop's bound from NumPy 2.4",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reduce_ranks.py")), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (3, 4, 8))])
def test_ranks_have_the_sums_and_norms_of_one(ranks: int) -> None:
    done = run(str(ranks))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_exchange_buffer_that_is_used_again_one_call_early_is_named() -> None:
    for planted, message in (
        ("sums", "1 rows of 32, 1 shots: sums differ"),
        ("gathers", "(4,) of torch.int32: gathered ones differ"),
    ):
        done = run("2", planted)
        assert done.returncode == 1
        assert f"AssertionError: {message}\n" in done.stderr
