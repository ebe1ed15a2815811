"""tools/several_gpus.sh refuses arguments before it measures or writes anything, and returns 1 if a run failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "several_gpus.sh"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage"), (["2"], "usage"), (["two", "out", "sums"], "two is no number"), (["1", "out"], "1 is no number"),
        (["2", "", "sums"], "nothing can be written"), (["2", "file/out", "sums"], "nothing can be written"),
        (["2", "out", "sums", "all"], "there is no part all"),
    ],
)  # fmt: skip
def test_arguments_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "file").touch()
    command = ["sh", str(SCRIPT), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert words in done.stderr
    assert not [*tmp_path.rglob("*.txt"), *tmp_path.rglob("*.json")]


@pytest.mark.parametrize(("python", "status"), [("true", 0), ("false", 1)])
def test_a_measurement_that_fails_shows(tmp_path: Path, python: str, status: int) -> None:
    (tmp_path / ".failed").touch()  # of a run that was ended
    command, given = ["sh", str(SCRIPT), "2", str(tmp_path), "sums", "vllm"], {**os.environ, "PYTHON": python}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=20)
    assert done.returncode == status
    assert done.stdout.count(f"exit status {status}") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]
