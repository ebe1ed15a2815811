"""The document of a measurement: one JSON schema for `quire bench` and `quire reproduce`, and its table.

{"name", "command", "machine", "date", "real", "results": [...]}; docs/performance.md describes those of throughput,
latency and serve.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from quire.bench.machine import machine
from quire.errors import StartupError

FLAT = re.compile(r'\{\n((?: *".*[^[{\n]\n)+) *\}')
"""An object without others in it, such as a result, in indented JSON. It is written on one line."""


def document(
    name: str, program: str, args: Sequence[str], results: list[dict[str, Any]], *, real: bool = True
) -> dict[str, Any]:
    """Return the document. `real` is False if any number comes from a simulation. `program` is "quire bench" or "quire
    reproduce"."""
    return {
        "name": name, "command": f"{program} {shlex.join(args)}", "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "real": real, "results": results,
    }  # fmt: skip


def check_writable(path: Path) -> None:
    """Raise StartupError if `write` would fail, before what is written is measured. Nothing is made."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise StartupError(f"{path} can't be written", "Give another --out")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a document and create its folders. Raise StartupError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(FLAT.sub(lambda found: "{" + re.sub(r"\n +", " ", found[1].strip()) + "}", text) + "\n")
    except OSError as error:
        raise StartupError(f"{path} can't be written: {error.strerror}", "Give another --out") from error


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows, one a line; columns of numbers are aligned right, others left."""
    columns = [[str(cell) for cell in column] for column in zip(head, *rows)]
    padded = []
    for column in columns:
        width = max(map(len, column))
        numbers = all(cell == "-" or cell[:1].isdigit() for cell in column[1:])
        padded.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded))


def grouped_table(head: Sequence[str], groups: Mapping[str, Sequence[Sequence[object]]]) -> str:
    """Format the rows of groups as one table, with the name of each group above its rows."""
    lines = iter(table(head, [row for rows in groups.values() for row in rows]).splitlines())
    parts = [next(lines)]
    for name, rows in groups.items():
        parts += ["", name, *islice(lines, len(rows))]
    return "\n".join(parts)


def short(value: float | None) -> str:
    """Format a number with at most four significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
