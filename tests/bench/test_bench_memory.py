"""`quire bench memory`: what it measured is what was planned, as far as that is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


def test_parts_of_a_small_engine(tmp_path: Path) -> None:
    """In a process of its own: what one held before and gave back is there still, and wouldn't count."""
    out = tmp_path / "memory.json"
    flags = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--kv-tokens", "8192"]
    done = subprocess.run(
        [sys.executable, "-m", "quire", "bench", "memory", *flags, "--max-num-seqs", "8",
         "--max-num-batched-tokens", "256", "--out", str(out)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "off by" in done.stdout
    (result,) = json.loads(out.read_text())["results"]
    planned, measured = result["planned"], result["measured"]
    assert planned["all"] == planned["weights"] + planned["kv"] + planned["beside"]
    assert measured["all"] == measured["weights"] + measured["kv"] + measured["beside"]
    page = planned["kv"] // (8192 // 16)
    assert measured["kv"] == planned["kv"] + page  # and the scratch page
    assert measured["all"] > measured["weights"] + measured["kv"], "something is computed somewhere"
