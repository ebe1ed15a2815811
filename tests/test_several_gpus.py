"""tools/several_gpus.sh refuses arguments before it measures or writes anything."""

from __future__ import annotations

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
