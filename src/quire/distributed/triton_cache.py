"""A cache folder for Triton if its own can't be written, for other ranks and for the next start."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

TRITON_CACHE_DIR = "TRITON_CACHE_DIR"


def triton_cache_environment() -> dict[str, str]:
    """Return the variable that names a private folder of this user among temporary files, if Triton's own can't be
    written; else nothing. Return nothing too if another user could write the folder, since the files in it are
    executed."""
    if TRITON_CACHE_DIR in os.environ or _writable():
        return {}
    folder = Path(tempfile.gettempdir()) / f"quire-triton-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return {TRITON_CACHE_DIR: str(folder)}
    return {}


def _writable() -> bool:
    """Return True if Triton's default folder can be written."""
    try:
        folder = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home directory
        return False
    return os.access(folder, os.W_OK)
