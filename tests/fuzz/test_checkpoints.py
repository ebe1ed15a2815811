"""500 mutated checkpoints: each starts or is a StartupError, soon and in bounded memory, and no code of it runs."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import checkpoints
import pytest

COUNT = 500
SECONDS = 10.0
PEAK_KIB = 2 << 20  # for torch, and for one model after another
SECRET = "canary-of-the-environment"


class Loader:
    """A process that loads checkpoints, one after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "QUIRE_ADMIN_KEY": SECRET, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, checkpoints.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self.load(checkpoints.SOURCE, 60)  # imports torch

    def load(self, folder: Path, seconds: float) -> dict[str, Any]:
        """What came of it; a kind "hang" after so many seconds, "ended" for a process that did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n".encode())
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return {"kind": "hang", "message": "", "seconds": seconds, "peak_kib": 0}
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"kind": "ended", "message": "", "seconds": 0, "peak_kib": 0}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_mutated_checkpoints(tmp_path: Path) -> None:
    loader = Loader()
    canary, kinds, worst, peak = tmp_path / "ran", Counter[str](), 0.0, 0
    failed = []
    for seed in range(COUNT):
        folder = tmp_path / "model"
        done = checkpoints.mutate(folder, seed, canary)
        told = loader.load(folder, SECONDS)
        kinds[told["kind"]] += 1
        worst, peak = max(worst, told["seconds"]), max(peak, told["peak_kib"])
        said = told["message"]
        if told["kind"] not in ("started", "StartupError") or SECRET in said or len(said) > 1000 or canary.exists():
            failed.append((seed, done, told))
            print(failed[-1], flush=True)
            if told["kind"] in ("hang", "ended"):
                loader.close()
                loader = Loader()
        shutil.rmtree(folder)
    loader.close()
    print(dict(kinds), f"worst {worst:.1f} s, peak {peak >> 10} MiB")
    assert not failed
    assert peak < PEAK_KIB
