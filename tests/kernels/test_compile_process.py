"""Kernels are compiled in processes of their own, and the process that needs them finds them on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from quire.config import EngineConfig
from quire.startup import loader


def test_compiled_there_and_found_here(tmp_path: Path) -> None:
    """For a GPU that isn't here; and what is refused, and what happens if the process is lost."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")), "90", "232448", "132", "1", "apart"],
        capture_output=True, text=True, env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["refused"] == [False] * 5
    (compiled, read), requests = result["at once"]
    assert (compiled, read, requests) == (0, 2, 2), (
        "each of two kernels once, though four threads need it, and none of them here"
    )
    assert result["dead"] == [1, 0], "compiled here"
    (compiled, read), requests = result["later"]
    assert (compiled, read) == (1, 0)
    assert requests <= 5 + 2 + 1, "a process that is known to be lost is asked nothing"


def test_no_process_without_a_gpu_or_warm_up() -> None:
    assert loader.start_kernel_compiler(EngineConfig(device="cpu")) is None
    assert loader.start_kernel_compiler(EngineConfig(warm_up=False)) is None
