"""Where Triton keeps what it compiles, if its own folder can't be written: other ranks, and the next start, find it."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

TRITON_CACHE_DIR = "TRITON_CACHE_DIR"


def triton_cache_environment() -> dict[str, str]:
    """The variable that names a folder of this user's alone, among temporary files, where a home can't be written; else
    nothing, and so where somebody else has such a folder: what is in it is run."""
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
    """The folder that Triton chooses by itself."""
    try:
        folder = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # there is no home
        return False
    return os.access(folder, os.W_OK)
