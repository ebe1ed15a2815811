"""A server comes up with any number of fronts and ranks, whatever its engine's death is to do, or says why not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from served_process import COMMAND, served

SINGLE = "Only an engine with one frontend can be started again"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("death", ["exit", "restart"])
@pytest.mark.parametrize("fronts", [1, 2])
def test_every_combination(fronts: int, death: str, tp: int, tmp_path: Path) -> None:
    flags = ("--fronts", str(fronts), "--on-engine-death", death, "--tp", str(tp))
    if fronts > 1 and death == "restart":
        refused = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=120, check=False)
        assert (refused.returncode, SINGLE in refused.stderr) == (2, True), refused.stderr
        return
    with served(tmp_path, *flags, env={"OMP_NUM_THREADS": "1"}) as server:
        assert server.ready().complete().startswith(", there")
