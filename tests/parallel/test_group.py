"""Groups of torch.distributed meet through a file without a name, and sum in rank order where that is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("group_ranks.py")


def test_a_group_sums_and_gathers() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(PROGRAM), "2"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
