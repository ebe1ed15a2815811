"""`quire bench memory`: what it measured is what was planned, as far as that is exact."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.bench import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


def test_parts_of_a_small_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    flags = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--kv-tokens", "8192"]
    assert main(["memory", *flags, "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    planned, measured = result["planned"], result["measured"]
    assert planned["all"] == planned["weights"] + planned["kv"] + planned["beside"]
    assert measured["all"] == measured["weights"] + measured["kv"] + measured["beside"]
    page = planned["kv"] // (8192 // 16)
    assert measured["kv"] == planned["kv"] + page  # and the scratch page
    assert measured["all"] > measured["weights"] + measured["kv"], "something is computed somewhere"
    assert "off by" in capsys.readouterr().out
