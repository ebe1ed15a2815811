"""API keys, from a file or the environment. A key is never shown, nor taken from the command line."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import StartupError

KEY_VARIABLE = "QUIRE_API_KEY"


def read_keys(file: str | None) -> tuple[str, ...]:
    """The API keys: lines of `file`, else what QUIRE_API_KEY holds, else none. A key is never shown."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key,) if key else ()
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--api-key-file {file} can't be read", "Give a text file with one key a line") from error
    if not lines:
        raise StartupError(f"--api-key-file {file} holds no key", "Give a text file with one key a line")
    return tuple(lines)
