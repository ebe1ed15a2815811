"""API keys and admin keys, from a file or the environment. A key is never shown, nor taken from the command line."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import StartupError

KEY_VARIABLE = "QUIRE_API_KEY"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY"


def read_keys(file: str | None, flag: str = "--api-key-file", variable: str = KEY_VARIABLE) -> tuple[str, ...]:
    """Keys: lines of `file`, which `flag` named, else what the environment's `variable` holds, else none."""
    if file is None:
        key = os.environ.get(variable, "").strip()
        return (key,) if key else ()
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{flag} {file} can't be read", "Give a text file with one key a line") from error
    if not lines:
        raise StartupError(f"{flag} {file} holds no key", "Give a text file with one key a line")
    return tuple(lines)
