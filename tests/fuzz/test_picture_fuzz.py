"""The decoders' path under a limit of memory: no mutated picture does more than be read or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MEBIBYTES = 64  # beyond what the program has at start; a picture of the fuzz has 20 at the most
WHOLE = 96  # and 16 where it is cut into tiles, twice while they are put together


def fuzzed(seed: int, count: int, mebibytes: int = MEBIBYTES, *how: str) -> dict[str, Any]:
    program = Path(__file__).parent / "picture_fuzz.py"
    command = [sys.executable, "-W", "error", str(program), str(seed), str(count), str(mebibytes), *how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["read"] + found["refused"] == count
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_some_pictures_under_a_limit_of_memory() -> None:
    found = fuzzed(1, 300)
    assert found["read"] > 10
    assert found["refused"] > 10


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_some_pictures_go_all_the_way() -> None:
    """By the eyes of five families, as they are published, to where an engine would take them."""
    found = fuzzed(2, 200, WHOLE, "whole")
    assert found["read"] > 40
    assert found["refused"] > 40


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_pictures_go_all_the_way() -> None:
    for seed in range(10):
        found = fuzzed(200 + seed, 3000, WHOLE, "whole")
        assert found["read"] > 600
        assert found["slowest"] < 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_pictures_under_a_limit_of_memory() -> None:
    for seed in range(10):
        assert fuzzed(100 + seed, 30_000)["slowest"] < 5
