"""`quire bench` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.bench import main


def bench(folder: Path, *args: str) -> dict[str, Any]:
    """The document that it writes."""
    out = folder / "benched" / "result.json"
    assert main([*args, "--out", str(out)]) == 0
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def results(folder: Path, *args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = bench(folder, *args)["results"]
    return found
