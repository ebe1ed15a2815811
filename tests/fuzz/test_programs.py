"""Template programs, each within 1 s and 256 MB."""

from __future__ import annotations

import json
import subprocess
import sys

import programs
import pytest


def run(count: int) -> dict[str, object]:
    """In a program of its own, whose children are the templates' processes alone."""
    done = subprocess.run([sys.executable, programs.__file__, str(count)], capture_output=True, text=True, check=True)
    print(done.stdout)
    told: dict[str, object] = json.loads(done.stdout)
    return told


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_template_programs() -> None:
    told = run(300)
    assert told["seconds"] < 1.0  # type: ignore[operator]
    assert told["peak_kib"] < 256 << 10  # type: ignore[operator]
    assert told["ends"].get("rendered", 0) > 10  # type: ignore[attr-defined]
    assert told["ends"].get("size", 0) > 10  # type: ignore[attr-defined]
